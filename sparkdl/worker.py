"""The loop of one worker: feed x replica x strategy.

A worker is a function of (job, averager's address, iterator of record batches); it knows nothing
of Spark. The algorithm, as a textbook has it:

    read the worker's rows, once; or begin the first epoch with those that are there
    replica <- initial center
    for each epoch:
        if it is time to, the workers exchange their rows
        the strategy steps on each minibatch of the worker's rows and makes the replicas agree
        the loss on held-out rows, if there are any
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from sparkdl.averager.client import AveragerClient, report_start_failure
from sparkdl.averager.progress import Position
from sparkdl.checkpoint.own_state import pack_own_state, unpack_own_state
from sparkdl.collective import Collective, Network, join_collective
from sparkdl.collective.network import local_address
from sparkdl.collective.peers import PeerAwayError, Peers, Visitors
from sparkdl.errors import (
    CheckpointError,
    CollectiveError,
    DeadlineError,
    DisconnectedError,
    NonFiniteError,
    StoppedError,
    TrainingError,
    WorkerError,
)
from sparkdl.events import ValidationReport
from sparkdl.feed.columns import FeedSchema
from sparkdl.feed.facts import ShardFacts
from sparkdl.feed.feed import Feed, FeedOptions
from sparkdl.metrics import Metrics
from sparkdl.missing_modules import advice
from sparkdl.phases import COMPUTE, DECODE, READ, PhaseClock
from sparkdl.protocols import (
    LossFunction,
    ModelBuilder,
    OptimizerBuilder,
    SchedulerBuilder,
    Targets,
)
from sparkdl.randomness import borrowed_random_numbers, seed_worker
from sparkdl.replica import Precision, Replica
from sparkdl.reshuffle import RowExchange, RowServer
from sparkdl.reshuffle.exchange import Everyone, Peer
from sparkdl.schedule import Unit
from sparkdl.strategies.base import Run, Strategy
from sparkdl.strategies.on_worker import OnWorker
from sparkdl.torch_settings import TorchSettings
from sparkdl.tracebacks import traceback_of
from sparkdl.transport.address import AveragerAddress
from sparkdl.transport.connecting import introduced
from sparkdl.transport.connection import Connection
from sparkdl.worker_callback import StepCalls, WorkerCallback

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker of one fit is told; the same for all."""

    model: ModelBuilder
    """Builds the module; called under ``seed`` on every worker."""
    loss: LossFunction
    optimizer: OptimizerBuilder
    strategy: Strategy[Any]
    schema: FeedSchema
    epochs: int
    batch_size: int
    """Rows a minibatch, on each worker."""
    seed: int
    deadline_s: float
    """The longest that anything is waited for, in seconds."""
    max_failures: int = 0
    """How often workers may be lost in all; 0 to end the run at the first loss."""
    min_workers: int = 1
    """With how many workers rounds go on while others are lost."""
    clip_norm: float | None = None
    """The largest norm of all gradients together; None for no limit."""
    precision: Precision = "float32"
    """In which forward and loss are computed."""
    scheduler: SchedulerBuilder | None = None
    """Builds the schedule of the learning rate; None for none."""
    scheduler_every: Unit = "epoch"
    """After what the schedule takes a step."""
    features_as_kwargs: bool = False
    """Whether features by name are the model's arguments by those names, not one dict."""
    feed: FeedOptions = field(default_factory=FeedOptions)
    """How the rows are fed."""
    callbacks: tuple[WorkerCallback, ...] = ()
    """Called on the workers around each step."""
    metrics: Metrics | None = None
    """Measured on the held-out rows after each epoch; needs ``schema.validation``."""
    scheduler_metric: str | None = None
    """The metric that a schedule follows which follows epochs; None for the loss."""
    tls: bool = False
    """Whether the connections of workers to the driver and to each other are encrypted."""
    settings: TorchSettings = field(default_factory=TorchSettings.here)
    """torch's on every worker: those of the process that makes the job."""

    @property
    def survivable_losses(self) -> int:
        """How often workers may be lost and come back.

        Never if all have to run at once, nor if what a lost worker had came from others who do not
        have it any more.
        """
        feed = self.feed
        given_away = feed.reshuffle_every or (feed.exchange_rows and not feed.keep_exchanged)
        alone = self.strategy.needs.resumes_alone and not given_away
        return self.max_failures if alone else 0

    @property
    def resubmissions(self) -> int:
        """How often all workers may be started anew, from the last center, because one was lost.

        Never if one that is lost can come back alone, nor if workers keep what no center holds.
        """
        alone = self.survivable_losses or not self.strategy.needs.checkpointable
        return 0 if alone else self.max_failures

    def steps_before(self, epoch: int, shard_rows: Sequence[int]) -> int:
        """Optimizer steps of the worker with the most rows in all epochs before one.

        Args:
            epoch: counted from 1.
            shard_rows: rows of each worker as they were read.
        """
        as_read = int(min(epoch - 1, self.feed.epochs_as_read))
        evenly = math.ceil(sum(shard_rows) / len(shard_rows))
        return as_read * self._steps(max(shard_rows)) + (epoch - 1 - as_read) * self._steps(evenly)

    def _steps(self, rows: int) -> int:
        if self.feed.drop_last:
            rows -= rows % self.batch_size
        return math.ceil(rows / (self.batch_size * self.strategy.needs.minibatches_a_step))


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one worker is told about where it runs."""

    rank: int
    device: str = "cpu"
    """A torch device, for example ``cpu`` or ``cuda:0``."""
    threads: int = 1
    """torch's threads; Spark's cores per task."""
    directory: Path
    """Where the partition store may write."""
    attempt: int = 0
    """Of Spark's task; a later attempt takes the place of an earlier."""
    task: int | None = None
    """The number of Spark's task, if several workers may share it."""
    network: Network = field(default_factory=Network)
    """How it reaches the other workers."""


def train(
    job: Job, place: Place, address: AveragerAddress, batches: Iterable[pa.RecordBatch]
) -> None:
    """Train one replica from the first epoch to the last.

    Returns normally also if the run was ended elsewhere; the averager then knows why.

    Args:
        job: what to train.
        place: where this worker runs.
        address: the driver's averager.
        batches: the worker's rows, once; exhausted before the first epoch, or in it.

    Raises:
        DisconnectedError: the averager could never be reached, so that it knows nothing of this
            worker; or it cannot be any more, and the run survives that. Whoever started the
            worker should start it again, or say so.
    """
    torch.set_num_threads(place.threads)
    with job.settings.hold():
        _train_replica(job, place, address, batches)


def _train_replica(
    job: Job, place: Place, address: AveragerAddress, batches: Iterable[pa.RecordBatch]
) -> None:
    clock = PhaseClock()
    try:
        # As the driver draws: parameters that are never trained come from nowhere else.
        with borrowed_random_numbers(job.seed):
            replica = Replica(
                job.model(),
                job.optimizer,
                job.loss,
                place.device,
                clip_norm=job.clip_norm,
                precision=job.precision,
                scheduler=job.scheduler,
                scheduler_every=job.scheduler_every,
                features_as_kwargs=job.features_as_kwargs,
            )
    except Exception as error:  # whatever the user's code raises has to reach the driver
        report_failure(address, place.rank, error)
        return
    strategy = OnWorker(job.strategy)
    joined = False
    try:
        with AveragerClient(
            address,
            place.rank,
            job.strategy.wire_format,
            deadline_s=job.deadline_s,
            own_state=lambda: own_state(replica, job.strategy, strategy.saved_state()),
            fragments=job.strategy.fragments,
            attempt=place.attempt,
            task=place.task,
            kept_state=(
                (lambda: kept_state(replica, job.strategy, strategy.saved_state()))
                if job.resubmissions
                else None
            ),
            frozen=replica.frozen.fingerprint,
            clock=clock,
        ) as averager:
            joined = True
            run = Run(place.rank, replica, averager, clock=clock)
            if job.callbacks:
                run.calls = StepCalls(job.callbacks, place.rank, replica)
            try:
                _train(job, place, run, strategy, averager, address.token, batches)
            except (StoppedError, DeadlineError):
                raise
            except CollectiveError as error:
                averager.report_failure(CollectiveError(f"{_where(place.rank, run)}: {error}"))
            except Exception as error:  # as above
                averager.report_failure(_as_worker_error(error, place.rank, run))
    except (StoppedError, DeadlineError) as error:
        if isinstance(error, DisconnectedError) and (job.survivable_losses or not joined):
            raise
        # The averager has ended the run and knows why, or is gone; raising would make Spark retry.
        logger.info("rank %d leaves: %s", place.rank, error)


def report_failure(address: AveragerAddress, rank: int, error: Exception) -> None:
    """End the run from a worker that could not even start.

    Args:
        address: the driver's averager.
        rank: the worker's rank.
        error: why it could not start.

    Raises:
        DisconnectedError: the averager cannot be reached; ``error`` is its cause.
    """
    try:
        report_start_failure(address, _as_worker_error(error, rank, None))
    except DisconnectedError as unreachable:
        raise unreachable from error
    except (StoppedError, DeadlineError) as answer:
        logger.info("rank %d leaves: %s", rank, answer)


def _train(
    job: Job,
    place: Place,
    run: Run,
    strategy: OnWorker[Any],
    averager: AveragerClient,
    token: str,
    batches: Iterable[pa.RecordBatch],
) -> None:
    replica = run.replica
    replica.module.train()
    visitors = Visitors()
    with (
        Feed(
            job.schema,
            batch_size=job.batch_size,
            seed=job.seed,
            rank=place.rank,
            directory=place.directory,
            device=place.device,
            options=job.feed,
        ) as feed,
        _row_server(job, place, token, visitors) as row_server,
    ):
        exchange = None
        if row_server is not None and _exchanges_rows(job):
            exchange = _row_exchange(job, place, averager, token, row_server)
        if job.strategy.needs.peers:
            reach = partial(_reach_peer, job, place, averager, token)
            run.peers = Peers(place.rank, reach, visitors)
        shard = _read(feed, batches, job, averager, run.clock)
        run.batch_size = job.batch_size
        # Replicas start equal but must not draw equal dropout masks.
        seed_worker(job.seed + 1 + place.rank)
        while True:
            try:
                position = _take_center(job, shard, run, strategy, averager, row_server)
                if position is None:
                    with run.clock.phase(READ):
                        shard = feed.read_rest()
                    continue
                feed.scale_weights(averager.mean_weight)
                if averager.epoch_ended and job.schema.validation is not None:
                    # All may have been interrupted before they had reported it.
                    _report_validation(job, run, averager, feed, position.epoch - 1)
                with _collective(job, place, averager, run.clock) as run.collective:
                    _train_from(position, job, run, strategy, averager, feed, exchange)
                if job.metrics is not None:
                    # Until they are computed this worker may have to count again.
                    averager.epoch_losses(job.epochs)
                averager.finish()
                return
            except DisconnectedError as error:
                if not job.survivable_losses:
                    raise
                logger.warning("rank %d connects again: %s", place.rank, error)
                averager.reconnect()
                with run.clock.phase(READ):
                    shard = feed.read_rest()


def _train_from(
    position: Position,
    job: Job,
    run: Run,
    on_worker: OnWorker[Any],
    averager: AveragerClient,
    feed: Feed,
    exchange: RowExchange | None,
) -> None:
    """Train from a position to the end of the last epoch."""
    strategy = job.strategy
    run.start_at(position)
    if exchange is not None and position.epoch <= job.epochs:
        # The rows that this worker had then come from every exchange before.
        for earlier in filter(job.feed.reshuffles, range(1, position.epoch + 1)):
            with run.clock.phase(READ):
                feed.reshuffle(earlier, exchange)
    run.rows = feed.used_rows
    run.world_size = len(averager.shard_rows)
    with on_worker.started(run) as state:
        for epoch in range(position.epoch, job.epochs + 1):
            first_step = position.step_of_epoch if epoch == position.epoch else 0
            run.start_epoch(epoch, first_step)
            if averager.asks_leave:
                averager.epoch_losses(epoch - 1)
            _start_schedule(job, run.replica, averager, epoch, first_step)
            if exchange is not None and job.feed.reshuffles(epoch) and epoch > position.epoch:
                with run.clock.phase(READ):
                    feed.reshuffle(epoch, exchange)
                run.rows = feed.used_rows
                strategy.rows_changed(run, state)
            first_minibatch = first_step * strategy.needs.minibatches_a_step
            if feed.complete:
                batches = run.clock.each(DECODE, feed.epoch(epoch, first_step=first_minibatch))
            else:
                batches = run.clock.each(READ, feed.arriving(averager.show_rows))
            with run.clock.phase(COMPUTE):
                strategy.train_epoch(run, state, batches)
            if averager.closed_epoch != epoch:
                raise TrainingError(
                    f"{type(strategy).__name__} has ended the epoch without exchanging a window "
                    "with last=True, for which the other workers would wait for ever"
                )
            if job.feed.streams(epoch):
                averager.ask_for_rows()
            if job.schema.validation is not None:
                _report_validation(job, run, averager, feed, epoch)


def _read(
    feed: Feed,
    batches: Iterable[pa.RecordBatch],
    job: Job,
    averager: AveragerClient,
    clock: PhaseClock,
) -> ShardFacts:
    """Read what the first epoch begins with."""
    if job.feed.stream_first_epoch:
        # Another thread takes what arrives, and the clock is this one's.
        with clock.phase(READ):
            return feed.read_first(batches, averager.report_reading)
    with clock.phase(DECODE):
        return feed.read_first(clock.each(READ, batches), averager.report_reading)


def own_state(replica: Replica, strategy: Strategy[Any], saved: Mapping[str, Any]) -> bytes:
    """What of a worker is not part of the center, for a checkpoint."""
    return pack_own_state(
        replica.optimizer,
        replica.device,
        center_has_optimizer=strategy.needs.exchanges_optimizer_state,
        schedule_steps=replica.schedule.steps,
        of_strategy=saved,
    )


def kept_state(replica: Replica, strategy: Strategy[Any], saved: Mapping[str, Any]) -> bytes:
    """What the driver keeps of a worker, to start all again from a commit.

    The random numbers, the strategy's state, and of the optimizer what the center does not hold.
    State that replicas do not exchange is left out, for the driver's memory must not grow with the
    workers.
    """
    pack = partial(
        pack_own_state,
        device=replica.device,
        center_has_optimizer=True,
        schedule_steps=replica.schedule.steps,
        of_strategy=saved,
    )
    optimizer = replica.optimizer if strategy.needs.exchanges_optimizer_state else None
    try:
        return pack(optimizer)
    except CheckpointError:  # of an optimizer of the user's, which nobody asked to be saved
        return pack(None)


def _take_center(
    job: Job,
    shard: ShardFacts,
    run: Run,
    on_worker: OnWorker[Any],
    averager: AveragerClient,
    row_server: RowServer | None,
) -> Position | None:
    """Make the replica equal to the center, and with a checkpoint to the worker of that time.

    Returns where it goes on; None if the rest of the rows has to be read first.
    """
    strategy, replica = job.strategy, run.replica
    position = averager.start(
        shard,
        replica.segments(with_optimizer=False),
        replica.layout(with_optimizer=False),
        None if row_server is None else row_server.address,
    )
    if position is None:
        return None
    if not averager.resumes:
        # An optimizer may remember with what values it was built. If the worker has connected
        # again, its steps before that belong to no commit.
        replica.rebuild_optimizer()
    whole = strategy.needs.exchanges_optimizer_state
    if whole and not averager.resumes:
        replica.count_optimizer_state()
    octets = b""
    if averager.resumes:
        octets = averager.resume(
            replica.segments(with_optimizer=whole), replica.layout(with_optimizer=whole)
        )
    # What the last epoch came to is known when all have validated; until then it stands before it.
    not_known = replica.schedule.follows_epoch_losses and averager.epoch_ended
    _start_schedule(job, replica, averager, position.epoch - not_known, position.step_of_epoch)
    on_worker.restored = {}
    if octets:
        # Where an epoch has ended, the schedule goes on from there when the next one starts.
        on_worker.restored = unpack_own_state(
            octets,
            replica.optimizer,
            replica.device,
            partial(
                replica.schedule.stand_at,
                ahead=strategy.needs.steps_ahead,
                pace=len(averager.shard_rows) if strategy.needs.leads_schedule else 1,
            ),
        )
    return position


def _start_schedule(
    job: Job, replica: Replica, averager: AveragerClient, epoch: int, step_of_epoch: int
) -> None:
    losses = averager.epoch_losses(epoch - 1) if replica.schedule.follows_epoch_losses else ()
    before = job.steps_before(epoch, averager.shard_rows)
    replica.schedule.start_at(epoch, before + step_of_epoch, losses)


def _collective(
    job: Job, place: Place, averager: AveragerClient, clock: PhaseClock
) -> AbstractContextManager[Collective | None]:
    """The group of all workers while they train, if the strategy needs it."""
    if not job.strategy.needs.collective:
        return nullcontext()
    return join_collective(
        place.rank,
        averager.gather,
        device=place.device,
        deadline_s=job.deadline_s,
        network=place.network,
        clock=clock,
    )


def _exchanges_rows(job: Job) -> bool:
    return job.feed.exchange_rows or bool(job.feed.reshuffle_every)


def _row_server(
    job: Job, place: Place, token: str, visitors: Visitors
) -> AbstractContextManager[RowServer | None]:
    """Where other workers fetch rows from this one, and visit it, if they ever do."""
    if not (_exchanges_rows(job) or job.strategy.needs.peers):
        return nullcontext()
    address = local_address(place.network)
    visit = visitors.serve if job.strategy.needs.peers else None
    return RowServer(address, token, job.deadline_s, tls=job.tls, visit=visit)


def _reach_peer(
    job: Job, place: Place, averager: AveragerClient, token: str, rank: int, silence_s: float
) -> Connection:
    """Connect to another worker where it is now."""
    averager.ask_for_rows()
    peer = Peer.of(rank, averager.row_servers, encrypted=job.tls)
    address = (peer.host, peer.port)
    try:
        return introduced(place.rank, f"rank {rank}", address, token, peer.fingerprint, silence_s)
    except (DisconnectedError, StoppedError) as error:  # another job may listen there by now
        raise PeerAwayError(str(error)) from error


def _row_exchange(
    job: Job, place: Place, averager: AveragerClient, token: str, row_server: RowServer
) -> RowExchange:
    def everyone() -> Everyone:
        averager.ask_for_rows()
        return Everyone(averager.shard_rows, averager.row_servers)

    return RowExchange(
        rank=place.rank,
        server=row_server,
        token=token,
        everyone=everyone,
        specs=job.schema.stored,
        seed=job.seed,
        deadline_s=job.deadline_s,
        survives=job.survivable_losses > 0,
        on_rows=averager.report_reading,
        tls=job.tls,
    )


def _report_validation(
    job: Job, run: Run, averager: AveragerClient, feed: Feed, epoch: int
) -> None:
    """Tell the driver of the loss on this worker's held-out rows, and what metrics count there."""
    if job.metrics is None:
        averager.report_validation(_validate(run, feed, epoch))
        return
    counted = job.metrics.begin(run.replica.device)
    report = _validate(run, feed, epoch, counted.update)
    averager.report_validation(report, counted.states())


def _validate(
    run: Run, feed: Feed, epoch: int, watch: Callable[[Any, Targets], None] | None = None
) -> ValidationReport:
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


def _as_worker_error(error: Exception, rank: int, run: Run | None) -> WorkerError:
    """Say where the error happened, with the worker's own traceback."""
    if isinstance(error, NonFiniteError):
        return error
    epoch, step = (run.epoch, run.step) if run is not None else (0, 0)
    where = _where(rank, run)
    own = isinstance(error, TrainingError)
    text = "" if own else traceback_of(error)
    message = f"{where}: {error}" if own else f"{where}: {type(error).__name__}: {error}"
    if not own:
        message += f"{_advice(error)}\n\n{text}"
    return WorkerError(message, rank=rank, epoch=epoch, step=step, worker_traceback=text)


def _where(rank: int, run: Run | None) -> str:
    epoch, step = (run.epoch, run.step) if run is not None else (0, 0)
    return f"rank {rank}, epoch {epoch}, step {step}"


def _advice(error: Exception) -> str:
    """What to do about an error for want of memory or of a module; empty for others."""
    if isinstance(error, ModuleNotFoundError):
        return f"\n{advice(error)}"
    if isinstance(error, torch.OutOfMemoryError):
        return "\nThe GPU's memory is full: lower batchSize, or set precision='bf16'"
    # torch's allocator on CPUs has no error of its own.
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return (
            "\nThe worker ran out of memory: raise spark.executor.memoryOverhead (and "
            "spark.executor.pyspark.memory where that is set, for it is the limit), or lower "
            "batchSize or memoryBudget"
        )
    return ""
