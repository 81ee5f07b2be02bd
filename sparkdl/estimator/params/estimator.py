"""The Params of ``TorchEstimator``, put together from those about one subject each."""

from __future__ import annotations

from typing import Any, Self

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasSeed

from sparkdl.errors import ConfigError
from sparkdl.estimator.params.callbacks import CallbackParams
from sparkdl.estimator.params.data import DataParams
from sparkdl.estimator.params.metrics import MetricParams
from sparkdl.estimator.params.network import NetworkParams
from sparkdl.estimator.params.recovery import RecoveryParams
from sparkdl.estimator.params.schedule import ScheduleParams
from sparkdl.estimator.params.security import SecurityParams
from sparkdl.protocols import LossFunction
from sparkdl.replica.losses import ModelLoss
from sparkdl.spark.cluster.devices import device_name
from sparkdl.spark.rows.converters import (
    function,
    one_of,
    optional_positive,
    optional_whole,
    positive,
    whole,
)
from sparkdl.strategies import Strategy

SEVERAL_OPTIMIZERS = (
    "A training with several optimizers, such as a GAN's, has a loop of its own: write it as a "
    "function, and run that on the workers with sparkdl.run(function)"
)


def _loss(value: Any) -> Any:
    if isinstance(value, str) and value == "model":
        return value
    return function("loss", "a function of (outputs, targets), or 'model' for the model's own")(
        value
    )


def _optimizer(value: Any) -> Any:
    if isinstance(value, (dict, list, tuple)):
        raise ConfigError(f"optimizer must be one, got {len(value)}. {SEVERAL_OPTIMIZERS}")
    example = "for example partial(torch.optim.SGD, lr=0.1)"
    return function("optimizer", f"a function of the model's parameters, {example}")(value)


def _strategy(value: Any) -> Strategy[Any]:
    if not isinstance(value, Strategy):
        got = f"the class {value.__name__} itself" if isinstance(value, type) else repr(value)
        raise ConfigError(
            f"strategy must be a strategy such as ParameterAveraging(period=5), got {got}"
        )
    return value


class EstimatorParams(
    DataParams,
    ScheduleParams,
    CallbackParams,
    MetricParams,
    RecoveryParams,
    NetworkParams,
    SecurityParams,
    HasSeed,
):
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
    strategy: Param[Strategy[Any]] = Param(
        Params._dummy(), "strategy", "how the replicas agree", typeConverter=_strategy
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
        "rows a minibatch on each worker (>= 1)",
        typeConverter=whole("batchSize", 1),
    )
    numWorkers: Param[int | None] = Param(
        Params._dummy(),
        "numWorkers",
        "replicas to train (>= 1); None for as many as the cluster has slots",
        typeConverter=optional_whole("numWorkers", 1),
    )
    device: Param[str] = Param(
        Params._dummy(),
        "device",
        "where replicas live: auto, cpu, cuda or cuda:N",
        typeConverter=device_name("device"),
    )
    progress: Param[bool] = Param(
        Params._dummy(),
        "progress",
        "whether to show a progress bar in the driver",
        typeConverter=TypeConverters.toBoolean,
    )
    clipNorm: Param[float | None] = Param(
        Params._dummy(),
        "clipNorm",
        "the largest norm of all gradients together (> 0), to which a larger one is scaled down "
        "before each optimizer step; None for no limit",
        typeConverter=optional_positive("clipNorm"),
    )
    precision: Param[str] = Param(
        Params._dummy(),
        "precision",
        "in which forward and loss are computed: 'float32' (the parameters' own), or 'bf16' by "
        "autocast",
        typeConverter=one_of("precision", ("float32", "bf16")),
    )
    timeout: Param[float] = Param(
        Params._dummy(),
        "timeout",
        "the longest that any worker or round is waited for, in seconds (> 0)",
        typeConverter=positive("timeout"),
    )

    def setSeed(self, value: int) -> Self:
        """Sets the value of seed."""
        self._set(seed=value)
        return self

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

    def loss_function(self) -> LossFunction:
        """The loss to train with.

        Raises:
            ConfigError: it is the model's own, and another Param does not go with that.
        """
        if not isinstance(self.getLoss(), str):
            loss: LossFunction = self.getLoss()
            return loss
        if self.optional_column("weightCol") is not None:
            raise ConfigError(
                "weightCol does not go with loss='model': a model that computes its own loss "
                "gives no value a row that could be weighed. Leave one of the two out"
            )
        keywords = tuple(self.getLabelCols() or ["labels"])
        both = set(keywords) & set(self.feature_columns()) if self.getFeaturesAsKwargs() else set()
        if both:
            raise ConfigError(
                f"the model would be given '{min(both)}' twice: as a feature (featuresAsKwargs) "
                "and as a label (loss='model'). Leave it out of featuresCols"
            )
        return ModelLoss(keywords)

    def getOptimizer(self) -> Any:
        """Gets the value of optimizer."""
        return self.getOrDefault(self.optimizer)

    def setOptimizer(self, value: Any) -> Self:
        """Sets the value of optimizer."""
        self._set(optimizer=value)
        return self

    def getStrategy(self) -> Strategy[Any]:
        """Gets the value of strategy or its default value."""
        return self.getOrDefault(self.strategy)

    def setStrategy(self, value: Strategy[Any]) -> Self:
        """Sets the value of strategy."""
        self._set(strategy=value)
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

    def getProgress(self) -> bool:
        """Gets the value of progress or its default value."""
        return self.getOrDefault(self.progress)

    def setProgress(self, value: bool) -> Self:
        """Sets the value of progress."""
        self._set(progress=value)
        return self

    def getTimeout(self) -> float:
        """Gets the value of timeout or its default value."""
        return self.getOrDefault(self.timeout)

    def setTimeout(self, value: float) -> Self:
        """Sets the value of timeout."""
        self._set(timeout=value)
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
