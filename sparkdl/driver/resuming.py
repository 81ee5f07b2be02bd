"""Which checkpoints a training resumes from, and the one that is written on SIGTERM.

A checkpoint has to belong to the same training. A training is defined by the model and its initial
values, the loss, the optimizer with its hyperparameters and schedule, the strategy, the columns,
the batch transform, batch size, clipping, precision, seed and number of workers, and the rows
themselves; but not by what changes no step: the number of epochs, paths, deadlines, which losses of
workers are survived, devices.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.averager.service.saving import CheckpointPlan, ResumedCheckpoint
from sparkdl.averager.service.server import Averager
from sparkdl.checkpoint.identity import describe, describe_model, describe_optimizer, text_of
from sparkdl.checkpoint.policy import CheckpointPolicy, difference, refuse, require_same
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import (
    CheckpointError,
    CollectiveError,
    PreemptedError,
    WorkerLostError,
)
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import DataStatistics
from sparkdl.protocols import ColumnSpec, Layout
from sparkdl.replica import Replica
from sparkdl.replica.initial import WarmStart
from sparkdl.replica.optimizer_state import build_optimizer
from sparkdl.replica.schedule import Schedule
from sparkdl.worker import Job

SEVERAL = "may change"
"""In place of a number of workers."""


def identity(
    job: Job,
    workers: int | str,
    replica: Replica,
    layout: Layout,
    warm_start: WarmStart | None = None,
) -> dict[str, Any]:
    """What defines a training, except for its rows and its number of epochs.

    Args:
        job: what the workers train.
        workers: how many there are, or ``SEVERAL``.
        replica: the freshly built replica.
        layout: of the part of its state that replicas exchange.
        warm_start: the values that it begins with, if not those it was built with.

    Returns:
        JSON, for ``checkpoint.policy.require_same``.
    """
    # Not the replica's optimizer, where a schedule has added its own functions and settings.
    fresh = build_optimizer(job.optimizer, replica.named_trainable())
    optimizer = describe_optimizer(fresh)
    hyperparameters = {
        f"{key} of parameter group {index}": text_of(value)
        for index, group in enumerate(fresh.param_groups)
        for key, value in group.items()
        if key != "params"
    } | _membership(fresh, replica)
    schedule = Schedule(fresh, job.scheduler, job.scheduler_every).describe()
    kind, lasting = type(job.strategy), text_of(job.strategy.lasting)
    return {
        "model": describe_model(replica.module),
        "warm start": None if warm_start is None else warm_start.describe(),
        "state": [[segment.kind, str(segment.dtype), segment.numel] for segment in layout],
        "frozen parameters": _frozen(replica),
        # Values are saved in memory order.
        "strides": {
            f"strides of {name}": list(parameter.stride())
            for name, parameter in replica.module.named_parameters()
            if not parameter.is_contiguous()
        },
        "loss": describe(job.loss),
        "optimizer": optimizer,
        "hyperparameters": hyperparameters,
        "scheduler": describe(
            job.scheduler,
            text="none" if schedule is None else " ".join(map(str, schedule)),
            parts={"state": schedule},
        ),
        # Other metrics change no step.
        "scheduler metric": _followed_metric(job),
        # Its repr says what it was made with; each worker keeps what it has become since.
        "strategy": describe(kind, text=lasting, parts={"settings": lasting}),
        **_columns(job.schema),
        "features as keyword arguments": job.features_as_kwargs,
        "batch transform": describe(job.feed.transform),
        "batch size": _batch_size(job),
        "drop last": job.feed.drop_last,
        "exchange of rows": "before the first epoch" if job.feed.exchange_rows else None,
        "reshuffle every": job.feed.reshuffle_every,
        "clip norm": job.clip_norm,
        "precision": job.precision,
        "callbacks on workers": describe(list(job.callbacks)),
        "seed": job.seed,
        "number of workers": workers,
    }


def _followed_metric(job: Job) -> dict[str, Any] | None:
    """The metric that the learning rate follows, if there is one."""
    name = job.scheduler_metric
    if name is None or job.metrics is None:
        return None
    return describe(job.metrics.makers[name], text=name)


def _batch_size(job: Job) -> int | str:
    return f"{job.batch_size}, grouped by length" if job.feed.group_by_length else job.batch_size


def _membership(optimizer: torch.optim.Optimizer, replica: Replica) -> dict[str, str]:
    """Which parameters are in which group, unless there is only one group."""
    names = {parameter: name for name, parameter in replica.named_trainable()}
    groups = [[names.get(p, "?") for p in group["params"]] for group in optimizer.param_groups]
    if groups == [list(names.values())]:
        return {}
    return {
        f"parameters of parameter group {index}": ", ".join(group)
        for index, group in enumerate(groups)
    }


def _frozen(replica: Replica) -> str | None:
    """The parameters that no checkpoint holds, because they do not change."""
    frozen = replica.frozen
    if not frozen.fingerprint:
        return None
    return f"{frozen.numel} values (fingerprint {frozen.fingerprint})"


def _columns(schema: FeedSchema) -> dict[str, Any]:
    """The columns by their use; how they arrive does not matter."""

    def text(*columns: ColumnSpec | None) -> str | None:
        texts = [
            f"{column.name} ({str(column.dtype).removeprefix('torch.')}{_padding(column)})"
            for column in columns
            if column is not None
        ]
        return ", ".join(texts) or None

    return {
        "features": text(*schema.features),
        "features as dict": schema.by_name,
        "label": text(*schema.labels),
        "weight": text(schema.weight),
        "validation indicator": text(schema.validation),
    }


def _padding(column: ColumnSpec) -> str:
    """How a column's rows are padded; checkpoints have never mentioned unpadded ones."""
    if column.padding is None:
        return ""
    item = f" {list(column.item_shape)}" if column.item_shape else ""
    return f" rows of items{item} padded with {column.padding.value:g}, {column.padding.input}"


def require_same_rows(
    resumed: ResumedCheckpoint, statistics: DataStatistics, columns: Sequence[ColumnSpec]
) -> None:
    """Check that a checkpoint belongs to the rows that the workers have read.

    Args:
        resumed: the checkpoint; if it was written before all rows had arrived, only the first rows
            are known.
        statistics: of all rows.
        columns: the columns that were read.

    Raises:
        ConfigError: the rows differ; the message says in what.
        CheckpointError: the checkpoint says nothing about rows.
    """
    saved, workers = resumed.saved, len(statistics.shard_rows)
    try:
        data = saved.description["data"]
        if len(resumed.progress.positions) == workers:
            found = list(_other_rows(data, statistics.lasting(), columns))
        else:
            known = {**data, "rows": sum(data["shard_rows"])}
            present = statistics.lasting(resized=True)
            found = [
                line
                for key, value in present.items()
                for line in difference(key.replace("_", " "), known[key], value)
            ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{saved.path} does not say which rows it was trained on: {error!r}"
        ) from error
    refuse(
        saved.path,
        found,
        "If the rows are recomputed each time and come out slightly different (rand() without a "
        "seed, floating-point sums in another order, a changing source), write them first. If only "
        "the rows of each partition differ, Spark has cut the files for another number of cores: "
        "set spark.sql.files.minPartitionNum to how many cores the application had then.",
    )


def has_ended(resumed: ResumedCheckpoint, epochs: int) -> bool:
    """Whether a training of this many epochs has nothing left to do."""
    return resumed.progress.epoch > epochs


def require_progress(resumed: ResumedCheckpoint, epochs: int, workers: int | str) -> None:
    """Check that a training has not gone further than is wanted now.

    Args:
        resumed: the checkpoint.
        epochs: how many are wanted now.
        workers: how many there are, or ``SEVERAL``.

    Raises:
        ConfigError: it has.
        CheckpointError: the checkpoint contradicts itself about the number of workers.
    """
    progress = resumed.progress
    if workers not in (SEVERAL, len(progress.positions)) or not progress.positions:
        raise CheckpointError(
            f"{resumed.saved.path} records the progress of {len(progress.positions)} "
            f"workers, but says that there were {workers}"
        )
    trained = progress.epoch if progress.rounds else progress.epoch - 1
    if trained > epochs:
        line = f"epochs: {trained} were started, but only {epochs} are wanted now"
        refuse(resumed.saved.path, [line])


def _other_rows(
    saved: dict[str, Any], present: dict[str, Any], columns: Sequence[ColumnSpec]
) -> Iterator[str]:
    """How the rows differ, one line per difference."""
    counts = {"shard_rows": "rows of each partition", "held_out": "held-out rows"}
    for key, what in counts.items():
        yield from difference(what, saved[key], present[key])
    prints = {
        "fingerprint": "the training rows",
        "held_out_fingerprint": "the held-out rows",
    }
    other = [what for key, what in prints.items() if saved[key] != present[key]]
    for what in other:
        yield f"{what} have different values"
    if other:
        for spec, before, now in zip(columns, saved["columns"], present["columns"], strict=True):
            for fact in now:
                yield from difference(
                    f"{fact} of column '{spec.name}'", before.get(fact), now[fact]
                )


logger = logging.getLogger(__name__)

SIGTERM_S = 4.0
"""Seconds to wait for the next commit after SIGTERM; whoever sent it may kill us after ten."""


def plan_of(policy: CheckpointPolicy, epochs: int, config: Mapping[str, Any]) -> CheckpointPlan:
    """When and where checkpoints are written, and which training they belong to."""
    store = CheckpointStore(
        policy.path, keep_last=policy.keep_last, open_elsewhere=policy.open_elsewhere
    )
    return CheckpointPlan(store=store, policy=policy, last_epoch=epochs, config=config)


def newest_checkpoint(
    policy: CheckpointPolicy, plan: CheckpointPlan, epochs: int, workers: int | str
) -> ResumedCheckpoint | None:
    """The newest checkpoint, if it is to be used and fits; its rows are not checked here."""
    saved = None if policy.resume == "never" else plan.store.newest()
    if saved is None:
        return None
    if policy.resume == "own" and saved.description.get("training") != policy.training:
        return None
    resumed = ResumedCheckpoint.of(saved)
    require_same(saved.path, saved.description["config"], plan.config)
    require_progress(resumed, epochs, workers)
    if not has_ended(resumed, epochs):
        logger.info("training resumes from %s", saved.path)
        _warn_of_missing_states(resumed)
    return resumed


def _warn_of_missing_states(resumed: ResumedCheckpoint) -> None:
    """Warn if a checkpoint lacks the states of workers.

    It does where a callback ended the training at a commit that was not to become a checkpoint, as
    the workers had gone on by then, and where workers were lost as it was written.
    """
    ranks = range(len(resumed.progress.positions))
    missing = [rank for rank in ranks if resumed.worker_state(rank) is None]
    if missing:
        logger.warning(
            "%s lacks the states of %d of %d workers, because the training was ended between two "
            "checkpoints, or they were lost: their random numbers, the counts and settings of "
            "their optimizers, and all that replicas do not exchange start anew, so the result "
            "differs from that of an uninterrupted training. Delete the file to resume from the "
            "checkpoint before it, if there is one",
            resumed.saved.path,
            len(missing),
            len(ranks),
        )


@contextmanager
def saved_on_sigterm(averager: Averager, plan: CheckpointPlan | None) -> Iterator[None]:
    """On SIGTERM, write a checkpoint, then exit as a terminated process does.

    It waits for the next commit, because there the workers' states match the center; if none comes
    in time, or the workers have left already, the last one is written without them. A handler set
    by the user stays in place.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if plan is None or not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    told_to_end, received = PreemptedError("the driver received SIGTERM"), threading.Event()
    timer = threading.Timer(SIGTERM_S, averager.fail, [told_to_end])
    timer.name, timer.daemon = "sparkdl-sigterm", True

    def on_sigterm(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        received.set()
        averager.save_and_fail(told_to_end)
        timer.start()

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
        if received.is_set():
            raise told_to_end
    except (PreemptedError, WorkerLostError, CollectiveError):
        if not received.is_set():
            raise
        if not averager.progress.all_rounds:
            logger.warning("received SIGTERM before anything was committed")
        elif averager.save_center():
            logger.warning("received SIGTERM; the training can resume from %s", plan.store.path)
        else:
            logger.warning(
                "received SIGTERM; progress since the last checkpoint in %s is lost, because no "
                "other could be written there",
                plan.store.path,
            )
        sys.exit(128 + signal.SIGTERM)
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
