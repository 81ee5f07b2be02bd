"""The Params for which rows are held out, and what is measured on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import HasValidationIndicatorCol

from sparkdl.errors import ConfigError
from sparkdl.metrics import Metrics
from sparkdl.spark.rows.converters import fraction, optional


def _metrics(value: Any) -> dict[str, Any] | None:
    return None if value is None else dict(Metrics.of(value).makers)


class ValidationParams(HasValidationIndicatorCol):
    """Params of ``TorchEstimator``; its docstring says what each is for."""

    validationFraction: Param[float | None] = Param(
        Params._dummy(),
        "validationFraction",
        "the fraction of the rows, chosen by their content and the seed, that are not trained on "
        "but validated with (0 < fraction < 1); None for none",
        typeConverter=optional(fraction("validationFraction")),
    )
    metrics: Param[dict[str, Any] | None] = Param(
        Params._dummy(),
        "metrics",
        "torchmetrics by name, measured on the held-out rows after each epoch; None for none",
        typeConverter=_metrics,
    )

    def getValidationFraction(self) -> float | None:
        """Gets the value of validationFraction or its default value."""
        return self.getOrDefault(self.validationFraction)

    def setValidationFraction(self, value: float | None) -> Self:
        """Sets the value of validationFraction."""
        self._set(validationFraction=value)
        return self

    def getMetrics(self) -> dict[str, Any] | None:
        """Gets the value of metrics or its default value."""
        return self.getOrDefault(self.metrics)

    def setMetrics(self, value: Mapping[str, Any] | None) -> Self:
        """Sets the value of metrics."""
        self._set(metrics=value)
        return self

    def setValidationIndicatorCol(self, value: str) -> Self:
        """Sets the value of validationIndicatorCol."""
        self._set(validationIndicatorCol=value)
        return self

    def held_out_by(self) -> str | float | None:
        """The column that marks held-out rows, or the fraction to hold out; None for neither.

        Raises:
            ConfigError: both are given.
        """
        fraction = self.getValidationFraction()
        column = "validationIndicatorCol"
        named: str | None = self.getOrDefault(column) if self.isDefined(column) else None
        if fraction is not None and named is not None:
            raise ConfigError(
                f"validationFraction={fraction:g} and validationIndicatorCol='{named}' both say "
                "which rows are held out: drop one of the two"
            )
        return named if fraction is None else fraction
