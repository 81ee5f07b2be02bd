"""The Params for what is trained, and by which steps."""

from __future__ import annotations

from typing import Any, Self

from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import HasSeed

from sparkdl.errors import ConfigError
from sparkdl.spark.rows.converters import (
    any_seed,
    function,
    nonempty_text,
    one_of,
    optional,
    positive,
    whole,
)

SEVERAL_OPTIMIZERS = (
    "A training with several optimizers, such as a GAN's, needs a loop of its own: write it as a "
    "function and run it on the workers with sparkdl.run(function)"
)


def _loss(value: Any) -> Any:
    if isinstance(value, str) and value == "model":
        return value
    return function("loss", "a function of (outputs, targets), or 'model' for the model's own")(
        value
    )


def _optimizer(value: Any) -> Any:
    if isinstance(value, (dict, list, tuple)):
        raise ConfigError(f"optimizer must be a single one, got {len(value)}. {SEVERAL_OPTIMIZERS}")
    example = "for example partial(torch.optim.SGD, lr=0.1)"
    return function("optimizer", f"a function of the model's parameters, {example}")(value)


class TrainingParams(HasSeed):
    """Params of ``TorchEstimator``; its docstring says what each is for."""

    model: Param[Any] = Param(
        Params._dummy(),
        "model",
        "an nn.Module, or a function or class without arguments that builds one",
        typeConverter=function("model", "an nn.Module or a function that builds one"),
    )
    loss: Param[Any] = Param(
        Params._dummy(),
        "loss",
        "(outputs, targets) -> scalar tensor, the mean over the minibatch; or 'model' for the one "
        "that the model computes when it is given the labels",
        typeConverter=_loss,
    )
    optimizer: Param[Any] = Param(
        Params._dummy(),
        "optimizer",
        "parameters -> Optimizer, for example partial(torch.optim.SGD, lr=0.1); or "
        "named_parameters -> Optimizer, of pairs (name, parameter)",
        typeConverter=_optimizer,
    )
    scheduler: Param[Any] = Param(
        Params._dummy(),
        "scheduler",
        "optimizer -> LRScheduler, for example partial(CosineAnnealingLR, T_max=10); None for none",
        typeConverter=optional(function("scheduler", "a function optimizer -> LRScheduler")),
    )
    schedulerEvery: Param[str] = Param(
        Params._dummy(),
        "schedulerEvery",
        "when the scheduler takes a step: every 'epoch' or every 'step' of the optimizer",
        typeConverter=one_of("schedulerEvery", ("epoch", "step")),
    )
    schedulerMetric: Param[str | None] = Param(
        Params._dummy(),
        "schedulerMetric",
        "the one of metrics that ReduceLROnPlateau follows; None for the loss",
        typeConverter=optional(nonempty_text("schedulerMetric")),
    )
    epochs: Param[int] = Param(
        Params._dummy(),
        "epochs",
        "passes over the data (>= 1)",
        typeConverter=whole("epochs", 1),
    )
    batchSize: Param[int] = Param(
        Params._dummy(),
        "batchSize",
        "rows per minibatch on each worker (>= 1)",
        typeConverter=whole("batchSize", 1),
    )
    clipNorm: Param[float | None] = Param(
        Params._dummy(),
        "clipNorm",
        "the largest norm of all gradients together (> 0); larger ones are scaled down to it "
        "before each optimizer step; None for no limit",
        typeConverter=optional(positive("clipNorm")),
    )
    precision: Param[str] = Param(
        Params._dummy(),
        "precision",
        "of the forward pass and the loss: 'float32' (the parameters' own), or 'bf16' by autocast",
        typeConverter=one_of("precision", ("float32", "bf16")),
    )

    seed: Param[int] = Param(
        Params._dummy(), "seed", "random seed.", typeConverter=any_seed("seed")
    )

    def getModel(self) -> Any:
        """Gets the value of model."""
        return self.getOrDefault(self.model)

    def setModel(self, value: Any) -> Self:
        """Sets the value of model."""
        self._set(model=value)
        return self

    def getLoss(self) -> Any:
        """Gets the value of loss."""
        return self.getOrDefault(self.loss)

    def setLoss(self, value: Any) -> Self:
        """Sets the value of loss."""
        self._set(loss=value)
        return self

    def getOptimizer(self) -> Any:
        """Gets the value of optimizer."""
        return self.getOrDefault(self.optimizer)

    def setOptimizer(self, value: Any) -> Self:
        """Sets the value of optimizer."""
        self._set(optimizer=value)
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

    def getSchedulerMetric(self) -> str | None:
        """Gets the value of schedulerMetric or its default value."""
        return self.getOrDefault(self.schedulerMetric)

    def setSchedulerMetric(self, value: str | None) -> Self:
        """Sets the value of schedulerMetric."""
        self._set(schedulerMetric=value)
        return self

    def getEpochs(self) -> int:
        """Gets the value of epochs or its default value."""
        return self.getOrDefault(self.epochs)

    def setEpochs(self, value: int) -> Self:
        """Sets the value of epochs."""
        self._set(epochs=value)
        return self

    def getBatchSize(self) -> int:
        """Gets the value of batchSize or its default value."""
        return self.getOrDefault(self.batchSize)

    def setBatchSize(self, value: int) -> Self:
        """Sets the value of batchSize."""
        self._set(batchSize=value)
        return self

    def getClipNorm(self) -> float | None:
        """Gets the value of clipNorm or its default value."""
        return self.getOrDefault(self.clipNorm)

    def setClipNorm(self, value: float | None) -> Self:
        """Sets the value of clipNorm."""
        self._set(clipNorm=value)
        return self

    def getPrecision(self) -> str:
        """Gets the value of precision or its default value."""
        return self.getOrDefault(self.precision)

    def setPrecision(self, value: str) -> Self:
        """Sets the value of precision."""
        self._set(precision=value)
        return self

    def setSeed(self, value: int) -> Self:
        """Sets the value of seed."""
        self._set(seed=value)
        return self
