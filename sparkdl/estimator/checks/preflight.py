"""Everything that can be checked without training, checked before training."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from torch import nn

from sparkdl.arguments import counted
from sparkdl.callbacks import WorkerCallback
from sparkdl.checkpoint.portable import require_portable
from sparkdl.driver import as_builder
from sparkdl.errors import ConfigError
from sparkdl.estimator.checks.building import build_whole
from sparkdl.estimator.checks.rehearsal import (
    require_rate_counts,
    require_schedule,
    require_steady_state,
)
from sparkdl.estimator.fit_settings import FitSettings
from sparkdl.estimator.head import Head, head_of
from sparkdl.estimator.outputs import MetricInputs
from sparkdl.estimator.schema import fed_columns
from sparkdl.feed.feed import FeedOptions
from sparkdl.metrics import Metrics
from sparkdl.metrics.metrics import WEIGHTS
from sparkdl.protocols import LossFunction
from sparkdl.replica import Replica
from sparkdl.replica.initial import WarmStart
from sparkdl.spark.catalyst.jvm import is_of_connect
from sparkdl.spark.closures.pickling import require_picklable
from sparkdl.spark.cluster.gpus import gpu_profile, ranks_a_task
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.cluster.slots import choose_num_workers, require_static_allocation
from sparkdl.spark.launch.worker_rows import Workers
from sparkdl.spark.rows.columns import InputColumn
from sparkdl.spark.session.encryption import (
    encrypts_connections,
    keeps_rows_in_memory,
    require_trusted_network,
)
from sparkdl.spark.session.required import jvm_named, require_frame
from sparkdl.worker import Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitPlan:
    """What is decided before any worker starts.

    Attributes:
        settings: the Params, in a copy of the estimator that nobody else changes.
        job: what every worker trains.
        workers: where they run, and on which rows.
        head: what the model's outputs mean.
        warm_start: values to start from; None for new ones.
    """

    settings: FitSettings
    job: Job
    workers: Workers
    head: Head
    warm_start: WarmStart | None


@jvm_named()
def plan_fit(
    settings: FitSettings, frame: DataFrame, warm_start: nn.Module | None = None
) -> tuple[FitPlan, Replica]:
    """Check and decide what follows from the Params, the DataFrame's schema and the cluster.

    Args:
        settings: the fit's own copy of the estimator.
        frame: the DataFrame to fit.
        warm_start: the model whose values it starts from; None for new ones.

    Returns:
        The plan, and a replica to try out in the driver.

    Raises:
        ConfigError: more workers than slots, or the strategy does not go with the model, the
            optimizer, ``clipNorm`` or the number of workers; or Spark's JVM has ended.
        DataError: a column is missing, duplicated or not numeric.
        ModelError: the model, loss or optimizer cannot be built or shipped.
    """
    require_frame(frame, to_end="Fit", connect=True)
    for name in ("model", "loss", "optimizer", "scheduler", "strategy", "batchTransform"):
        require_picklable(name, settings.getOrDefault(name))
    given = settings.getCallbacks() or ()
    callbacks = tuple(each for each in given if isinstance(each, WorkerCallback))
    require_picklable("callbacks", list(callbacks))
    require_picklable("metrics", settings.getMetrics())
    strategy, loss = settings.getStrategy(), settings.loss_function()
    builder = as_builder(settings.getModel())
    builder, replica = build_whole(builder, settings, frame)
    require_portable(replica.module, builder)
    strategy.require_fits(replica)
    start = None
    if warm_start is not None:
        start = WarmStart(warm_start)
        start.require_fits(replica.module)
        builder = start.builder(builder, replica.module)
    _check_schedule(settings, replica)
    head = head_of(loss)
    schema, columns = fed_columns(settings, frame, replica.module)
    spark = frame.sparkSession
    # What is wrong with these is said before slots are waited for.
    tls, metrics = encrypts_connections(spark, settings.getTls()), _metrics(settings, head)
    workers = _workers(settings, loss, replica, frame, columns)
    # Memory may not have room for all rows twice.
    kept = keeps_rows_in_memory(spark, settings.getStoreIn()) is None
    job = Job(
        model=builder,
        loss=loss,
        optimizer=settings.optimizer_builder(),
        scheduler=settings.getScheduler(),
        scheduler_every=settings.getSchedulerEvery(),
        strategy=strategy,
        schema=schema,
        epochs=settings.getEpochs(),
        batch_size=settings.getBatchSize(),
        seed=settings.getSeed(),
        deadline_s=settings.getTimeout(),
        max_failures=settings.getMaxFailures(),
        min_workers=settings.getMinWorkers(),
        callbacks=callbacks,
        metrics=metrics,
        scheduler_metric=settings.getSchedulerMetric(),
        clip_norm=settings.getClipNorm(),
        precision=settings.getPrecision(),
        features_as_kwargs=settings.getFeaturesAs() == "kwargs",
        feed=FeedOptions(
            drop_last=settings.getDropLast(),
            reshuffle_every=settings.getReshuffleEvery(),
            transform=settings.getBatchTransform(),
            group_by_length=settings.getGroupByLength(),
            skip_invalid=settings.getHandleInvalid() == "skip",
            exchange_rows=workers.exchanged,
            keep_exchanged=kept,
        ),
        tls=tls,
    )
    return FitPlan(settings, job, workers, head, start), replica


def _check_schedule(settings: FitSettings, replica: Replica) -> None:
    scheduler, rate = settings.getScheduler(), settings.getLearningRate()
    schedule = require_schedule(replica.optimizer, scheduler, settings.getSchedulerEvery())
    if rate is not None:
        require_rate_counts(settings, replica, rate)
    if settings.getStrategy().needs.exchanges_optimizer_state:
        # A scheduler that follows losses changes only the learning rate.
        steps = None if schedule.follows_epoch_losses else scheduler
        require_steady_state(settings.optimizer_builder(), steps)


def _workers(
    settings: FitSettings,
    loss: LossFunction,
    replica: Replica,
    frame: DataFrame,
    columns: tuple[InputColumn, ...],
) -> Workers:
    """Where the workers run, and how they get which rows."""
    spark, strategy, device = frame.sparkSession, settings.getStrategy(), settings.getDevice()
    if is_of_connect(spark):
        require_static_allocation(spark)
    if strategy.needs.collective:
        require_trusted_network(spark, settings.getTls(), type(strategy).__name__)
    profile, ranks = gpu_profile(spark, device), ranks_a_task(spark, device)
    num_workers = choose_num_workers(spark, settings.getNumWorkers(), profile, ranks)
    if settings.getMinWorkers() > num_workers:
        raise ConfigError(
            f"minWorkers is {settings.getMinWorkers()}, but this fit has "
            f"{counted(num_workers, 'worker')}. Set it to at most {num_workers}"
        )
    strategy.require_workers(num_workers)
    if num_workers > 1 and replica.adds_losses:
        raise ConfigError(
            f"{_name(loss)} has reduction='sum', and there are {num_workers} workers: the sum "
            "over the rows of one is not that over all, nor is it a mean, which strategies can "
            "weigh. Use reduction='mean', with a smaller learning rate, or numWorkers=1"
        )
    return Workers(
        frame=frame,
        columns=columns,
        num_workers=num_workers,
        shuffle=settings.getShuffleRows(),
        device=device,
        description=_describe(settings, num_workers),
        store_in=settings.getStoreIn(),
        network=network_of(
            spark,
            interface=settings.getCollectiveInterface(),
            ports=settings.getCollectivePorts(),
        ),
        ranks_a_task=ranks,
        ship_modules=settings.getShipModules(),
    )


def _metrics(settings: FitSettings, head: Head) -> Metrics | None:
    if settings.getMetrics() is None:
        return None
    metrics = Metrics.of(settings.getMetrics(), MetricInputs.of(settings, head))
    metrics.begin()  # raises for what does not make a metric
    weight, alike = settings.weight_column(), metrics.without_weights()
    if weight is not None and alike:
        logger.warning(
            "weightCol='%s' weights the losses; the metrics %s count every row equally, "
            "because their update takes no '%s'",
            weight,
            ", ".join(alike),
            WEIGHTS,
        )
    return metrics


def _describe(settings: FitSettings, num_workers: int) -> str:
    model = _name(settings.getModel())
    strategy = re.sub(r"\s+", " ", repr(settings.getStrategy()))
    return f"sparkdl: train {model} on {counted(num_workers, 'worker')}, {strategy}"


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)
