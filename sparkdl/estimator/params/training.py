"""The Params that only estimators have: how, where and on which rows a model is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pyspark.ml.param import Param
from pyspark.ml.param.shared import HasSeed, HasValidationIndicatorCol
from torch import nn

from sparkdl.arguments import require_seed
from sparkdl.callbacks import Callback, WorkerCallback
from sparkdl.estimator.params import converters as convert
from sparkdl.estimator.params.declaration import (
    Declaration,
    DeclaredParams,
    Default,
    choice,
    flag,
    number,
)
from sparkdl.feed.schema import BatchTransform
from sparkdl.protocols import (
    LossFunction,
    ModelBuilder,
    OptimizerBuilder,
    SchedulerBuilder,
)
from sparkdl.replica import Precision
from sparkdl.replica.schedule import Unit
from sparkdl.spark.launch.worker_rows import SHUFFLES
from sparkdl.spark.rows.converters import (
    device_name,
    function,
    nonempty_text,
    positive,
)
from sparkdl.spark.rows.scratch import STORE_PLACES
from sparkdl.strategies import Strategy


class TrainingParams(HasSeed, DeclaredParams, group="Training"):
    """What is trained, and by which steps."""

    model: Param[Any] = Declaration(
        function("model", "an nn.Module or a function that builds one", builds=True),
        Default.REQUIRED,
        "an nn.Module, or a function or class without arguments that builds one",
        "A class or function that executors can import also makes saved models loadable without "
        "pickle; models that torch refuses to pickle (weight_norm, TorchScript) must be given as "
        "one. Lazy layers take their shapes from the first row. Parameters with "
        "requires_grad=False are built by every worker, never exchanged, and must not change.",
        type=nn.Module | ModelBuilder,
    )
    loss: Param[Any] = Declaration(
        convert.loss,
        Default.REQUIRED,
        "(outputs, targets) -> scalar tensor, the mean over the minibatch; or 'model' for the one "
        "that the model computes when it is given the labels",
        "It may return two, (sum, weight): the sum over what counts, and what to divide it by. "
        "torch's losses of classes divide by the labels that count, and get one number per row in "
        "the shape of the outputs, (rows,) or (rows, 1). A loss of your own gets it as in the "
        "column, and is refused if it broadcasts it to all pairs of rows. "
        "The outputs are all that the model returns: a tensor, tuple, dict or object. "
        'A model with ``loss="model"`` is called with ``labelCol`` as ``labels=``, or with each '
        "of ``labelCols`` by name, and returns the loss as output ``loss``, first in a tuple, or "
        "alone.",
        type=LossFunction | Literal["model"],
    )
    optimizer: Param[Any] = Declaration(
        convert.optimizer,
        Default.REQUIRED,
        "parameters -> Optimizer, for example torch.optim.Adam or partial(torch.optim.SGD, "
        "momentum=0.9); or named_parameters -> Optimizer, of pairs (name, parameter); or the name "
        "of one of torch's, such as 'Adam'",
        "It is given the pairs, from which it can make parameter groups, if its first argument is "
        "called ``named_parameters``.",
        type=OptimizerBuilder | str,
    )
    learningRate: Param[float | None] = Declaration(
        positive("learningRate"),
        None,
        "the learning rate (> 0), passed to the optimizer as lr, in place of the one it has; None "
        "for the optimizer's own",
        "Parameter groups that say their own ``lr`` keep it, as in torch. It is refused where it "
        "would change nothing, as with ``OneCycleLR``, which sets the rates itself.",
    )
    scheduler: Param[Any] = Declaration(
        function("scheduler", "a function optimizer -> LRScheduler", builds=True),
        None,
        "optimizer -> LRScheduler, for example partial(CosineAnnealingLR, T_max=10); None for none",
        "It must depend on the number of its steps alone, except for ``ReduceLROnPlateau``, which "
        "follows the loss of each epoch: on the held-out rows, or the training loss if there are "
        "none.",
        type=SchedulerBuilder | None,
    )
    schedulerEvery: Param[Unit] = choice(
        ("epoch", "step"),
        "when the scheduler takes a step: every 'epoch' or every 'step' of the optimizer",
        "Those are the steps of the worker with the most rows; workers that have fewer catch up at "
        "the end of the epoch.",
    )
    schedulerMetric: Param[str | None] = Declaration(
        nonempty_text("schedulerMetric"),
        None,
        "the one of metrics that ReduceLROnPlateau follows; None for the loss",
    )
    epochs = number(1, 1, "passes over the data (>= 1)")
    batchSize = number(1, 32, "rows per minibatch on each worker (>= 1)")
    clipNorm: Param[float | None] = Declaration(
        positive("clipNorm"),
        None,
        "the largest norm of all gradients together (> 0); larger ones are scaled down to it "
        "before each optimizer step; None for no limit",
    )
    precision: Param[Precision] = choice(
        ("float32", "bf16"),
        "of the forward pass and the loss: 'float32' (the parameters' own), or 'bf16' by autocast",
    )
    seed: Param[int] = Declaration(
        partial(require_seed, "seed"),
        0,
        "random seed.",
        "For the initial parameters, the shuffling and the workers' random numbers.",
    )


class WorkerParams(DeclaredParams, group="Workers"):
    """Who trains, and how the replicas agree."""

    # No type argument: the reader of job configurations looks for the subclasses of a class.
    strategy: Param[Strategy] = Declaration(
        convert.strategy,
        Default.UNSET,
        "how the replicas agree",
        "``ParameterAveraging(period=5)`` by default. A dict has what is to differ in the one that "
        "there is: ``{'period': 10}``.",
    )
    numWorkers = number(
        1,
        None,
        "replicas to train (>= 1); None for as many as the cluster has slots",
        "Where each Spark task has several GPUs, every GPU gets one, so it must be a multiple of "
        "them.",
    )
    maxWorkers = number(
        1,
        None,
        "the most replicas, if more may be added while the fit runs (>= 1); None for numWorkers",
        "Workers are added between two epochs, where slots have become free or executors have "
        "started on demand, and rows are dealt anew. If some do not come back within a minute, and "
        "minWorkers are there, those train the epoch again from its start. For strategies whose "
        "workers do not exchange among themselves, in a session in the driver.",
    )
    device: Param[str] = Declaration(
        device_name("device"),
        "auto",
        "where replicas live: auto, cpu, cuda or cuda:N",
        "``auto`` is a GPU where Spark assigns or torch sees one.",
    )


class RowParams(DeclaredParams, group="Rows"):
    """How rows are spread over the workers, kept there, and fed."""

    dropLast = flag(
        False,
        "whether a worker leaves out the last minibatch of an epoch if it is short",
    )
    groupByLength = flag(
        False,
        "whether rows of about equal length share a minibatch, so that little is padded",
        "The rows of 50 minibatches at a time are sorted by length, then the minibatches are "
        "shuffled.",
    )
    shuffleRows = choice(
        SHUFFLES,
        "how the rows are spread over the workers: 'exchange' (they exchange them among "
        "themselves), 'spark' (by its shuffle) or 'none' (they stay where they are read)",
        "With ``exchange``, each reads whole partitions, then they exchange all rows at random and "
        "evenly. With ``none`` they stay even if that leaves each worker one class.",
    )
    reshuffleEvery = number(
        0,
        0,
        "epochs after which the workers exchange their rows again (>= 0); 0 for never",
        "If they do exchange, losing a worker makes all start again from the last round.",
    )
    batchTransform: Param[Any] = Declaration(
        function("batchTransform", "a function of a Batch"),
        None,
        "Batch -> Batch, called on each training minibatch; None for none",
        "For example to augment images; torch's random numbers are seeded for it by epoch, rank "
        "and minibatch.",
        type=BatchTransform | None,
    )
    storeIn = choice(
        STORE_PLACES,
        "where each worker keeps its rows: 'disk' (Spark's local directory) or 'memory' (/dev/shm)",
        "The system caches the local directory in memory as room allows.",
    )


class ValidationParams(HasValidationIndicatorCol, DeclaredParams, group="Validation"):
    """Which rows are held out, and what is measured on them."""

    validationIndicatorCol: Param[str] = Declaration(
        None,
        Default.UNSET,
        "a boolean column; rows where it is true are not trained on, and the loss on them is in "
        "``model.history``",
    )
    validationFraction: Param[float | None] = Declaration(
        positive("validationFraction", 1),
        None,
        "the fraction of the rows, chosen by their content and the seed, that are not trained on "
        "but validated with (0 < fraction < 1); None for none",
        "A row's content (features, labels, weight) and ``seed`` decide which side it falls on, so "
        "that it is the same in every fit; rows with the same content are on the same side.",
    )
    metrics: Param[dict[str, Any] | None] = Declaration(
        convert.metrics,
        None,
        "torchmetrics by name, measured on the held-out rows after each epoch; None for none",
        "A dict by name of ``torchmetrics.Metric`` objects, which are copied, or of functions or "
        "classes that make one; or a ``MetricCollection``. They are in ``model.history``, and "
        "callbacks can follow them. Needs ``pip install 'sparkdl-torch[metrics]'``.",
        type=Mapping[str, Any] | None,
    )


class MonitoringParams(DeclaredParams, group="Monitoring"):
    """What is shown and called while a fit runs."""

    callbacks: Param[list[Callback | WorkerCallback] | None] = Declaration(
        convert.callbacks,
        None,
        "called in the driver after rounds, epochs and more, where they may end the training, or "
        "on the workers around each step; None for none",
        "See ``sparkdl.callbacks``. ``EarlyStopping`` and ``TimeBudget`` end the training with the "
        "best epoch's model or with the model so far; ``ModelCheckpoint`` makes ``fit`` return the "
        "best epoch's model; a ``WorkerCallback`` is called on the workers.",
        type=Sequence[Callback | WorkerCallback] | None,
    )
    progress = flag(True, "whether to show a progress bar in the driver")


class RecoveryParams(DeclaredParams, group="Recovery"):
    """What a training survives, and how."""

    timeout: Param[float] = Declaration(
        positive("timeout"),
        600.0,
        "the longest time to wait for any worker or round, in seconds (> 0)",
    )
    maxFailures = number(
        0,
        3,
        "how often workers may be lost during a fit (>= 0); 0 ends it at the first loss",
        "A worker is lost if its process, executor or host died, or it was silent for too long. "
        "Spark restarts them while the others go on; where the workers need each other, all "
        "restart from the driver's last copy. An error that the model raises is never retried.",
    )
    minWorkers = number(
        1,
        1,
        "with how many workers training goes on while others are lost (>= 1)",
        "With fewer, training waits, up to ``timeout``, until lost ones are back.",
    )
    checkpointPath: Param[str | None] = Declaration(
        nonempty_text("checkpointPath", "a path or URI"),
        None,
        "directory for checkpoints of the training, a path or URI; None for none",
        "A path that the driver sees, or a URI that pyarrow.fs takes (``s3://bucket/directory``, "
        "``hdfs://...``). It serves one training at a time: a second one is refused.",
    )
    checkpointEvery = number(
        1,
        1,
        "epochs between two checkpoints (>= 1)",
        "There is one after the last epoch too.",
    )
    checkpointRounds = number(
        1,
        None,
        "rounds between two checkpoints within an epoch (>= 1); None for none within epochs",
        "For long epochs; a resumed fit goes on in the middle of one.",
    )
    keepLast = number(
        1,
        2,
        "checkpoints to keep (>= 1)",
        "With 2, one is left if the newest turns out to be damaged.",
    )
    resume = choice(
        ("auto", "never"),
        "'auto' resumes from the newest checkpoint if there is one; 'never' starts over",
        "``auto`` returns the model of the newest checkpoint if its training has ended, and "
        "refuses one made with other rows, code or settings.",
    )


class NetworkParams(DeclaredParams, group="Network"):
    """How workers and driver reach each other, and whether in secret."""

    collectiveInterface: Param[str | None] = Declaration(
        nonempty_text(
            "collectiveInterface",
            "a network interface such as 'eth1' or a subnet such as '10.1.0.0/16'",
        ),
        None,
        "network interface (eth1), address or subnet (10.1.0.0/16) by which workers reach each "
        "other; None for spark.sparkdl.collective.interface, or the route to the driver",
        "For strategies whose workers exchange among themselves; of a subnet, each host has one "
        "address.",
    )
    collectivePorts: Param[str | None] = Declaration(
        convert.ports,
        None,
        "first and last port on which rank 0 may accept the other workers (40000-40100); None for "
        "spark.sparkdl.collective.ports, or any free one",
    )
    tls = flag(
        False,
        "whether the connections between workers and driver are encrypted; they also are where "
        "Spark's settings demand it",
        "Those of the workers to each other too; with a certificate made for this fit. Needs "
        "``pip install 'sparkdl-torch[tls]'``.",
    )
