"""The Params that say what of a training nobody else may read."""

from __future__ import annotations

from typing import Self

from pyspark.ml.param import Param, Params, TypeConverters


class SecurityParams(Params):
    """Params of ``TorchEstimator``; its docstring says what each is for."""

    tls: Param[bool] = Param(
        Params._dummy(),
        "tls",
        "whether the connections between workers and driver are encrypted; they also are where "
        "Spark's settings demand it",
        typeConverter=TypeConverters.toBoolean,
    )

    def getTls(self) -> bool:
        """Gets the value of tls or its default value."""
        return self.getOrDefault(self.tls)

    def setTls(self, value: bool) -> Self:
        """Sets the value of tls."""
        self._set(tls=value)
        return self
