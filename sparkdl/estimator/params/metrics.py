"""The Param of what a model is measured by while it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pyspark.ml.param import Param, Params

from sparkdl.metrics import Metrics


def _metrics(value: Any) -> dict[str, Any] | None:
    return None if value is None else dict(Metrics.of(value).makers)


class MetricParams(Params):
    """The Param of ``TorchEstimator``; its docstring says what it is for."""

    metrics: Param[dict[str, Any] | None] = Param(
        Params._dummy(),
        "metrics",
        "torchmetrics by name, measured on the held-out rows after each epoch; None for none",
        typeConverter=_metrics,
    )

    def getMetrics(self) -> dict[str, Any] | None:
        """Gets the value of metrics or its default value."""
        return self.getOrDefault(self.metrics)

    def setMetrics(self, value: Mapping[str, Any] | None) -> Self:
        """Sets the value of metrics."""
        self._set(metrics=value)
        return self
