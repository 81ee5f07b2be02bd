"""What workers are given: the job, the same for all, and where each of them runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkdl.averager.run_events import Position
from sparkdl.collective import Network
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.schema import FeedSchema
from sparkdl.metrics import Metrics
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.process.torch_settings import TorchSettings
from sparkdl.protocols import LossFunction, ModelBuilder, OptimizerBuilder, SchedulerBuilder
from sparkdl.replica import Precision, Replica
from sparkdl.replica.schedule import Unit
from sparkdl.strategies.base import Strategy
from sparkdl.worker_callback import WorkerCallback

_BEGINNING = Position()


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker of a fit is given, the same for all."""

    model: ModelBuilder
    """Builds the module; called under ``seed`` on every worker."""
    loss: LossFunction
    optimizer: OptimizerBuilder
    strategy: Strategy[Any]
    schema: FeedSchema
    epochs: int
    batch_size: int
    """Rows per minibatch, on each worker."""
    seed: int
    deadline_s: float
    """The longest time to wait for anything, in seconds."""
    max_failures: int = 0
    """How often workers may be lost in total; 0 to end the run at the first loss."""
    min_workers: int = 1
    """The fewest workers with which rounds go on while others are lost."""
    max_workers: int | None = None
    """The most workers, if their number may change between epochs."""
    clip_norm: float | None = None
    """The largest norm of all gradients together; None for no limit."""
    precision: Precision = "float32"
    """The precision in which the forward pass and the loss are computed."""
    scheduler: SchedulerBuilder | None = None
    """Builds the learning rate schedule; None for none."""
    scheduler_every: Unit = "epoch"
    """The unit after which the schedule takes a step."""
    features_as_kwargs: bool = False
    """Whether features by name are passed as keyword arguments, not as one dict."""
    feed: FeedOptions = field(default_factory=FeedOptions)
    """How the rows are fed."""
    callbacks: tuple[WorkerCallback, ...] = ()
    """Called on the workers around each step."""
    metrics: Metrics | None = None
    """Measured on the held-out rows after each epoch; needs ``schema.validation``."""
    scheduler_metric: str | None = None
    """The metric followed by a schedule that follows epochs; None for the loss."""
    tls: bool = False
    """Whether the connections of workers to the driver and to each other are encrypted."""
    settings: TorchSettings = field(default_factory=TorchSettings.here)
    """torch's settings on every worker: those of the process that makes the job."""

    def replica(self, device: str = "cpu") -> Replica:
        """Build the replica, with the same initial parameters on each worker and in the driver.

        Parameters that are never trained come only from here.
        """
        with borrowed_random_numbers(self.seed):
            return Replica(
                self.model(),
                self.optimizer,
                self.loss,
                device,
                clip_norm=self.clip_norm,
                precision=self.precision,
                scheduler=self.scheduler,
                scheduler_every=self.scheduler_every,
                features_as_kwargs=self.features_as_kwargs,
            )

    @property
    def survivable_losses(self) -> int:
        """How often workers may be lost and come back.

        Never if they exchange among themselves, nor if what a lost worker had came from others
        that no longer have it.
        """
        feed = self.feed
        given_away = feed.reshuffle_every or (feed.exchange_rows and not feed.keep_exchanged)
        together = self.strategy.needs.collective or given_away
        return 0 if together else self.max_failures

    @property
    def resubmissions(self) -> int:
        """How often all workers may be restarted, from the last center, because one was lost.

        Never if a lost worker can come back alone, nor if workers keep what no center holds.
        """
        alone = self.survivable_losses or not self.strategy.needs.checkpointable
        return 0 if alone else self.max_failures

    def steps_before(
        self, epoch: int, shard_rows: Sequence[int], since: Position = _BEGINNING
    ) -> int:
        """Optimizer steps of the worker with the most rows in all epochs before one.

        Args:
            epoch: counted from 1.
            shard_rows: each worker's rows as they were read.
            since: from where on there have been as many workers.
        """
        evenly = math.ceil(sum(shard_rows) / len(shard_rows))

        def steps(epochs: int) -> int:
            as_read = int(min(epochs, self.feed.epochs_as_read))
            return as_read * self._steps(max(shard_rows)) + (epochs - as_read) * self._steps(evenly)

        return since.step + steps(epoch - 1) - steps(since.epoch - 1)

    def _steps(self, rows: int) -> int:
        if self.feed.drop_last:
            rows -= rows % self.batch_size
        return math.ceil(rows / (self.batch_size * self.strategy.needs.minibatches_a_step))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What one worker is told about where it runs."""

    rank: int
    device: str = "cpu"
    """A torch device, for example ``cpu`` or ``cuda:0``."""
    threads: int = 1
    """torch's threads; Spark's cores per task."""
    directory: Path
    """Where the partition store may write."""
    attempt: int = 0
    """The attempt of Spark's task; a later one replaces an earlier one."""
    task: int | None = None
    """The number of Spark's task, if several workers may share it."""
    network: Network = field(default_factory=Network)
    """How this worker reaches the others."""
