"""The types of the module of the same name, written by tests/estimator/params/stubs.py."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn
from typing_extensions import TypedDict, Unpack

from sparkdl.callbacks import Callback, WorkerCallback
from sparkdl.estimator.params.columns import ClassParams, OutputParams
from sparkdl.estimator.params.converters import Label
from sparkdl.estimator.params.declaration import DeclaredParams
from sparkdl.feed.schema import BatchTransform
from sparkdl.outputs import OutputKey
from sparkdl.protocols import (
    LossFunction,
    ModelBuilder,
    OptimizerBuilder,
    SchedulerBuilder,
    SequenceInput,
)
from sparkdl.spark.rows.column_overrides import ImageScale
from sparkdl.strategies import Strategy

class TorchEstimatorParams(OutputParams):
    def __init__(
        self,
        *,
        model: nn.Module | ModelBuilder,
        loss: LossFunction | Literal["model"],
        optimizer: OptimizerBuilder | str,
        outputCols: dict[str, OutputKey] | None = ...,
        outputType: str = ...,
        **others: Unpack[_Arguments],
    ) -> None:
        """Set what is given.

        Training:
            model: an nn.Module, or a function or class without arguments that builds one. A class
                or function that executors can import also makes saved models loadable without
                pickle; models that torch refuses to pickle (weight_norm, TorchScript) must be given
                as one. Lazy layers take their shapes from the first row. Parameters with
                requires_grad=False are built by every worker, never exchanged, and must not change.
            loss: (outputs, targets) -> scalar tensor, the mean over the minibatch; or 'model' for
                the one that the model computes when it is given the labels. It may return two,
                (sum, weight): the sum over what counts, and what to divide it by. torch's losses of
                classes divide by the labels that count, and get one number per row in the shape of
                the outputs, (rows,) or (rows, 1). A loss of your own gets it as in the column, and
                is refused if it broadcasts it to all pairs of rows. The outputs are all that the
                model returns: a tensor, tuple, dict or object. A model with ``loss="model"`` is
                called with ``labelCol`` as ``labels=``, or with each of ``labelCols`` by name, and
                returns the loss as output ``loss``, first in a tuple, or alone.
            optimizer: parameters -> Optimizer, for example torch.optim.Adam or
                partial(torch.optim.SGD, momentum=0.9); or named_parameters -> Optimizer, of pairs
                (name, parameter); or the name of one of torch's, such as 'Adam'. It is given the
                pairs, from which it can make parameter groups, if its first argument is called
                ``named_parameters``.
            learningRate: the learning rate (> 0), passed to the optimizer as lr, in place of the
                one it has; None for the optimizer's own. Parameter groups that say their own ``lr``
                keep it, as in torch. It is refused where it would change nothing, as with
                ``OneCycleLR``, which sets the rates itself.
            scheduler: optimizer -> LRScheduler, for example partial(CosineAnnealingLR, T_max=10);
                None for none. It must depend on the number of its steps alone, except for
                ``ReduceLROnPlateau``, which follows the loss of each epoch: on the held-out rows,
                or the training loss if there are none.
            schedulerEvery: when the scheduler takes a step: every 'epoch' or every 'step' of the
                optimizer. Those are the steps of the worker with the most rows; workers that have
                fewer catch up at the end of the epoch.
            schedulerMetric: the one of metrics that ReduceLROnPlateau follows; None for the loss.
            epochs: passes over the data (>= 1).
            batchSize: rows per minibatch on each worker (>= 1).
            clipNorm: the largest norm of all gradients together (> 0); larger ones are scaled down
                to it before each optimizer step; None for no limit.
            precision: of the forward pass and the loss: 'float32' (the parameters' own), or 'bf16'
                by autocast.
            seed: random seed. For the initial parameters, the shuffling and the workers' random
                numbers.

        Workers:
            strategy: how the replicas agree. ``ParameterAveraging(period=5)`` by default. A dict
                has what is to differ in the one that there is: ``{'period': 10}``.
            numWorkers: replicas to train (>= 1); None for as many as the cluster has slots. Where
                each Spark task has several GPUs, every GPU gets one, so it must be a multiple of
                them.
            maxWorkers: the most replicas, if more may be added while the fit runs (>= 1); None for
                numWorkers. Workers are added between two epochs, where slots have become free or
                executors have started on demand, and rows are dealt anew. If some do not come back
                within a minute, and minWorkers are there, those train the epoch again from its
                start. For strategies whose workers do not exchange among themselves, in a session
                in the driver.
            device: where replicas live: auto, cpu, cuda or cuda:N. ``auto`` is a GPU where Spark
                assigns or torch sees one.
            shipModules: whether modules of your own that the model and the other Params need,
                neither installed nor of the standard library, are sent to the executors. False
                where the executors have them already.

        Columns:
            featuresCol: the features column: a number, an array of numbers or a vector per row. The
                model receives shape (rows,) for numbers and (rows, k) for arrays and vectors.
            featuresCols: several feature columns, passed to the model as separate arguments; wins
                over featuresCol. Integers become int64, fractions the dtype of the model's
                parameters.
            featuresAs: how the model takes its features: 'tensor' (each column an argument), 'dict'
                (one, keyed by column name) or 'kwargs' (keyword arguments named like the columns).
            labelCol: the label column.
            labelCols: several label columns, passed to the loss as a tuple; wins over labelCol.
            handleInvalid: what to do about rows with NaN or infinity among the features, nulls, or
                images that cannot be decoded: 'error', 'keep' or 'skip'. ``error`` refuses them;
                ``keep`` feeds NaN and infinity, and refuses the others; ``skip`` leaves them all
                out of ``fit`` and ``evaluate``, which say how many there are, and ``transform``
                gives them null predictions.
            weightCol: how much each row's loss counts, in any unit: weights are scaled to a mean of
                1. A loss of your own must then give one value per row.
            columnShapes: the shape of one row by column, where the type does not say; images have
                [channels, height, width], padded rows [None, ...]. For nested arrays, binary
                columns and images.
            columnDtypes: the tensor's dtype by column, for example 'bfloat16'; for a binary column,
                also that of its bytes.
            imageCols: columns of images: encoded ones (BMP, GIF, JPEG, PNG or WebP) in binary
                columns, decoded on the workers, or Spark's image structs. Pillow decodes them to
                uint8; only the first of several frames counts. Needs ``pip install
                'sparkdl-torch[images]'``.
            imageSize: the height and width that images of any size are brought to, turned as their
                EXIF says; None if all have the shape in columnShapes. They get 3 channels unless
                columnShapes says [1, ...] or [4, ...].
            imageFit: how images are brought to imageSize: 'crop' (fill it, and cut off what lies
                beyond), 'pad' (fit into it, and fill up with black) or 'stretch'. By Pillow's
                ``ImageOps.fit``, ``ImageOps.pad`` and ``Image.resize``.
            imageScale: as what floats a model is given images: '0..1', '0..255', or (mean, std),
                which each pixel from 0 to 1 is normalized with; None for bytes. Mean and std are
                numbers, or lists of one for each channel.
            padCols: columns of arrays of unequal length, each with the number that pads shorter
                rows to the longest of their minibatch. For example ``{"tokens": 0}``.
            padInputs: what the model is given besides padded features, by column: 'padding_mask',
                'attention_mask' or 'lengths'; None for a padding mask of each. A ``padding_mask``
                is bool, true at padding; an ``attention_mask`` 1 at values, 0 at padding. They come
                after the features; ``{}`` for nothing.

        Rows:
            dropLast: whether a worker leaves out the last minibatch of an epoch if it is short.
            groupByLength: whether rows of about equal length share a minibatch, so that little is
                padded. The rows of 50 minibatches at a time are sorted by length, then the
                minibatches are shuffled.
            shuffleRows: how the rows are spread over the workers: 'exchange' (they exchange them
                among themselves), 'spark' (by its shuffle) or 'none' (they stay where they are
                read). With ``exchange``, each reads whole partitions, then they exchange all rows
                at random and evenly. With ``none`` they stay even if that leaves each worker one
                class.
            reshuffleEvery: epochs after which the workers exchange their rows again (>= 0); 0 for
                never. If they do exchange, losing a worker makes all start again from the last
                round.
            batchTransform: Batch -> Batch, called on each training minibatch; None for none. For
                example to augment images; torch's random numbers are seeded for it by epoch, rank
                and minibatch.
            storeIn: where each worker keeps its rows: 'disk' (Spark's local directory) or 'memory'
                (/dev/shm). The system caches the local directory in memory as room allows.

        Validation:
            validationIndicatorCol: a boolean column; rows where it is true are not trained on, and
                the loss on them is in ``model.history``.
            validationFraction: the fraction of the rows, chosen by their content and the seed, that
                are not trained on but validated with (0 < fraction < 1); None for none. A row's
                content (features, labels, weight) and ``seed`` decide which side it falls on, so
                that it is the same in every fit; rows with the same content are on the same side.
            metrics: torchmetrics by name, measured on the held-out rows after each epoch; None for
                none. A dict by name of ``torchmetrics.Metric`` objects, which are copied, or of
                functions or classes that make one; or a ``MetricCollection``. They are in
                ``model.history``, and callbacks can follow them. Needs ``pip install
                'sparkdl-torch[metrics]'``.

        Outputs:
            predictionCol: the column that the fitted model adds for its predictions.
            lossCol: a column with each row's loss, which transform adds to rows that have labels;
                None for none. A loss of your own must give one value per row.
            outputCols: the columns that the model adds if it returns several outputs: from each
                column's name to its output's name, or position in a tuple; None for predictionCol
                alone. For example ``{"prediction": "logits", "embedding": "pooler_output"}``.
                ``predictionCol`` among them holds what ``outputType`` says, the others the output
                unchanged.
            outputType: what predictionCol holds: 'class' (index, double), 'probability' (vector),
                'raw' (the model's output: double or vector), or 'auto': class for a classification
                loss, else raw.

        Monitoring:
            callbacks: called in the driver after rounds, epochs and more, where they may end the
                training, or on the workers around each step; None for none. See
                ``sparkdl.callbacks``. ``EarlyStopping`` and ``TimeBudget`` end the training with
                the best epoch's model or with the model so far; ``ModelCheckpoint`` makes ``fit``
                return the best epoch's model; a ``WorkerCallback`` is called on the workers.
            progress: whether to show a progress bar in the driver.

        Recovery:
            timeout: the longest time to wait for any worker or round, in seconds (> 0).
            maxFailures: how often workers may be lost during a fit (>= 0); 0 ends it at the first
                loss. A worker is lost if its process, executor or host died, or it was silent for
                too long. Spark restarts them while the others go on; where the workers need each
                other, all restart from the driver's last copy. An error that the model raises is
                never retried.
            minWorkers: with how many workers training goes on while others are lost (>= 1). With
                fewer, training waits, up to ``timeout``, until lost ones are back.
            checkpointPath: directory for checkpoints of the training, a path or URI; None for none.
                A path that the driver sees, or a URI that pyarrow.fs takes
                (``s3://bucket/directory``, ``hdfs://...``). It serves one training at a time: a
                second one is refused.
            checkpointEvery: epochs between two checkpoints (>= 1). There is one after the last
                epoch too.
            checkpointRounds: rounds between two checkpoints within an epoch (>= 1); None for none
                within epochs. For long epochs; a resumed fit goes on in the middle of one.
            keepLast: checkpoints to keep (>= 1). With 2, one is left if the newest turns out to be
                damaged.
            resume: 'auto' resumes from the newest checkpoint if there is one; 'never' starts over.
                ``auto`` returns the model of the newest checkpoint if its training has ended, and
                refuses one made with other rows, code or settings.

        Network:
            collectiveInterface: network interface (eth1), address or subnet (10.1.0.0/16) by which
                workers reach each other; None for spark.sparkdl.collective.interface, or the route
                to the driver. For strategies whose workers exchange among themselves; of a subnet,
                each host has one address.
            collectivePorts: first and last port on which rank 0 may accept the other workers
                (40000-40100); None for spark.sparkdl.collective.ports, or any free one.
            tls: whether the connections between workers and driver are encrypted; they also are
                where Spark's settings demand it. Those of the workers to each other too; with a
                certificate made for this fit. Needs ``pip install 'sparkdl-torch[tls]'``.

        """

class TorchClassifierParams(ClassParams):
    def __init__(
        self,
        *,
        model: nn.Module | ModelBuilder,
        loss: LossFunction | Literal["model"] = ...,
        optimizer: OptimizerBuilder | str,
        rawPredictionCol: str = ...,
        probabilityCol: str = ...,
        thresholds: Sequence[float] | None = ...,
        labels: Sequence[Label] | None = ...,
        **others: Unpack[_Arguments],
    ) -> None:
        """Set what is given.

        Training:
            loss: (outputs, targets) -> scalar tensor, the mean over the minibatch; or 'model' for
                the one that the model computes when it is given the labels. It may return two,
                (sum, weight): the sum over what counts, and what to divide it by. torch's losses of
                classes divide by the labels that count, and get one number per row in the shape of
                the outputs, (rows,) or (rows, 1). A loss of your own gets it as in the column, and
                is refused if it broadcasts it to all pairs of rows. The outputs are all that the
                model returns: a tensor, tuple, dict or object. A model with ``loss="model"`` is
                called with ``labelCol`` as ``labels=``, or with each of ``labelCols`` by name, and
                returns the loss as output ``loss``, first in a tuple, or alone.

        Outputs:
            predictionCol: the column of the predicted class, a double: its index, with the labels
                where IndexToString finds them; or the label itself if ``labels`` are numbers or
                booleans.
            lossCol: a column with each row's loss, which transform adds to rows that have labels;
                None for none. A loss of your own must give one value per row.
            rawPredictionCol: the column of the outputs, a vector with a number for each class;
                empty for none.
            probabilityCol: the column of the probabilities, also a vector; empty for none. There is
                none for ``MultiMarginLoss``.
            thresholds: a number for each class; the class with the largest ratio of probability to
                threshold wins. None for the most likely class.
            labels: the classes' labels, texts, numbers, booleans or dates, in the order of the
                model's outputs; None for the indices 0, 1, ..., for what StringIndexer has left in
                the column, for false and true, or for all texts or dates that it has, sorted.

        """

class TorchRegressorParams(DeclaredParams):
    def __init__(
        self,
        *,
        model: nn.Module | ModelBuilder,
        loss: LossFunction | Literal["model"] = ...,
        optimizer: OptimizerBuilder | str,
        **others: Unpack[_Arguments],
    ) -> None:
        """Set what is given.

        Training:
            loss: (outputs, targets) -> scalar tensor, the mean over the minibatch; or 'model' for
                the one that the model computes when it is given the labels. It may return two,
                (sum, weight): the sum over what counts, and what to divide it by. torch's losses of
                classes divide by the labels that count, and get one number per row in the shape of
                the outputs, (rows,) or (rows, 1). A loss of your own gets it as in the column, and
                is refused if it broadcasts it to all pairs of rows. The outputs are all that the
                model returns: a tensor, tuple, dict or object. A model with ``loss="model"`` is
                called with ``labelCol`` as ``labels=``, or with each of ``labelCols`` by name, and
                returns the loss as output ``loss``, first in a tuple, or alone.

        """

class _Arguments(TypedDict, total=False):
    learningRate: float | None
    scheduler: SchedulerBuilder | None
    schedulerEvery: str
    schedulerMetric: str | None
    epochs: int
    batchSize: int
    clipNorm: float | None
    precision: str
    seed: int
    strategy: Strategy[Any] | None
    numWorkers: int | None
    maxWorkers: int | None
    device: str
    shipModules: bool
    featuresCol: str
    featuresCols: list[str] | None
    featuresAs: str
    labelCol: str
    labelCols: list[str] | None
    handleInvalid: str
    weightCol: str | None
    columnShapes: dict[str, list[int | None]] | None
    columnDtypes: dict[str, str] | None
    imageCols: list[str] | None
    imageSize: Sequence[int] | None
    imageFit: str
    imageScale: ImageScale | None
    padCols: dict[str, float] | None
    padInputs: dict[str, SequenceInput] | None
    dropLast: bool
    groupByLength: bool
    shuffleRows: str
    reshuffleEvery: int
    batchTransform: BatchTransform | None
    storeIn: str
    validationIndicatorCol: str | None
    validationFraction: float | None
    metrics: Mapping[str, Any] | None
    predictionCol: str
    lossCol: str | None
    callbacks: Sequence[Callback | WorkerCallback] | None
    progress: bool
    timeout: float
    maxFailures: int
    minWorkers: int
    checkpointPath: str | None
    checkpointEvery: int
    checkpointRounds: int | None
    keepLast: int
    resume: str
    collectiveInterface: str | None
    collectivePorts: str | None
    tls: bool
