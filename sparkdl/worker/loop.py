"""The loop of one worker: feed x replica x strategy.

The algorithm, as a textbook has it:

    read the worker's rows, once
    replica <- initial center
    for each epoch:
        if it is due, the workers exchange their rows
        the strategy steps on each minibatch of the worker's rows and makes the replicas agree
        compute the loss on held-out rows, if any, which the workers exchange the first time
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from torch import Tensor

from sparkdl.averager.client import AveragerClient
from sparkdl.averager.run_events import Position
from sparkdl.errors import DisconnectedError, TrainingError
from sparkdl.events import ValidationReport
from sparkdl.feed.feed import Feed
from sparkdl.feed.order import stream_seed
from sparkdl.feed.shards import ShardStatistics
from sparkdl.phases import COMPUTE, DECODE, READ
from sparkdl.process.randomness import seed_worker
from sparkdl.protocols import Batch, Targets
from sparkdl.strategies.base import Run
from sparkdl.worker.job import Job, Placement
from sparkdl.worker.links import WorkerLinks
from sparkdl.worker.state import unpack_worker_state

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class TrainingLoop:
    """Trains one replica from the center that the averager holds to the end of the last epoch.

    Attributes:
        job: what to train.
        placement: where this worker runs.
        run: this worker's replica and its progress.
        averager: one that this worker has joined.
        links: the other workers.
    """

    job: Job
    placement: Placement
    run: Run
    averager: AveragerClient
    links: WorkerLinks

    def __post_init__(self) -> None:
        job, placement = self.job, self.placement
        self._feed = Feed(
            job.schema,
            batch_size=job.batch_size,
            seed=job.seed,
            rank=placement.rank,
            directory=placement.directory,
            device=placement.device,
            options=job.feed,
        )

    def train(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Read the rows, take the center and train; again from there after a lost connection.

        Args:
            batches: the worker's rows, once.
        """
        job, run, averager = self.job, self.run, self.averager
        self.run.replica.module.train()
        with self._feed, self.links.met():
            run.peers = self.links.peers
            shard = self._read(batches)
            run.batch_size = job.batch_size
            # Replicas start equal, but must not draw equal dropout masks.
            seed_worker(job.seed + 1 + run.rank)
            while True:
                try:
                    position = self._take_center(shard)
                    self._feed.scale_weights(averager.mean_weight)
                    self.run.replica.use_loss(averager.loss_use or None)
                    with self.links.collective(run.clock) as run.collective:
                        self._train_from(position)
                    exchanges_held_out = self.links.held_out_exchange is not None
                    if job.metrics is not None or exchanges_held_out:
                        # Until metrics are computed, this worker may have to count again, and
                        # others may still fetch their held-out rows, or fetch them again.
                        averager.epoch_losses(job.epochs)
                    averager.finish()
                    return
                except DisconnectedError as error:
                    if not job.survivable_losses:
                        raise
                    logger.warning("rank %d is reconnecting: %s", run.rank, error)
                    averager.reconnect()

    def _train_from(self, position: Position) -> None:
        """Train from a position to the end of the last epoch."""
        run, job, feed = self.run, self.job, self._feed
        run.start_at(position)
        if position.epoch <= job.epochs:
            # The rows that this worker had then result from all earlier exchanges.
            for earlier in range(1, position.epoch + 1):
                self._exchange_rows_before(earlier)
        run.rows = feed.used_rows
        run.world_size = len(self.averager.shard_rows)
        with ExitStack() as run.cleanup:  # also if the strategy cannot start
            state = job.strategy.start(run)
            if self._restored:
                job.strategy.restore_state(state, self._restored)
            run.state = state
            run.cleanup.callback(setattr, run, "state", None)
            if self.averager.epoch_ended:
                # All may have been interrupted before reporting it.
                self._report_validation(position.epoch - 1)
            for epoch in range(position.epoch, job.epochs + 1):
                first_step = position.step_of_epoch if epoch == position.epoch else 0
                run.start_epoch(epoch, first_step)
                if self.averager.asks_leave:
                    self.averager.epoch_losses(epoch - 1)
                self._start_schedule(epoch, first_step)
                if epoch > position.epoch and self._exchange_rows_before(epoch):
                    run.rows = feed.used_rows
                    if run.agree is not None:
                        run.agree(run)
                minibatches = self._minibatches(epoch, first_step)
                with run.clock.phase(COMPUTE):
                    job.strategy.train_epoch(run, state, minibatches)
                self._require_closed(epoch)
                self._report_validation(epoch)

    def _read(self, batches: Iterable[pa.RecordBatch]) -> ShardStatistics:
        clock = self.run.clock
        with clock.phase(DECODE):
            return self._feed.fill(clock.each(READ, batches), lambda _: self.averager.heartbeat())

    def _exchange_rows_before(self, epoch: int) -> bool:
        """Exchange rows with the other workers if that is due; returns whether it was."""
        exchange = self.links.exchange
        if exchange is None or not self.job.feed.reshuffles(epoch):
            return False
        with self.run.clock.phase(READ):
            self._feed.reshuffle(epoch, exchange)
        return True

    def _minibatches(self, epoch: int, first_step: int) -> Iterable[Batch]:
        first = first_step * self.job.strategy.needs.minibatches_a_step
        return self.run.clock.each(DECODE, self._feed.epoch(epoch, first_step=first))

    def _require_closed(self, epoch: int) -> None:
        if self.averager.closed_epoch != epoch:
            raise TrainingError(
                f"{type(self.job.strategy).__name__} ended the epoch without exchanging a "
                "window with last=True, so the other workers would wait for it forever"
            )

    def _take_center(self, shard: ShardStatistics) -> Position:
        """Make the replica equal to the center and, with a checkpoint, to the worker at that time.

        Returns the position to continue from.
        """
        job, replica, averager = self.job, self.run.replica, self.averager
        position = averager.start(
            shard,
            replica.segments(with_optimizer=False),
            replica.layout(with_optimizer=False),
            self.links.address,
        )
        octets = self._take_optimizer()
        self._take_schedule(position)
        resized = position.epoch > 1 and position == averager.since
        if resized and not job.strategy.needs.exchanges_optimizer_state:
            octets = b""
        self._restored = self._unpacked(octets) if octets else {}
        if resized:
            # What is not of the optimizer belongs to one rank of another number of workers.
            self._restored = {}
            seed_worker(stream_seed(job.seed + 1, position.epoch, self.run.rank))
        return position

    def _take_optimizer(self) -> bytes:
        """Give the optimizer the center's state, or none; returns this worker's own, if saved."""
        replica, averager = self.run.replica, self.averager
        whole = self.job.strategy.needs.exchanges_optimizer_state
        if self.job.strategy.needs.shards_replica:
            replica.shard(self.run.rank, len(averager.shard_rows))
        if averager.resumes:
            return averager.resume(replica.whole_state(with_optimizer=whole))
        # An optimizer may remember the values that it was built with. If the worker has
        # reconnected, its steps before that belong to no commit.
        replica.rebuild_optimizer()
        if whole:
            replica.count_optimizer_state()
        return b""

    def _take_schedule(self, position: Position) -> None:
        # The last epoch's loss is known once all have validated; until then the schedule is still
        # before it.
        not_known = self.run.replica.schedule.follows_epoch_losses and self.averager.epoch_ended
        self._start_schedule(position.epoch - not_known, position.step_of_epoch)

    def _unpacked(self, octets: bytes) -> dict[str, Any]:
        """Put back what this worker alone knew; returns what the strategy saved of its state."""
        replica, needs = self.run.replica, self.job.strategy.needs
        pace = len(self.averager.shard_rows) if needs.leads_schedule else 1
        # If an epoch has ended, the schedule goes on from there when the next one starts.
        stand_at = partial(replica.schedule.stand_at, ahead=needs.steps_ahead, pace=pace)
        return unpack_worker_state(octets, replica.optimizer, replica.device, stand_at)

    def _start_schedule(self, epoch: int, step_of_epoch: int) -> None:
        schedule, averager = self.run.replica.schedule, self.averager
        losses = averager.epoch_losses(epoch - 1) if schedule.follows_epoch_losses else ()
        before = self.job.steps_before(epoch, averager.shard_rows, averager.since)
        schedule.start_at(epoch, before + step_of_epoch, losses)

    def _report_validation(self, epoch: int) -> None:
        """Report the loss on this worker's held-out rows to the driver, and its metrics' counts."""
        if self.job.schema.validation is None:
            return
        exchange, exchanged = self.links.held_out_exchange, False
        if exchange is not None:
            with self.run.clock.phase(READ):
                exchanged = self._feed.exchange_held_out(exchange)
        if self.job.metrics is None:
            self.averager.report_validation(_validate(self.run, self._feed, epoch))
        else:
            counted = self.job.metrics.begin(self.run.replica.device)
            report = _validate(self.run, self._feed, epoch, counted.update)
            self.averager.report_validation(report, counted.states())
        if exchanged:
            # Others may have yet to fetch their rows; if one were lost meanwhile, it would find the
            # rest in the next epoch, and its rows would be missing from this epoch's loss.
            self.averager.epoch_losses(epoch)


def _validate(
    run: Run,
    feed: Feed,
    epoch: int,
    watch: Callable[[Any, Targets, Tensor | None], None] | None = None,
) -> ValidationReport:
    shards = run.replica.shards
    if shards is not None and shards.example is None:
        shards.example = next(iter(feed.epoch(epoch)), None)
    with run.clock.phase(COMPUTE):
        held_out = run.clock.each(DECODE, feed.held_out())
        loss_sum, weight = run.replica.evaluate(held_out, watch)
    return ValidationReport(
        rank=run.rank,
        epoch=epoch,
        examples=feed.held_out_rows,
        loss_sum=loss_sum,
        weight=weight,
    )
