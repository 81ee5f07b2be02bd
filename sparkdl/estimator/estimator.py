"""``TorchEstimator``: train a PyTorch model on a Spark DataFrame."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Generic, Literal, Self, TypeVar, overload

import torch
from pyspark.ml import Estimator
from pyspark.ml.param import Param
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.callbacks import Callback, WorkerCallback
from sparkdl.checkpoint.policy import OtherTrainingError
from sparkdl.checkpoint.trust import TrustArgument
from sparkdl.driver import Outcome, run
from sparkdl.errors import CallbackError, ConfigError
from sparkdl.estimator.checks.preflight import Preflight
from sparkdl.estimator.checks.values import UnbalancedError
from sparkdl.estimator.fitted import FittedModel
from sparkdl.estimator.model import TorchModel
from sparkdl.estimator.params.arguments import arguments_are_params
from sparkdl.estimator.params.estimator import EstimatorParams
from sparkdl.estimator.params.outputs import OutputParams
from sparkdl.estimator.params.settings import settings_of
from sparkdl.estimator.persistence import EstimatorReader, EstimatorWriter
from sparkdl.estimator.progress import ProgressBar
from sparkdl.feed.columns.schema import BatchTransform
from sparkdl.process.lazy_compiler import compiler_deferred
from sparkdl.protocols import (
    LossFunction,
    ModelBuilder,
    OptimizerBuilder,
    SchedulerBuilder,
    SequenceInput,
)
from sparkdl.report import TrainingSummary
from sparkdl.spark.closures.accumulators import uncounted
from sparkdl.spark.cluster.gpus import gpu_profile
from sparkdl.spark.cluster.slots import queued
from sparkdl.spark.diagnostics.console import driver_hosts
from sparkdl.spark.launch.launcher import launch
from sparkdl.strategies import ParameterAveraging, Strategy

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=FittedModel)
ParamMap = dict[Param[Any], Any]


class BaseEstimator(
    Estimator[M], EstimatorParams, MLWritable, MLReadable["BaseEstimator[Any]"], Generic[M]
):
    """Trains a PyTorch model; subclasses say what kind of model comes out.

    They define ``_model``: the arguments of ``FittedModel`` -> the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(strategy=ParameterAveraging())

    def _model(self, *args: Any, **kwargs: Any) -> M:
        raise NotImplementedError

    def write(self) -> EstimatorWriter:
        """A writer: ``estimator.write().overwrite().save(path)``."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls, *, trust: TrustArgument = False) -> EstimatorReader:
        """A reader; for ``trust`` see ``load``."""
        return EstimatorReader(cls, trust=trust)

    @classmethod
    def load(cls, path: str, *, trust: TrustArgument = False) -> Self:
        """Load a saved estimator.

        Args:
            path: where it was saved.
            trust: names of the modules that its classes and functions come from, for example
                ``["mypackage.models"]``; torch's and sparkdl's strategies need no trust. True
                trusts everything, even pickled Params, which run their author's code.

        Raises:
            ConfigError: there is no estimator, it is damaged, or a Param is not trusted.
        """
        estimator: Self = cls.read(trust=trust).load(path)
        return estimator

    @overload
    def fit(
        self,
        dataset: DataFrame,
        params: ParamMap | None = None,
        *,
        warm_start: FittedModel | None = None,
    ) -> M: ...

    @overload
    def fit(
        self,
        dataset: DataFrame,
        params: list[ParamMap] | tuple[ParamMap, ...],
        *,
        warm_start: FittedModel | None = None,
    ) -> list[M]: ...

    def fit(
        self,
        dataset: DataFrame,
        params: ParamMap | list[ParamMap] | tuple[ParamMap, ...] | None = None,
        *,
        warm_start: FittedModel | None = None,
    ) -> M | list[M]:
        """Train the model on a DataFrame.

        Args:
            dataset: the rows.
            params: values of Params for this call, by Param; or a list of such dicts, each of which
                gives a model.
            warm_start: a model whose parameters and buffers the training starts from, instead of
                those that ``model`` builds. The optimizer and its schedule start over, and so does
                the history. A checkpoint takes precedence over it, and is refused if it was made
                with another one.

        Returns:
            The trained model; a list of them for a list of ``params``.

        Raises:
            ModelError: the model cannot be trained, or ``warm_start`` does not fit it.
        """
        if warm_start is None:
            return super().fit(dataset, params)  # type: ignore[arg-type] # lists too
        if not isinstance(warm_start, FittedModel):
            raise ConfigError(
                f"warm_start must be a TorchModel, got one of type {type(warm_start).__name__}"
            )
        if isinstance(params, (list, tuple)):
            return [self.fit(dataset, each, warm_start=warm_start) for each in params]
        changed = self.copy(params) if params else self
        return changed._fit(dataset, warm_start)

    def _fit(self, dataset: DataFrame, warm_start: FittedModel | None = None) -> M:
        """Called by ``fit``; see the class."""
        # What is made in the caller's inference mode could not be trained.
        with torch.inference_mode(False), compiler_deferred():
            return self._trained(dataset, warm_start)

    def _trained(self, dataset: DataFrame, warm_start: FittedModel | None) -> M:
        with uncounted():
            ready = Preflight(self, dataset, None if warm_start is None else warm_start.module)
        spark, workers = dataset.sparkSession, ready.workers
        with (
            queued(spark, workers.num_tasks, gpu_profile(spark, workers.device)),
            ProgressBar(self.getEpochs(), visible=self.getProgress()) as progress,
        ):
            model = self._train_or_read_first(ready, progress)
        return self._copyValues(model)

    def _train_or_read_first(self, ready: Preflight, progress: ProgressBar) -> M:
        """Train; if the first epoch cannot be streamed after all, read all rows before it."""
        refused = None
        try:
            return self._train(ready, progress)
        except UnbalancedError as found:
            logger.info("training starts over: %s", found)
        except OtherTrainingError as error:
            if not ready.job.feed.stream_first_epoch:
                raise
            # Its checkpoint says that the rows, too unequal to be streamed, were read first.
            refused = error
        # After the handlers, since a second attempt's errors would be chained to the first's.
        ready.read_first()
        try:
            return self._train(ready, progress)
        except OtherTrainingError as error:
            raise (refused or error) from None

    def _train(self, ready: Preflight, progress: ProgressBar) -> M:
        spark = ready.workers.frame.sparkSession
        host, advertised_host = driver_hosts(spark)
        try:
            outcome = run(
                ready.job,
                ready.workers.num_workers,
                launch(ready.workers, ready.job),
                host=host,
                advertised_host=advertised_host,
                checkpoints=self.checkpoint_policy(spark.sparkContext.applicationId),
                check=uncounted()(ready.check),
                on_event=progress,
                callbacks=self.driver_callbacks(),
                warm_start=ready.warm_start,
                settings=settings_of(self),
            )
        except CallbackError as error:
            if isinstance(error.model, Outcome):
                error.model = self._copyValues(self._fitted(ready, error.model))
            raise
        return self._fitted(ready, outcome)

    def _fitted(self, ready: Preflight, outcome: Outcome) -> M:
        return self._model(
            outcome.module,
            ready.checked.features,
            builder=self.getModel(),
            head=ready.head,
            widths=ready.checked.widths,
            labels=ready.checked.labels,
            loss=ready.job.loss,
            loss_use=ready.checked.loss_use,
            history=outcome.history,
            summary=TrainingSummary(outcome.recording),
        )


class TorchEstimator(BaseEstimator[TorchModel], OutputParams):
    """Trains a PyTorch model on a Spark DataFrame, with replicas that stay in the executors.

    Every argument is a pyspark.ml Param with a getter and a setter. They come in groups, one for
    each file of ``sparkdl.estimator.params``.

    Training:
        model: an nn.Module to start from, or a function or class without arguments that builds one.
            A class or function that executors can import also makes saved models loadable without
            pickle; models that torch refuses to pickle (weight_norm, TorchScript) must be given as
            one. Lazy layers take their shapes from the first row. Parameters with
            requires_grad=False are built by every worker, never exchanged, and must not change.
        loss: (outputs, targets) -> scalar tensor, the mean over the minibatch's rows; or two, (sum,
            weight): the sum over what counts, and what to divide it by. torch's losses of classes
            divide by the labels that count. One number per row is given as (rows,) or (rows, 1),
            whichever compares no row with another's target, or else as in the column. The outputs
            are all that the model returns: a tensor, tuple, dict or object. ``"model"`` for a model
            that computes its own loss: it is called with ``labelCol`` as ``labels=``, or with each
            of ``labelCols`` by name, and returns the loss as output ``loss``, first in a tuple, or
            alone.
        optimizer: parameters -> Optimizer, for example ``partial(torch.optim.SGD, lr=0.1)``. A
            function whose first argument is called ``named_parameters`` is given pairs (name,
            parameter) instead, from which it can make parameter groups.
        scheduler: optimizer -> torch's LRScheduler, for example ``partial(CosineAnnealingLR,
            T_max=10)``; None for a constant learning rate. It must depend on the number of its
            steps alone, except for ``ReduceLROnPlateau``, which follows the loss of each epoch: on
            the held-out rows, or the training loss if there are none.
        schedulerEvery: when the scheduler takes a step: every ``epoch``, or every ``step`` of the
            optimizer. Those are the steps of the worker with the most rows; workers that have fewer
            catch up at the end of the epoch.
        schedulerMetric: the one of ``metrics`` that ``ReduceLROnPlateau`` follows instead of the
            loss.
        epochs: passes over the data.
        batchSize: rows per minibatch on each worker.
        clipNorm: the largest norm of all gradients together; larger ones are scaled down to it
            before each optimizer step. None for no limit.
        precision: of the forward pass and the loss: ``float32`` (the parameters' own) or ``bf16``,
            by torch's autocast.
        seed: for the initial parameters, the shuffling and the workers' random numbers.

    Workers:
        strategy: how the replicas agree; ``ParameterAveraging(period=5)`` by default.
        numWorkers: replicas to train; None for as many as the cluster has slots. Where each Spark
            task has several GPUs, every GPU gets one, so it must be a multiple of them.
        device: where replicas live: ``auto`` (a GPU where Spark assigns or torch sees one),
            ``cpu``, ``cuda`` or ``cuda:N``.
        shipModules: whether ``fit`` and the model's ``transform`` send the executors the modules of
            your own that the other arguments need, those neither installed nor in the standard
            library; False where the executors have them already.

    Columns:
        featuresCol: the features column: a number, an array of numbers or a vector per row. The
            model receives shape (rows,) for numbers and (rows, k) for arrays and vectors.
        featuresCols: several of them, passed to the model as separate arguments; wins over
            ``featuresCol``. Integers become int64, fractions the dtype of the model's parameters.
        featuresAsDict: whether the model takes its features as one dict keyed by column name.
        featuresAsKwargs: whether it takes them as keyword arguments named like the columns.
        labelCol: the label column.
        labelCols: several of them, passed to the loss as a tuple; wins over ``labelCol``.
        weightCol: how much each row's loss counts, in any unit: weights are scaled to a mean of 1.
            A loss of your own must then give one value per row.
        columnShapes: the shape of one row by column, for nested arrays, matrices, binary columns
            and images ([channels, height, width]). The length of padded rows is None.
        columnDtypes: the tensor's dtype by column, for example ``{"x": "bfloat16"}``; for a binary
            column, also the dtype of its bytes.
        imageCols: binary columns that hold encoded images (BMP, GIF, JPEG, PNG or WebP; only the
            first of several frames); decoded to uint8 with Pillow.
        padCols: columns of arrays of unequal length, each with the number that pads shorter rows to
            the longest of their minibatch, for example ``{"tokens": 0}``.
        padInputs: what the model is given after its features for those that are padded, by column:
            ``padding_mask`` (bool, true at padding), ``attention_mask`` (1 at values, 0 at padding)
            or ``lengths``. None for a padding mask of each; ``{}`` for nothing.
        handleInvalid: ``error`` refuses NaN and infinity among the features, ``keep`` feeds them.

    Rows:
        dropLast: whether a worker leaves out the last minibatch of an epoch if it is short.
        groupByLength: whether rows of about equal length share a minibatch: the rows of 50
            minibatches at a time are sorted by length, then the minibatches are shuffled.
        shuffleRows: how the rows are spread over the workers. ``exchange``: each reads whole
            partitions, then they exchange all rows among themselves, at random and evenly;
            ``spark``: by Spark's shuffle, unless there are as many partitions as workers, of about
            equal size; ``none``: they stay where they are read, even if that leaves each worker one
            class.
        reshuffleEvery: epochs after which the workers exchange their rows again; 0 if each keeps
            its rows. If they do exchange, losing a worker makes all start again from the last
            round.
        batchTransform: Batch -> Batch, called on each training minibatch, for example to augment
            images; torch's random numbers are seeded for it by epoch, rank and minibatch.
        memoryBudget: MiB of its stored rows that a worker keeps mapped; None for no limit.
        streamFirstEpoch: whether the first epoch trains on rows as they arrive, for data that take
            long to read. Only with averaging in the driver, and for rows that come from files, of
            which each worker takes whole partitions; each block of 16 MiB is shuffled on its own.
        storeIn: where each worker keeps its rows: ``disk``, in Spark's local directory, which the
            system caches in memory as room allows; or ``memory``, in its host's /dev/shm.

    Validation:
        validationIndicatorCol: a boolean column; rows where it is true are not trained on, and the
            loss on them is in ``model.history``.
        validationFraction: the fraction of the rows that is held out instead, 0 < fraction < 1. A
            row's content (features, labels, weight) and ``seed`` decide which side it falls on, so
            that it is the same in every fit; rows with the same content are on the same side.
        metrics: what to measure on the held-out rows after each epoch: a dict by name of
            ``torchmetrics.Metric`` objects, which are copied, or of functions or classes that make
            one; or a ``MetricCollection``. They are in ``model.history``, and callbacks can follow
            them.

    Outputs:
        predictionCol: the column that the fitted model adds.
        outputCols: the columns that it adds instead if the model returns several outputs: from each
            column's name to its output's name, or position in a tuple, for example ``{"prediction":
            "logits", "embedding": "pooler_output"}``. ``predictionCol`` among them holds what
            ``outputType`` says, the others the output unchanged.
        outputType: what ``predictionCol`` holds: ``class``, ``probability``, ``raw`` or ``auto``
            (class for a classification loss, else raw).
        scoreCol: a column with each row's loss, which the fitted model adds to rows that have
            ``labelCol``; None for none. A loss of your own must give one value per row.

    Monitoring:
        callbacks: called in the driver after rounds, epochs and more; a ``WorkerCallback``, on the
            workers around each step. See ``sparkdl.callbacks``. ``EarlyStopping`` and
            ``TimeBudget`` end the training with the best epoch's model or with the model so far;
            ``ModelCheckpoint`` makes ``fit`` return the best epoch's model.
        progress: whether to show a progress bar.

    Recovery:
        timeout: the longest time to wait for any worker or round, in seconds.
        maxFailures: how often workers may be lost during a fit: their process, executor or host
            died, or they were silent for too long. Spark restarts them while the others go on;
            where the workers need each other, all restart from the driver's last copy. 0 ends the
            fit at the first loss. An error that the model raises is never retried.
        minWorkers: the fewest workers that train on; with fewer, training waits, up to ``timeout``,
            until lost ones are back.
        checkpointPath: a directory for checkpoints of the training: a path that the driver sees, or
            a URI that pyarrow.fs takes (``s3://bucket/directory``, ``hdfs://...``); None for none.
            It serves one training at a time: a second one is refused.
        checkpointEvery: epochs between two checkpoints; there is one after the last epoch too.
        checkpointRounds: rounds between two checkpoints, for long epochs; a resumed fit goes on in
            the middle of one. None for checkpoints at the ends of epochs only.
        keepLast: checkpoints to keep; with 2, one is left if the newest turns out to be damaged.
        resume: ``auto`` resumes from the newest checkpoint in ``checkpointPath`` if there is one,
            or returns its model if that training has ended, and refuses one made with other rows,
            code or settings; ``never`` starts over.

    Network:
        collectiveInterface: for strategies whose workers exchange among themselves, the network
            interface that they use: its name (``eth1``), or an address or subnet (``10.1.0.0/16``)
            in which each host has one. None for what the Spark setting
            ``spark.sparkdl.collective.interface`` says, or else the route to the driver.
        collectivePorts: the first and last port on which rank 0 may accept the other workers, as
            text (``40000-40100``). None for the setting ``spark.sparkdl.collective.ports``, or else
            any free port.
        tls: whether the workers' connections to the driver and to each other are encrypted, with a
            certificate made for this fit; they always are where Spark's settings demand it.

    Raises:
        ConfigError: an argument is unknown or out of range.
    """

    @arguments_are_params
    def __init__(
        self,
        *,
        # Training
        model: nn.Module | ModelBuilder,
        loss: LossFunction | Literal["model"],
        optimizer: OptimizerBuilder,
        scheduler: SchedulerBuilder | None = None,
        schedulerEvery: str = "epoch",
        schedulerMetric: str | None = None,
        epochs: int = 1,
        batchSize: int = 32,
        clipNorm: float | None = None,
        precision: str = "float32",
        seed: int = 0,
        # Workers
        # No type argument: the reader of job configurations looks for the subclasses of a class.
        strategy: Strategy | None = None,  # type: ignore[type-arg]
        numWorkers: int | None = None,
        device: str = "auto",
        shipModules: bool = True,
        # Columns
        featuresCol: str = "features",
        featuresCols: list[str] | None = None,
        featuresAsDict: bool = False,
        featuresAsKwargs: bool = False,
        labelCol: str = "label",
        labelCols: list[str] | None = None,
        weightCol: str | None = None,
        columnShapes: dict[str, list[int | None]] | None = None,
        columnDtypes: dict[str, str] | None = None,
        imageCols: list[str] | None = None,
        padCols: dict[str, float] | None = None,
        padInputs: dict[str, SequenceInput] | None = None,
        handleInvalid: str = "error",
        # Rows
        dropLast: bool = False,
        groupByLength: bool = False,
        shuffleRows: str = "exchange",
        reshuffleEvery: int = 0,
        batchTransform: BatchTransform | None = None,
        memoryBudget: int | None = None,
        streamFirstEpoch: bool = False,
        storeIn: str = "disk",
        # Validation
        validationIndicatorCol: str | None = None,
        validationFraction: float | None = None,
        metrics: Mapping[str, Any] | None = None,
        # Outputs
        predictionCol: str = "prediction",
        outputCols: dict[str, str | int] | None = None,
        outputType: str = "auto",
        scoreCol: str | None = None,
        # Monitoring
        callbacks: list[Callback | WorkerCallback] | None = None,
        progress: bool = True,
        # Recovery
        timeout: float = 600.0,
        maxFailures: int = 3,
        minWorkers: int = 1,
        checkpointPath: str | None = None,
        checkpointEvery: int = 1,
        checkpointRounds: int | None = None,
        keepLast: int = 2,
        resume: str = "auto",
        # Network
        collectiveInterface: str | None = None,
        collectivePorts: str | None = None,
        tls: bool = False,
    ) -> None:
        super().__init__()

    def _model(self, *args: Any, **kwargs: Any) -> TorchModel:
        return TorchModel(*args, **kwargs)
