"""Everything that can be checked without training, checked before: the model, one made-up step."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparkdl.arguments import counted
from sparkdl.callbacks import WorkerCallback
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.checkpoint.portable import require_portable
from sparkdl.driver import as_builder
from sparkdl.errors import ConfigError, ModelError, TrainingError
from sparkdl.estimator.checks.building import build_whole, warn_of_untrained
from sparkdl.estimator.head import Head, head_of
from sparkdl.estimator.outputs import MetricInputs
from sparkdl.estimator.params.declaration import described
from sparkdl.estimator.schema import FitSettings, fed_columns
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.schema import FeedSchema
from sparkdl.metrics import Metrics
from sparkdl.metrics.metrics import WEIGHTS
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.protocols import OptimizerBuilder, SchedulerBuilder
from sparkdl.replica import Replica
from sparkdl.replica.initial import WarmStart
from sparkdl.replica.optimizer_state import build_optimizer
from sparkdl.replica.schedule import Schedule, Unit
from sparkdl.spark.catalyst.jvm import is_of_connect, setting
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.cluster.slots import (
    choose_num_workers,
    gpu_profile,
    ranks_a_task,
    require_static_allocation,
)
from sparkdl.spark.launch.worker_rows import Workers
from sparkdl.spark.pickling import require_picklable
from sparkdl.spark.required import jvm_named, require_frame
from sparkdl.spark.rows.columns import InputColumn
from sparkdl.spark.session import (
    encrypts_connections,
    keeps_rows_in_memory,
    require_trusted_network,
)
from sparkdl.user_code.tracebacks import message_of, text_of
from sparkdl.worker import Job

logger = logging.getLogger(__name__)

SENT = ("model", "loss", "optimizer", "scheduler", "strategy", "batchTransform", "metrics")
"""Params whose values are sent to the executors."""
COMPUTING = ("loss", "batchTransform", "callbacks")
"""Params whose values may compute with the model."""
REHEARSED_STEPS = 20
"""They take some milliseconds; state that grows late does so within a few steps."""


def require_schedule(
    optimizer: torch.optim.Optimizer, scheduler: SchedulerBuilder | None, unit: Unit
) -> Schedule:
    """Build a schedule for an optimizer.

    Raises:
        ModelError: it cannot be built, or is not a schedule.
    """
    try:
        return Schedule(optimizer, scheduler, unit)
    except Exception as error:  # the user's function may raise anything
        own = isinstance(error, ConfigError)
        told = text_of(error) if own else f"the scheduler cannot be built: {message_of(error)}"
        raise ModelError(told) from error


def require_rate_counts(settings: FitSettings, replica: Replica, rate: float) -> None:
    """Check that another ``learningRate`` would be another training.

    Args:
        settings: the estimator's.
        replica: from ``build``.
        rate: theirs.

    Raises:
        ConfigError: the optimizer's parameter groups, or the schedule, set the rates by themselves.
    """
    build: Any = settings.optimizer_builder()

    def rates(rate: float, scheduler: SchedulerBuilder | None) -> list[Any]:
        optimizer = build_optimizer(partial(build, lr=rate), replica.named_trainable())
        Schedule(optimizer, scheduler, settings.getSchedulerEvery())
        # A warm-up from 0 has one rate at first, whatever it is to become.
        return [(group["lr"], group.get("initial_lr")) for group in optimizer.param_groups]

    scheduler, other = settings.getScheduler(), rate / 2
    try:
        with borrowed_random_numbers():
            if rates(rate, scheduler) != rates(other, scheduler):
                return
            fixed = rates(rate, None) == rates(other, None)
    except Exception as error:  # the user's functions may take no other rate
        logger.debug("another learning rate was not tried: %s", error)
        return
    who = described(settings.getOptimizer() if fixed else scheduler)
    how = "in each of its parameter groups" if fixed else "by itself"
    raise ConfigError(
        f"learningRate={rate:g} changes nothing: {who} sets lr {how}. Leave one of the two out"
    )


def require_steps(
    optimizer: torch.optim.Optimizer, scheduler: SchedulerBuilder | None, steps: int
) -> None:
    """Check that a schedule is as long as the training.

    Args:
        optimizer: any that the scheduler takes.
        scheduler: as the user gave it.
        steps: how many the schedule will take.

    Raises:
        ModelError: it ends earlier.
    """
    built = None if scheduler is None else scheduler(optimizer)
    most = getattr(built, "total_steps", None)
    if isinstance(most, int) and steps > most:
        raise ModelError(
            f"{type(built).__name__} ends after total_steps={most}, but this training takes "
            f"{steps} of its steps, those of the worker with the most rows. Set it to {steps}, or "
            "check schedulerEvery"
        )


def require_steady_state(optimizer: OptimizerBuilder, scheduler: SchedulerBuilder | None) -> None:
    """Check on a small stand-in for the model that the optimizer's state does not grow late.

    Replicas exchange the state as it was counted before the first step. What the stand-in does not
    show, the replicas report themselves.

    Raises:
        ModelError: it grows or shrinks in one of the first steps.
    """
    try:
        with borrowed_random_numbers():
            _rehearse(optimizer, scheduler)
    except TrainingError as error:
        raise ModelError(f"tried on a layer of 2 x 2 numbers, {error}") from None
    except Exception as error:  # it may need another model, or its schedule fewer steps
        logger.debug("the optimizer was not rehearsed to the end: %s", error)


def _rehearse(optimizer: OptimizerBuilder, scheduler: SchedulerBuilder | None) -> None:
    stand_in = Replica(
        nn.Linear(2, 2), optimizer, nn.MSELoss(), scheduler=scheduler, scheduler_every="step"
    )
    stand_in.count_optimizer_state()
    for _ in range(REHEARSED_STEPS):
        for parameter in stand_in.trainable():
            parameter.grad = torch.ones_like(parameter)
        stand_in.update()
        stand_in.layout(with_optimizer=True)


@dataclass(frozen=True)
class FitPlan:
    """What is decided before any worker starts.

    Attributes:
        settings: the Params, in a copy of the estimator that nobody else changes.
        job: what every worker trains.
        workers: where they run, and on which rows.
        head: what the model's outputs mean.
        checkpoints: where to write them, and whether to resume from one; None for none.
        warm_start: values to start from; None for new ones.
    """

    settings: FitSettings
    job: Job
    workers: Workers
    head: Head
    checkpoints: CheckpointPolicy | None
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
    job, spark = job_of(settings), frame.sparkSession
    sent = {name: settings.getOrDefault(name) for name in SENT}
    sent["callbacks"] = list(job.callbacks)
    for name, value in sent.items():
        require_picklable(name, value)
    job, replica = build_whole(job, settings, frame)
    warn_of_untrained(sent["model"], {name: settings.getOrDefault(name) for name in COMPUTING})
    require_portable(replica.module, job.model)
    job.strategy.require_fits(replica)
    start = None
    if warm_start is not None:
        start = WarmStart(warm_start)
        start.require_fits(replica.module)
        job = replace(job, model=start.builder(job.model, replica.module))
    _check_schedule(settings, job, replica)
    head = head_of(job.loss)
    schema, columns = fed_columns(settings, job.loss, frame, replica.module)
    # What is wrong with these is said before slots are waited for.
    tls, metrics = encrypts_connections(spark, settings.getTls()), _metrics(settings, head)
    workers = _workers(settings, job, replica, frame, columns)
    # Memory may not have room for all rows twice.
    kept = workers.in_memory is None
    feed = replace(job.feed, exchange_rows=workers.exchanged, keep_exchanged=kept)
    job = replace(job, schema=schema, metrics=metrics, feed=feed, tls=tls)
    checkpoints = settings.checkpoint_policy(setting(spark, "spark.app.id"))
    return FitPlan(settings, job, workers, head, checkpoints, start), replica


def job_of(settings: FitSettings) -> Job:
    """What is trained, as far as the Params alone say it: its columns and rows are open."""
    given = settings.getCallbacks() or ()
    return Job(
        model=as_builder(settings.getModel()),
        loss=settings.loss_function(),
        optimizer=settings.optimizer_builder(),
        scheduler=settings.getScheduler(),
        scheduler_every=settings.getSchedulerEvery(),
        strategy=settings.getStrategy(),
        schema=FeedSchema((), ()),
        epochs=settings.getEpochs(),
        batch_size=settings.getBatchSize(),
        seed=settings.getSeed(),
        deadline_s=settings.getTimeout(),
        max_failures=settings.getMaxFailures(),
        min_workers=settings.getMinWorkers(),
        max_workers=settings.getMaxWorkers(),
        callbacks=tuple(each for each in given if isinstance(each, WorkerCallback)),
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
        ),
    )


def _check_schedule(settings: FitSettings, job: Job, replica: Replica) -> None:
    rate = settings.getLearningRate()
    schedule = require_schedule(replica.optimizer, job.scheduler, job.scheduler_every)
    if rate is not None:
        require_rate_counts(settings, replica, rate)
    if job.strategy.needs.exchanges_optimizer_state:
        # A scheduler that follows losses changes only the learning rate.
        steps = None if schedule.follows_epoch_losses else job.scheduler
        require_steady_state(job.optimizer, steps)


def _workers(
    settings: FitSettings,
    job: Job,
    replica: Replica,
    frame: DataFrame,
    columns: tuple[InputColumn, ...],
) -> Workers:
    """Where the workers run, and how they get which rows."""
    spark, strategy, device = frame.sparkSession, job.strategy, settings.getDevice()
    if is_of_connect(spark):
        require_static_allocation(spark)
    if strategy.needs.collective:
        require_trusted_network(spark, settings.getTls(), type(strategy).__name__)
    profile, ranks = gpu_profile(spark, device), ranks_a_task(spark, device)
    num_workers = choose_num_workers(spark, settings.getNumWorkers(), profile, ranks)
    if job.max_workers is not None:
        if settings.getNumWorkers() is None:
            num_workers = min(num_workers, job.max_workers)
        _require_changeable(settings, spark, job, num_workers, ranks)
    if job.min_workers > num_workers:
        raise ConfigError(
            f"minWorkers is {job.min_workers}, but this fit has "
            f"{counted(num_workers, 'worker')}. Set it to at most {num_workers}"
        )
    most = job.max_workers or num_workers
    for number in {job.min_workers, num_workers, most} if job.max_workers else {num_workers}:
        strategy.require_workers(number)
    if most > 1 and replica.adds_losses:
        raise ConfigError(
            f"{_name(job.loss)} has reduction='sum', and there are {most} workers: the sum "
            "over the rows of one is not that over all, nor is it a mean, which strategies can "
            "weigh. Use reduction='mean', with a larger learning rate, or numWorkers=1"
        )
    return Workers(
        frame=frame,
        columns=columns,
        num_workers=num_workers,
        shuffle=settings.getShuffleRows(),
        device=device,
        description=_describe(settings, num_workers),
        in_memory=keeps_rows_in_memory(spark, settings.getStoreIn()),
        network=network_of(
            spark,
            interface=settings.getCollectiveInterface(),
            ports=settings.getCollectivePorts(),
        ),
        ranks_a_task=ranks,
        profile=profile,
        ship_modules=settings.getShipModules(),
    )


def _require_changeable(
    settings: FitSettings, spark: SparkSession, job: Job, num_workers: int, ranks: int
) -> None:
    """Check that the number of workers may change."""
    most, name = job.max_workers or 0, type(job.strategy).__name__
    if is_of_connect(spark):
        raise ConfigError(
            "maxWorkers adds workers while a fit runs, but over Spark Connect all of them start "
            "together. Set numWorkers alone, or use a session in the driver (spark-submit)"
        )
    needs = job.strategy.needs
    if needs.collective or needs.peers or not needs.checkpointable:
        raise ConfigError(
            f"maxWorkers adds workers while a fit runs, but {name} has workers that exchange among "
            "themselves, or keep what no center holds, so that their number cannot change. Set "
            "numWorkers alone, or use a strategy that averages in the driver, such as "
            "ParameterAveraging"
        )
    if settings.getShuffleRows() == "none":
        raise ConfigError(
            "maxWorkers deals the rows to other numbers of workers, but shuffleRows='none' leaves "
            "them in their partitions, of which there is one for each task. Drop one of the two"
        )
    if most < num_workers or most % ranks:
        raise ConfigError(
            f"maxWorkers is {most}, but the fit begins with {counted(num_workers, 'worker')}, "
            f"{ranks} in each task. Set it to a multiple of {ranks} that is at least {num_workers}"
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
