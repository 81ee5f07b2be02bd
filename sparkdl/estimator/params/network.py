"""The Params for how workers and driver reach each other, and whether in secret."""

from __future__ import annotations

from typing import Any, Self

from pyspark.ml.param import Param, Params

from sparkdl.errors import ConfigError
from sparkdl.spark.cluster.network import parse_ports
from sparkdl.spark.rows.converters import switch


def _interface(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(
            "collectiveInterface must be a network interface such as 'eth1' or a subnet such as "
            f"'10.1.0.0/16', got {value!r}"
        )
    return value


def _ports(value: Any) -> str | None:
    if value is None:
        return None
    parse_ports("collectivePorts", value)
    return str(value)


class NetworkParams(Params):
    """Params of ``TorchEstimator``; its docstring says what each is for."""

    collectiveInterface: Param[str | None] = Param(
        Params._dummy(),
        "collectiveInterface",
        "network interface (eth1), address or subnet (10.1.0.0/16) by which workers reach each "
        "other; None for spark.sparkdl.collective.interface, or the route to the driver",
        typeConverter=_interface,
    )
    collectivePorts: Param[str | None] = Param(
        Params._dummy(),
        "collectivePorts",
        "first and last port on which rank 0 may accept the other workers (40000-40100); None for "
        "spark.sparkdl.collective.ports, or any free one",
        typeConverter=_ports,
    )
    tls: Param[bool] = Param(
        Params._dummy(),
        "tls",
        "whether the connections between workers and driver are encrypted; they also are where "
        "Spark's settings demand it",
        typeConverter=switch("tls"),
    )

    def getCollectiveInterface(self) -> str | None:
        """Gets the value of collectiveInterface or its default value."""
        return self.getOrDefault(self.collectiveInterface)

    def setCollectiveInterface(self, value: str | None) -> Self:
        """Sets the value of collectiveInterface."""
        self._set(collectiveInterface=value)
        return self

    def getCollectivePorts(self) -> str | None:
        """Gets the value of collectivePorts or its default value."""
        return self.getOrDefault(self.collectivePorts)

    def setCollectivePorts(self, value: str | None) -> Self:
        """Sets the value of collectivePorts."""
        self._set(collectivePorts=value)
        return self

    def getTls(self) -> bool:
        """Gets the value of tls or its default value."""
        return self.getOrDefault(self.tls)

    def setTls(self, value: bool) -> Self:
        """Sets the value of tls."""
        self._set(tls=value)
        return self
