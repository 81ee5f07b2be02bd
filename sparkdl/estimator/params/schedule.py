"""The Params of a learning rate that changes while training goes on."""

from __future__ import annotations

from typing import Any, Self

from pyspark.ml.param import Param, Params

from sparkdl.spark.rows.converters import one_of, optional_function, optional_name


class ScheduleParams(Params):
    """Params of ``TorchEstimator``; its docstring says what each is for."""

    scheduler: Param[Any] = Param(
        Params._dummy(),
        "scheduler",
        "optimizer -> LRScheduler, for example partial(CosineAnnealingLR, T_max=10); None for none",
        typeConverter=optional_function("scheduler", "a function optimizer -> LRScheduler"),
    )
    schedulerEvery: Param[str] = Param(
        Params._dummy(),
        "schedulerEvery",
        "after what the scheduler takes a step: 'epoch' or 'step' (of the optimizer)",
        typeConverter=one_of("schedulerEvery", ("epoch", "step")),
    )

    schedulerMetric: Param[str | None] = Param(
        Params._dummy(),
        "schedulerMetric",
        "which of the metrics ReduceLROnPlateau follows; None for the loss",
        typeConverter=optional_name("schedulerMetric"),
    )

    def getSchedulerMetric(self) -> str | None:
        """Gets the value of schedulerMetric or its default value."""
        return self.getOrDefault(self.schedulerMetric)

    def setSchedulerMetric(self, value: str | None) -> Self:
        """Sets the value of schedulerMetric."""
        self._set(schedulerMetric=value)
        return self

    def getScheduler(self) -> Any:
        """Gets the value of scheduler or its default value."""
        return self.getOrDefault(self.scheduler)

    def setScheduler(self, value: Any) -> Self:
        """Sets the value of scheduler."""
        self._set(scheduler=value)
        return self

    def getSchedulerEvery(self) -> str:
        """Gets the value of schedulerEvery or its default value."""
        return self.getOrDefault(self.schedulerEvery)

    def setSchedulerEvery(self, value: str) -> Self:
        """Sets the value of schedulerEvery."""
        self._set(schedulerEvery=value)
        return self
