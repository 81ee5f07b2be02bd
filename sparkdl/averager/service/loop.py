"""What the averager does in its service's thread: turn bytes into events, decisions into bytes.

Values go from the socket straight into the memory where they are summed; slow work (files of
checkpoints) is done in other threads. The clock is checked only after the sockets.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.events import Event, Member
from sparkdl.averager.messages.headers import stopped_header
from sparkdl.averager.messages.run_events import RunEvent, WorkerLost
from sparkdl.averager.service.conversation import Worker
from sparkdl.averager.service.saving import CheckpointFiles, Saving
from sparkdl.averager.service.snapshot import KeptModel
from sparkdl.averager.values.center import Center
from sparkdl.errors import CheckpointError, SparkDLError, TrainingError
from sparkdl.events import EpochSummary
from sparkdl.transport.framing import header_message
from sparkdl.transport.service import Service

CLOSE_S = 10.0
"""Seconds to wait at the end for a checkpoint that is being written."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EdgeOptions:
    """Where a run meets the world: its port and its clock.

    Attributes:
        host: the interface to bind to, as an address or name of this machine.
        advertised_host: the name under which workers reach it; ``host`` by default.
        tls: whether connections are encrypted.
        now: reads the time, in seconds, by which workers are late.
    """

    host: str = "127.0.0.1"
    advertised_host: str | None = None
    tls: bool = False
    now: Callable[[], float] = time.monotonic


class Loop(Service):
    """The averager's service, which may also serve others than workers in their rounds.

    Args:
        coordinator: makes the decisions; only this loop gives it events.
        center: what the decisions are about.
        files: the checkpoints that it reads and writes.
        kept_model: the copy of the center kept up to then, if any.
        edge: where it listens, and its clock.

    Attributes:
        reports: what the driver is told, some events at a time; None once the run has ended.
        lock: held while the coordinator decides; to be taken by whoever reads its state.
        saving: the checkpoint being put together.
        kept_model: the kept copy of the center; part of each checkpoint begun from then on.
        cut_short: the bug that ended this thread before the run could end.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        center: Center,
        files: CheckpointFiles,
        kept_model: KeptModel | None,
        edge: EdgeOptions,
    ) -> None:
        self.coordinator = coordinator
        self.center = center
        self.saving: Saving | None = None
        self.resumed = files.resumed
        self.kept_model = kept_model
        self.cut_short: TrainingError | None = None
        self.reports: queue.SimpleQueue[tuple[RunEvent, ...] | None] = queue.SimpleQueue()
        self.lock = threading.RLock()
        self._plan = files.plan
        self._workers: set[Worker] = set()
        self._by_member: dict[Member, Worker] = {}
        self._await_turn: dict[int, tuple[Worker, int]] = {}
        self._events: deque[Event] = deque()
        self._unreported: list[RunEvent] = []
        self._wakes: deque[Worker] = deque()
        self._writer: threading.Thread | None = None
        self._told_end = False
        super().__init__(
            edge.host,
            {"join": lambda channel: Worker(channel, self)},
            advertised_host=edge.advertised_host,
            encrypted=edge.tls,
            name="sparkdl-averager",
            now=edge.now,
        )

    # Called by other threads.

    def post_event(self, event: Event) -> None:
        """Have an event decided on."""
        self.post(partial(self.tell, event))

    def close(self) -> None:
        """End every connection, and wait a little for a checkpoint that is being written."""
        super().close()
        self.join_writer()
        for event in list(self._events):  # what came too late for the thread to handle
            if isinstance(event, on.CheckpointWritten | on.CheckpointGivenUp):
                self._decide(event)
        if self.saving is not None and not (self._writer and self._writer.is_alive()):
            self.saving.abandon()  # it is waiting for workers that have left

    def join_writer(self) -> None:
        """Wait a little for a checkpoint that is being written."""
        if self._writer is not None:
            self._writer.join(CLOSE_S)

    # What conversations need.

    def tell(self, event: Event) -> None:
        """Have the coordinator decide on an event, once the present conversation has paused."""
        self._events.append(event)

    def report(self, event: RunEvent) -> None:
        """Tell the driver something that has no consequences for the run."""
        self._unreported.append(event)

    def begins(self, worker: Worker) -> bool:
        """Take note of a worker that has sent its first header; returns whether to listen to it."""
        if self.coordinator.ended:  # nothing it could say would change that
            self.part(worker.channel, stopped_header(self.coordinator.farewell))
            return False
        self._workers.add(worker)
        return True

    def joined(self, member: Member, worker: Worker) -> None:
        """Take note of the worker that decisions about a member concern."""
        self._by_member[member] = worker

    def left(self, worker: Worker) -> None:
        """Take note that a worker's connection is closed."""
        self._workers.discard(worker)
        if worker.member is None:
            return
        self._by_member.pop(worker.member, None)
        waiting = self._await_turn.get(worker.member.rank)
        if waiting is not None and waiting[0] is worker:
            del self._await_turn[worker.member.rank]

    def failed(self, worker: Worker, error: SparkDLError) -> None:
        """End the run because of what a worker sent, unless it has already ended."""
        if self.coordinator.ended:
            farewell = stopped_header(str(self.coordinator.failure or error))
            self.part(worker.channel, farewell)
        self._workers.add(worker)  # it is told why, even if this was its first message
        self.tell(on.Failed(error))

    def await_turn(self, worker: Worker, index: int) -> None:
        """Wake a worker once it is its turn to add a chunk."""
        assert worker.member is not None
        self._await_turn[worker.member.rank] = worker, index

    def pass_turn(self, index: int) -> None:
        """Wake whoever waits to add a chunk, if it is its turn now."""
        total = self.center.sum
        rank = None if total is None else total.turn(index)
        if rank is not None and rank in self._await_turn and self._await_turn[rank][1] == index:
            self._wakes.append(self._await_turn.pop(rank)[0])

    def in_background(self, job: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do slow work with files in another thread; ``then`` gets the result."""

        def done(future: Future[T]) -> None:
            error = future.exception()
            if error is None:
                then(future.result())
            elif isinstance(error, SparkDLError):
                self.tell(on.Failed(error))
            else:
                raise error

        self.elsewhere(job, done)

    # The service's thread.

    def follow_up(self) -> bool:
        """Wake workers whose turn has come, and decide on what has happened."""
        if not (self._wakes or self._events):
            self._publish()  # workers have been sent their replies, so they need not wait for it
            return False
        while self._wakes or self._events:
            if self._wakes:
                channel = self._wakes.popleft().channel
                self.guard(channel, channel.wake)
            else:
                self._decide(self._events.popleft())
        return True

    def tick(self) -> float:
        """Have the coordinator check the time."""
        self.tell(on.Tick())
        if self.coordinator.ended:  # whoever is still silent then would otherwise not hear of it
            for channel in self.unintroduced():
                self.part(channel, stopped_header(self.coordinator.farewell))
        return self.coordinator.members.tick_s

    def broke(self, failure: TrainingError) -> None:
        """End the run, even if the bug is in the decisions."""
        try:
            self._decide(on.Failed(failure))
        finally:
            if not self._told_end:
                self.cut_short = failure
                self._tell_end()

    # Decisions.

    def _decide(self, event: Event) -> None:
        if isinstance(event, on.CheckpointWritten | on.CheckpointGivenUp):
            self.saving = None
        with self.lock:
            decisions = self.coordinator.handle(event, self.now())
            for decision in decisions:
                self._carry_out(decision)

    def _carry_out(self, decision: do.Decision) -> None:
        match decision:
            case do.Receive(member, weight, staleness):
                total, scale = self.center.sum, self.center.scale(staleness)
                assert total is not None
                self._do(member, lambda worker: worker.receive(total, weight, scale))
            case do.Reply(member):
                self._do(member, lambda worker: worker.reply(decision))
            case do.Skip(rank):
                self._skip(rank)
            case do.OpenSum(ranks):
                self.center.open_sum(ranks)
            case do.Commit(contributions):
                self.center.commit(contributions)
            case do.Report(event):
                if isinstance(event, EpochSummary):
                    self.center.start_epoch()
                self.report(event)
            case do.Welcome(member):
                self._do(member, Worker.welcome)
            case do.AskWorkerState(member):
                self._do(member, lambda worker: worker.ask_worker_state(now=True))
            case do.Tell(members, gathered, commit):
                self._send_all(members, {"gathered": list(gathered), "commit": commit})
            case do.TellEpochLosses(member, losses):
                self._send_all((member,), {"epoch_losses": losses})
            case do.SayWaiting(members):
                self._send_all(members, {"waiting": True})
            case do.StartOver(members):
                self._start_over(members)
            case do.Drop(member, why):
                self._do(member, lambda worker: self.close_channel(worker.channel))
                if not self.coordinator.followed:  # otherwise the coordinator reports it
                    self.report(WorkerLost(member.rank, why))
            case do.Dismiss(member):
                self._do(member, lambda worker: self.part(worker.channel, {"finished": True}))
            case do.Refuse(member, reason):
                self._do(member, lambda worker: self.part(worker.channel, stopped_header(reason)))
            case do.BeginCheckpoint():
                self._begin_checkpoint(decision)
            case do.WriteCheckpoint():
                self._write_checkpoint()
            case do.End():
                self._end(decision)

    def _do(self, member: Member, act: Callable[[Worker], None]) -> None:
        worker = self._by_member.get(member)
        if worker is not None:
            self.guard(worker.channel, lambda: act(worker))

    def _send_all(self, members: tuple[Member, ...], fields: dict[str, Any]) -> None:
        message = memoryview(header_message(fields))
        for member in members:
            self._do(member, lambda worker: worker.channel.send([message]))

    def _start_over(self, members: tuple[Member, ...]) -> None:
        self.center.sum = None
        waiting, self._await_turn = self._await_turn, {}
        for member in members:
            self._do(member, Worker.start_over)
        self._wakes.extend(worker for worker, _ in waiting.values())

    def _skip(self, rank: int) -> None:
        """Go on without a rank, waking whoever waited for its turn to end."""
        assert self.center.sum is not None
        self.center.sum.declare(rank, 0)
        for _, index in list(self._await_turn.values()):
            self.pass_turn(index)

    def _begin_checkpoint(self, decision: do.BeginCheckpoint) -> None:
        assert self._plan is not None
        data = decision.data.lasting()
        self.saving = Saving(
            self._plan, decision.progress, data, self.center.copy(), self.kept_model
        )

    def _write_checkpoint(self) -> None:
        saving = self.saving
        assert saving is not None

        def write() -> None:
            try:
                saving.publish()
            except Exception as error:  # a bug of ours must not leave the workers waiting
                failure = CheckpointError(f"the thread that writes checkpoints: {error!r}")
                self.post_event(on.Failed(failure))
                raise
            self.post_event(on.CheckpointGivenUp() if saving.failed else on.CheckpointWritten())

        self._writer = threading.Thread(target=write, name="sparkdl-saving", daemon=True)
        self._writer.start()

    def _end(self, decision: do.End) -> None:
        if decision.failure is not None or decision.stopped is not None:
            self._await_turn.clear()
            farewell = stopped_header(self.coordinator.farewell)
            for worker in list(self._workers):
                self.part(worker.channel, farewell)
        self._told_end = True
        self._tell_end()

    def _publish(self) -> None:
        """Hand the driver's thread what it is told, which takes turns at Python's lock."""
        if self._unreported:
            self.reports.put(tuple(self._unreported))
            self._unreported = []

    def _tell_end(self) -> None:
        self._publish()
        self.reports.put(None)
