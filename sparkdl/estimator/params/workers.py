"""The Params for who trains, and how the replicas agree."""

from __future__ import annotations

from typing import Any, Self

from pyspark.ml.param import Param, Params

from sparkdl.errors import ConfigError
from sparkdl.spark.cluster.devices import device_name
from sparkdl.spark.rows.converters import optional, switch, whole
from sparkdl.strategies import Strategy


def _strategy(value: Any) -> Strategy[Any]:
    if not isinstance(value, Strategy):
        got = f"the class {value.__name__} itself" if isinstance(value, type) else repr(value)
        raise ConfigError(
            f"strategy must be a strategy such as ParameterAveraging(period=5), got {got}"
        )
    return value


class ModuleParams(Params):
    """The Param, which the model has too, for which code the executors are sent."""

    shipModules: Param[bool] = Param(
        Params._dummy(),
        "shipModules",
        "whether modules of your own that the model and the other Params need, neither installed "
        "nor of the standard library, are sent to the executors",
        typeConverter=switch("shipModules"),
    )

    def getShipModules(self) -> bool:
        """Gets the value of shipModules or its default value."""
        return self.getOrDefault(self.shipModules)

    def setShipModules(self, value: bool) -> Self:
        """Sets the value of shipModules."""
        self._set(shipModules=value)
        return self


class WorkerParams(ModuleParams):
    """Params of ``TorchEstimator``; its docstring says what each is for."""

    strategy: Param[Strategy[Any]] = Param(
        Params._dummy(), "strategy", "how the replicas agree", typeConverter=_strategy
    )
    numWorkers: Param[int | None] = Param(
        Params._dummy(),
        "numWorkers",
        "replicas to train (>= 1); None for as many as the cluster has slots",
        typeConverter=optional(whole("numWorkers", 1)),
    )
    device: Param[str] = Param(
        Params._dummy(),
        "device",
        "where replicas live: auto, cpu, cuda or cuda:N",
        typeConverter=device_name("device"),
    )

    def getStrategy(self) -> Strategy[Any]:
        """Gets the value of strategy or its default value."""
        return self.getOrDefault(self.strategy)

    def setStrategy(self, value: Strategy[Any]) -> Self:
        """Sets the value of strategy."""
        self._set(strategy=value)
        return self

    def getNumWorkers(self) -> int | None:
        """Gets the value of numWorkers or its default value."""
        return self.getOrDefault(self.numWorkers)

    def setNumWorkers(self, value: int | None) -> Self:
        """Sets the value of numWorkers."""
        self._set(numWorkers=value)
        return self

    def getDevice(self) -> str:
        """Gets the value of device or its default value."""
        return self.getOrDefault(self.device)

    def setDevice(self, value: str) -> Self:
        """Sets the value of device."""
        self._set(device=value)
        return self
