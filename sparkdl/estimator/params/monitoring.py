"""The Params for what is shown and called while a fit runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pyspark.ml.param import Param, Params

from sparkdl.callbacks import Callback, Hooks, WorkerCallback
from sparkdl.errors import ConfigError
from sparkdl.spark.rows.converters import switch

AnyCallback = Callback | WorkerCallback


def _callbacks(value: Any) -> list[AnyCallback] | None:
    if value is None:
        return None
    wanted = "callbacks must be a list of sparkdl.callbacks.Callback or WorkerCallback"
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{wanted}, got {value!r}")
    for each in value:
        if isinstance(each, type) and issubclass(each, Hooks):
            raise ConfigError(f"{wanted}, but it has the class {each.__name__}: call it")
        if not isinstance(each, AnyCallback):
            raise ConfigError(f"{wanted}, but it has {each!r}")
    return list(value)


class MonitoringParams(Params):
    """Params of ``TorchEstimator``; its docstring says what each is for."""

    callbacks: Param[list[AnyCallback] | None] = Param(
        Params._dummy(),
        "callbacks",
        "called in the driver after rounds, epochs and more, where they may end the training, or "
        "on the workers around each step; None for none",
        typeConverter=_callbacks,
    )
    progress: Param[bool] = Param(
        Params._dummy(),
        "progress",
        "whether to show a progress bar in the driver",
        typeConverter=switch("progress"),
    )

    def getCallbacks(self) -> list[AnyCallback] | None:
        """Gets the value of callbacks or its default value."""
        return self.getOrDefault(self.callbacks)

    def setCallbacks(self, value: Sequence[AnyCallback] | None) -> Self:
        """Sets the value of callbacks."""
        self._set(callbacks=value)
        return self

    def getProgress(self) -> bool:
        """Gets the value of progress or its default value."""
        return self.getOrDefault(self.progress)

    def setProgress(self, value: bool) -> Self:
        """Sets the value of progress."""
        self._set(progress=value)
        return self

    def driver_callbacks(self) -> list[Callback]:
        """The callbacks that run in the driver."""
        return [each for each in self.getCallbacks() or () if isinstance(each, Callback)]

    def worker_callbacks(self) -> tuple[WorkerCallback, ...]:
        """The callbacks that run on the workers."""
        return tuple(e for e in self.getCallbacks() or () if isinstance(e, WorkerCallback))
