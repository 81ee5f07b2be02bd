"""What the driver does with the workers' reports: it checks their rows and informs listeners.

That includes what callbacks and reports see of a training, and metrics: all workers' counts become
numbers, epoch by epoch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sparkdl.averager.run_events import (
    EpochCounted,
    EpochValidated,
    Progress,
    RoundCommitted,
    TimePassed,
    WorkerState,
)
from sparkdl.averager.run_events import RunEvent as Event
from sparkdl.averager.service.saving import CheckpointPlan, KeptModel, ResumedCheckpoint
from sparkdl.averager.service.server import Averager
from sparkdl.callbacks.base import Callback, Calls, Training
from sparkdl.driver.resizing import Resize
from sparkdl.driver.resuming import has_ended, require_same_rows
from sparkdl.errors import ConfigError, DataError, SparkDLError, TrainingError
from sparkdl.events import EpochSummary, MetricValue
from sparkdl.feed.shards import DataStatistics, check_statistics
from sparkdl.metrics import Metrics
from sparkdl.planner.traffic import traffic_of
from sparkdl.protocols import Layout
from sparkdl.replica import Replica
from sparkdl.replica.loss_use import divides_by
from sparkdl.replica.losses import LossUse
from sparkdl.report import Recording, Setup
from sparkdl.worker import Job

MAX_NUMBERS = 10_000
"""The most per epoch: they are in the history, and so in every checkpoint."""
HOLD_OUT = (
    "metrics are measured on held-out rows, but there are none: set validationFraction, or name a "
    "column that marks them (validationIndicatorCol)"
)
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Measuring:
    """Computes the metrics of each epoch of one run.

    Attributes:
        metrics: the metrics to compute.
        followed: the one that the learning rate follows; None if it follows none.
        higher_is_better: for each metric, whether larger is better; None if it does not say.
    """

    metrics: Metrics
    followed: str | None
    higher_is_better: Mapping[str, bool | None]

    @classmethod
    def of(cls, job: Job, mode: str | None) -> Measuring | None:
        """The ``Measuring`` of a job; None if it has no metrics.

        Args:
            job: what the workers train.
            mode: the schedule's ``mode``, if it follows a metric or the loss.

        Raises:
            ConfigError: the metrics have no rows, or the schedule cannot follow its metric.
        """
        if job.metrics is not None and job.schema.validation is None:
            raise ConfigError(HOLD_OUT)
        known = {} if job.metrics is None else job.metrics.higher_is_better()
        if job.scheduler_metric is not None:
            _require_followed(job.scheduler_metric, known, mode)
        return None if job.metrics is None else cls(job.metrics, job.scheduler_metric, known)

    def __call__(self, counted: EpochCounted) -> dict[str, MetricValue]:
        """Compute the metrics of an epoch.

        Raises:
            ModelError: a metric cannot be computed.
            ConfigError: one has too many numbers to keep, or is followed by the learning rate but
                not one number.
            TrainingError: a worker did not send its counts.
        """
        epoch = counted.epoch
        states = [_octets(rank, kept) for rank, kept in enumerate(counted.states)]
        values = self.metrics.measure(states)
        for name, value in values.items():
            if (numbers := _numbers(value)) > MAX_NUMBERS:
                raise ConfigError(
                    f"metric '{name}' has {numbers} values after epoch {epoch}, but the history "
                    f"takes at most {MAX_NUMBERS}. Curves have fewer with thresholds=200; or "
                    "measure it once, with model.evaluate(df, metrics)"
                )
        if self.followed is not None and not isinstance(values[self.followed], float):
            raise ConfigError(
                f"schedulerMetric='{self.followed}' came to {values[self.followed]!r:.80} after "
                f"epoch {epoch}; the scheduler can follow only a metric with a single value"
            )
        return values


def _require_followed(name: str, known: Mapping[str, bool | None], mode: str | None) -> None:
    """Check that the metric for the learning rate to follow is measured, and really followed.

    Args:
        name: the metric's name.
        known: for each metric, whether a larger value is better; None if it does not say.
        mode: what the schedule takes to be better; None if it follows nothing.

    Raises:
        ConfigError: it is not measured, not followed, or better in the other direction.
    """
    if name not in known:
        raise ConfigError(
            f"schedulerMetric is {name!r}, which is not one of the metrics "
            f"({', '.join(known) or 'there are none: set metrics'})"
        )
    if mode is None:
        raise ConfigError(
            f"schedulerMetric is {name!r}, but the scheduler follows no metric. Set "
            "scheduler=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, ...), or leave "
            "schedulerMetric out"
        )
    higher = known[name]
    if higher is not None and higher != (mode == "max"):
        raise ConfigError(
            f"a {'larger' if higher else 'smaller'} {name} is better, but the scheduler has "
            f"mode='{mode}': set partial(ReduceLROnPlateau, mode='{'max' if higher else 'min'}', "
            "...)"
        )


def _octets(rank: int, kept: WorkerState | None) -> bytes:
    if kept is None:
        raise TrainingError(f"rank {rank} has not sent its metrics' states")
    return b"".join(kept.blocks(_BLOCK))


def _numbers(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_numbers, value)) if isinstance(value, list) else 1


logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two calls of ``on_tick``."""


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Who follows a run; by default nobody.

    Attributes:
        check: called with what the workers found in their rows, before any of them trains on the
            rows; an exception ends the run. Returns how they use the loss; None if it is not known.
        on_event: called with the data's statistics and with each window and epoch reported, in the
            thread that serves the run.
        callbacks: also called in that thread; they may end the training.
        settings: other settings of the training, by name, to be shown to callbacks and in reports.
    """

    check: Callable[[DataStatistics], LossUse] = lambda statistics: None
    on_event: Callable[[Event], None] = lambda event: None
    callbacks: Sequence[Callback] = ()
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(eq=False)
class Serving:
    """Checks what the workers report, lets them train, and passes the reports on.

    Attributes:
        job: what is trained.
        observers: called with what concerns them.
        training: what the callbacks see.
        resumed: the checkpoint that this process started from, if there was one.
        measuring: computes the metrics; None if there are none.
        resize: decides on other numbers of workers; None if theirs does not change.
        calls: the calls to the callbacks.
    """

    job: Job
    observers: Observers
    training: Training
    resumed: ResumedCheckpoint | None = None
    measuring: Measuring | None = None
    resize: Resize | None = None
    _first: DataStatistics | None = field(default=None, init=False)
    _loss_use: LossUse = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.calls = Calls(self.observers.callbacks, self.training)

    def __call__(self, averager: Averager) -> None:
        """Serve an averager's workers to the end."""
        if self.resize is not None:
            self.resize.begin(averager)
        looks = self.observers.callbacks or self.resize
        for event in averager.events(look_s=LOOK_S if looks else math.inf):
            try:
                self._note(averager, event)
            except SparkDLError as error:
                # Workers wait for an answer, and the launch waits for them to leave.
                averager.fail(error)
                raise
        if self.resize is not None and self.resize.is_due and averager.told_to_end is not None:
            raise averager.told_to_end

    def tell(self, event: Event) -> None:
        """Pass an event on to callbacks and ``on_event``."""
        training = self.training
        training.recording.note(event)
        if isinstance(event, DataStatistics):
            lengths = [column.longest for column in event.columns]
            training.schema = self.job.schema.of_lengths(lengths)
        if training.schema is not None:  # times may arrive before the rows are known
            self.observers.on_event(event)
        self.calls(event)

    def settle(self, averager: Averager) -> Sequence[Tensor]:
        """After the end, make sure that all is in a checkpoint; returns the model's segments."""
        training = self.training
        if training.stopped is not None:
            logger.info("the training was stopped: %s", training.stopped)
        kept = averager.kept_model
        averager.save_center()
        if kept is None:
            return averager.center.values
        logger.info("the model of epoch %d is returned", kept.epoch)
        return kept.values

    def _note(self, averager: Averager, event: Event) -> None:
        given_up = RoundCommitted | EpochSummary | EpochCounted | EpochValidated
        if self.resize is not None and self.resize.is_due and isinstance(event, given_up):
            return  # others will train the epoch again, and its first end must not be told of
        if isinstance(event, EpochCounted):
            assert self.measuring is not None
            averager.measured(event.epoch, self.measuring(event))
            return
        training = self.training
        if isinstance(event, TimePassed):
            self.calls(event)
            if training.stopped is not None:
                # What has been trained since the last round should count.
                averager.want_commit()
            elif self.resize is not None and (reason := self.resize.look(averager)):
                averager.stop(reason)
            return
        awaits_commit = training.stopped is not None
        is_news = not isinstance(event, DataStatistics) or self._examine(event)
        if is_news and isinstance(event, DataStatistics):
            training.recording.note_loss_use({"loss divides by": self._loss_use or "not known"})
        if is_news:
            self.tell(event)
        if isinstance(event, EpochValidated) and training.kept_epoch == event.summary.epoch:
            kept = averager.kept_model
            if kept is None or kept.epoch != event.summary.epoch:  # a checkpoint's is the same
                averager.keep_model(event.summary.epoch)
        is_commit = isinstance(event, RoundCommitted | EpochValidated)
        if training.stopped is not None and (is_commit or not awaits_commit):
            averager.stop(training.stopped)
        elif isinstance(event, DataStatistics):
            averager.start(self._loss_use or "")
        elif isinstance(event, EpochValidated):
            self._approve(averager, event.summary.epoch)

    def _approve(self, averager: Averager, epoch: int) -> None:
        """Let the workers begin the next epoch, or another number of them."""
        reason = None if self.resize is None else self.resize.epoch_ended(averager, epoch)
        if reason is None:
            averager.approve_epoch(epoch)
        else:
            averager.stop(reason)

    def _examine(self, statistics: DataStatistics) -> bool:
        """Raise if anything is wrong with the rows; returns whether this is the first check."""
        job, resumed = self.job, self.resumed
        if self._first is None:
            columns = job.schema.columns
            check_statistics(statistics, columns, len(job.schema.features))
            # What the check has said of the loss, or what is known of torch's own.
            transforms = job.feed.transform is not None
            self._loss_use = self.observers.check(statistics) or divides_by(
                job.loss, job.schema, statistics, transforms=transforms
            )
            if resumed is not None:
                require_same_rows(resumed, statistics, columns)
                if has_ended(resumed, job.epochs):
                    logger.warning(
                        "the training in %s already ended with epoch %d: its model is returned "
                        "without another step. To train again use another checkpointPath, or "
                        "start over with resume='never'",
                        resumed.saved.path,
                        job.epochs,
                    )
            self._first = statistics
            return True
        self.training.recording.note_shards(statistics.shard_rows)
        resized = len(self._first.shard_rows) != len(statistics.shard_rows)
        known, present = self._first.lasting(resized=resized), statistics.lasting(resized=resized)
        if repr(known) != repr(present):
            raise DataError(
                f"the workers were restarted and read different rows ({statistics.rows} rows now, "
                f"{self._first.rows} then, or with other values): the DataFrame is not the same "
                "each time it is computed (rand() without a seed, a limit, a changing source?). "
                "Persist or write it first"
            )
        return False


def setup_of(job: Job, replica: Replica, layout: Layout, settings: Mapping[str, object]) -> Setup:
    """What is trained, and how, for callbacks and reports."""
    strategy = job.strategy
    parameters = list(replica.module.parameters())
    return Setup(
        model=type(replica.module).__name__,
        strategy=repr(strategy),
        period=getattr(strategy, "period", None),
        aggregation=getattr(strategy, "aggregation", None),
        collective=strategy.needs.collective,
        wire_dtype=getattr(strategy, "wire_dtype", None),
        epochs=job.epochs,
        batch_size=job.batch_size,
        parameters=sum(each.numel() for each in parameters),
        trained=sum(each.numel() for each in parameters if each.requires_grad),
        model_bytes=sum(
            segment.numel * segment.dtype.itemsize
            for segment in layout
            if segment.kind in ("parameters", "buffers")
        ),
        settings=settings,
        traffic=traffic_of(strategy, layout, replica.trainable()),
    )


def training_of(
    job: Job,
    recording: Recording,
    progress: Progress | None,
    kept_model: KeptModel | None,
    plan: CheckpointPlan | None,
    measuring: Measuring | None,
) -> Training:
    """What callbacks see when a training begins or resumes."""
    history = () if progress is None else progress.history
    # If nothing was committed after an epoch, the workers validate that epoch again.
    known = len(history) if progress is None or progress.rounds else len(history) - 1
    kept_epoch = None if kept_model is None else kept_model.epoch
    metrics = {} if measuring is None else measuring.higher_is_better
    history = history[: max(known, 0)]
    recording.begin(history)
    return Training(
        job.epochs,
        list(history),
        kept_epoch,
        metrics,
        recording=recording,
        step=0 if progress is None else max(each.step for each in progress.positions),
        resumed=progress is not None,
        identity=None if plan is None else _name_of(plan),
        features_as_kwargs=job.features_as_kwargs,
    )


def _name_of(plan: CheckpointPlan) -> str:
    """A name shared by all fits that resume from each other's checkpoints."""
    told = json.dumps([plan.store.path, plan.config], sort_keys=True, default=repr)
    return hashlib.sha256(told.encode()).hexdigest()[:32]
