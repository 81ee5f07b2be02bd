"""Everything that can be checked without training, checked before training."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame
from torch import nn

from sparkdl.arguments import counted
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
from sparkdl.estimator.outputs import MetricInputs, SharedParams
from sparkdl.estimator.schema import fed_columns
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
        settings: the estimator's.
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

    def spread(self) -> FitPlan:
        """The same with all rows spread evenly over the workers by Spark."""
        return replace(self, workers=replace(self.workers, spread=True))


@jvm_named()
def plan_fit(
    params: SharedParams, frame: DataFrame, warm_start: nn.Module | None = None
) -> tuple[FitPlan, Replica]:
    """Check and decide what follows from the Params, the DataFrame's schema and the cluster.

    Args:
        params: the estimator.
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
    settings = FitSettings(params)
    for name in ("model", "loss", "optimizer", "scheduler", "strategy", "batchTransform"):
        require_picklable(name, params.getOrDefault(name))
    require_picklable("callbacks", list(settings.worker_callbacks))
    require_picklable("metrics", settings.metrics)
    strategy, loss = settings.strategy, settings.loss_function()
    builder = as_builder(settings.model)
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
    tls, metrics = encrypts_connections(spark, settings.tls), _metrics(settings, params, head)
    workers = _workers(settings, loss, replica, frame, columns)
    # Memory may not have room for all rows twice.
    kept = keeps_rows_in_memory(spark, settings.store_in) is None
    job = Job(
        model=builder,
        loss=loss,
        optimizer=settings.optimizer_builder(),
        scheduler=settings.scheduler,
        scheduler_every=settings.scheduler_every,
        strategy=strategy,
        schema=schema,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        seed=settings.seed,
        deadline_s=settings.timeout,
        max_failures=settings.max_failures,
        min_workers=settings.min_workers,
        callbacks=settings.worker_callbacks,
        metrics=metrics,
        scheduler_metric=settings.scheduler_metric,
        clip_norm=settings.clip_norm,
        precision=settings.precision,
        features_as_kwargs=settings.features_as == "kwargs",
        feed=replace(settings.feed, exchange_rows=workers.exchanged, keep_exchanged=kept),
        tls=tls,
    )
    return FitPlan(settings, job, workers, head, start), replica


def _check_schedule(settings: FitSettings, replica: Replica) -> None:
    scheduler = settings.scheduler
    schedule = require_schedule(replica.optimizer, scheduler, settings.scheduler_every)
    if settings.learning_rate is not None:
        require_rate_counts(settings, replica, settings.learning_rate)
    if settings.strategy.needs.exchanges_optimizer_state:
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
    spark, strategy = frame.sparkSession, settings.strategy
    if is_of_connect(spark):
        require_static_allocation(spark)
    if strategy.needs.collective:
        require_trusted_network(spark, settings.tls, type(strategy).__name__)
    profile = gpu_profile(spark, settings.device)
    ranks = ranks_a_task(spark, settings.device)
    num_workers = choose_num_workers(spark, settings.num_workers, profile, ranks)
    if settings.min_workers > num_workers:
        raise ConfigError(
            f"minWorkers is {settings.min_workers}, but this fit has "
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
        shuffle=settings.shuffle_rows,
        device=settings.device,
        description=_describe(settings, num_workers),
        store_in=settings.store_in,
        network=network_of(
            spark,
            interface=settings.collective_interface,
            ports=settings.collective_ports,
        ),
        ranks_a_task=ranks,
        ship_modules=settings.ship_modules,
    )


def _metrics(settings: FitSettings, params: SharedParams, head: Head) -> Metrics | None:
    if settings.metrics is None:
        return None
    metrics = Metrics.of(settings.metrics, MetricInputs.of(params, head))
    metrics.begin()  # raises for what does not make a metric
    weight, alike = settings.weight_col, metrics.without_weights()
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
    model = _name(settings.model)
    strategy = re.sub(r"\s+", " ", repr(settings.strategy))
    return f"sparkdl: train {model} on {counted(num_workers, 'worker')}, {strategy}"


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)
