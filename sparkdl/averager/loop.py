"""The one thread at the averager's edge: bytes into events, decisions into bytes.

It serves all connections, however many, and never waits for one of them; what takes long (files
of checkpoints) is done by a few threads beside it. Values go from the socket straight into the
memory where they are summed. The clock is looked at only when the sockets have been.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sparkdl.averager import decisions as do
from sparkdl.averager import events as on
from sparkdl.averager.center import Center
from sparkdl.averager.channel import Channel, LeftError
from sparkdl.averager.conversation import Worker
from sparkdl.averager.coordinator import Coordinator
from sparkdl.averager.events import Event, Member
from sparkdl.averager.kept import KeptModel
from sparkdl.averager.run_events import RunEvent, WorkerLost
from sparkdl.averager.saving import CheckpointPlan, Resumed, Saving
from sparkdl.errors import CheckpointError, SparkDLError, TrainingError
from sparkdl.events import EpochSummary
from sparkdl.transport.framing import header_message
from sparkdl.transport.streams import Stream

logger = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""Seconds that a worker has to read why it was stopped."""
CLOSE_S = 10.0
"""Seconds to wait for the loop's threads when it closes."""
FILE_THREADS = 4
STAGING_BYTES = 64 << 10

T = TypeVar("T")


class Loop:
    """Serve connections until closed, in a thread of its own.

    Args:
        coordinator: decides; only this loop hands it events.
        center: what is decided about.
        plan: where checkpoints go; None for none.
        resumed: the checkpoint with which this process began, if there was one.
        kept_model: what was kept of the center until then.

    Attributes:
        reports: what the driver is told; None when the run has ended.
        lock: held while the coordinator decides; whoever reads what it knows takes it.
        saving: the checkpoint that is being put together.
        kept_model: what is kept of the center; part of each checkpoint that begins from then on.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        center: Center,
        plan: CheckpointPlan | None,
        resumed: Resumed | None,
        kept_model: KeptModel | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.center = center
        self.saving: Saving | None = None
        self.resumed = resumed
        self.kept_model = kept_model
        self.reports: queue.SimpleQueue[RunEvent | None] = queue.SimpleQueue()
        self.lock = threading.RLock()
        self._plan = plan
        self._workers: dict[Channel, Worker] = {}
        self._by_member: dict[Member, Worker] = {}
        self._await_turn: dict[int, tuple[Worker, int]] = {}
        self._events: deque[Event] = deque()
        self._wakes: deque[Worker] = deque()
        self._touched: set[Channel] = set()
        self._leaving: dict[Channel, float] = {}
        self._registered: dict[Channel, int] = {}
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._selector = selectors.DefaultSelector()
        # What other threads want done here; reentrant, so that a signal handler may.
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ringing = threading.RLock()
        self._bell, self._rung = socket.socketpair()
        self._rung.setblocking(False)
        self._bell.setblocking(False)
        self._closed = False
        self._selector.register(self._rung, selectors.EVENT_READ)
        self._closing = False
        self._files = ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="sparkdl-files")
        self._writer: threading.Thread | None = None
        self._tick_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="sparkdl-averager", daemon=True)
        self._thread.start()

    # Called by other threads.

    def post(self, event: Event) -> None:
        """Have an event decided on."""
        self._post(lambda: self.tell(event))

    def adopt(self, stream: Stream, proof: bytes) -> None:
        """Serve a connection whose other end has proved that it knows the token.

        Args:
            stream: owned from here on.
            proof: what the other end waits for, as the averager's own.
        """
        self._post(lambda: self._adopt(stream, proof))

    def close(self) -> None:
        """End every connection, and wait a little for a checkpoint that is being written."""
        self._closing = True
        self._post(lambda: None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the averager's thread did not end in %.0f s", CLOSE_S)
        self.join_writer()
        if self.saving is not None and not (self._writer and self._writer.is_alive()):
            self.saving.abandon()  # it waits for workers that have left
        self._files.shutdown(wait=False, cancel_futures=True)

    def join_writer(self) -> None:
        """Wait a little for a checkpoint that is being written."""
        if self._writer is not None:
            self._writer.join(CLOSE_S)

    def _post(self, call: Callable[[], None]) -> None:
        self._posted.put(call)
        with self._ringing:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # it has been rung often enough
                    self._bell.send(b"\0")
            elif threading.current_thread() is not self._thread:
                self._refuse_late()

    def _refuse_late(self) -> None:
        """See that nothing that was posted stays undone: whoever connects now is left."""
        self._do_posted()
        for channel in list(self._workers):
            self._close(channel)

    def _do_posted(self) -> None:
        while not self._posted.empty():
            self._posted.get()()

    # What conversations need.

    def tell(self, event: Event) -> None:
        """Have the coordinator decide what follows from an event, once this one has paused."""
        self._events.append(event)

    def report(self, event: RunEvent) -> None:
        """Tell the driver something of which nothing follows for the run."""
        self.reports.put(event)

    def joined(self, member: Member, worker: Worker) -> None:
        """Take note of whom decisions about a member concern."""
        self._by_member[member] = worker

    def await_turn(self, worker: Worker, index: int) -> None:
        """Wake a worker when it is its turn to add a chunk."""
        assert worker.member is not None
        self._await_turn[worker.member.rank] = worker, index

    def pass_turn(self, index: int) -> None:
        """Wake whoever waits to add a chunk, if it is its turn now."""
        total = self.center.sum
        rank = None if total is None else total.turn(index)
        if rank is not None and rank in self._await_turn and self._await_turn[rank][1] == index:
            self._wakes.append(self._await_turn.pop(rank)[0])

    def in_background(self, job: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do what may take long, with files, elsewhere; ``then`` gets what it has returned."""

        def done(future: Future[T]) -> None:
            if not future.cancelled():
                self._post(lambda: self._return(future, then))

        self._files.submit(job).add_done_callback(done)

    def _return(self, future: Future[T], then: Callable[[T], None]) -> None:
        error = future.exception()
        if error is None:
            then(future.result())
        elif isinstance(error, SparkDLError):
            self.tell(on.Failed(error))
        else:
            raise error

    # The loop.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._do_posted()
            self._settle()  # farewells go as far as they go at once
        except Exception as error:  # a mistake of ours must not leave the driver waiting
            logger.exception("the averager's thread ended")
            failure = TrainingError(f"the averager's thread ended with {error!r}")
            self._decide(on.Failed(failure))
        finally:
            for channel in list(self._workers):
                self._close(channel)
            self._selector.close()
            with self._ringing:
                self._closed = True
                self._bell.close()
                self._rung.close()
            self._refuse_late()

    def _turn(self) -> None:
        timeout_s = 0.0 if self._touched else max(0.0, self._tick_at - time.monotonic())
        for key, mask in self._selector.select(timeout_s):
            if key.data is None:
                self._rung.recv(1 << 12)
            else:
                self._serve(key.data, mask)
        self._do_posted()
        self._settle()
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick_at = now + self.coordinator.members.tick_s
            self.tell(on.Tick())
            for channel in [each for each, until in self._leaving.items() if now >= until]:
                self._close(channel)
            self._settle()

    def _serve(self, channel: Channel, mask: int) -> None:
        if mask & selectors.EVENT_READ and channel in self._workers:
            self._guard(channel, channel.receive)
            self._hear(channel)
        self._touched.add(channel)  # what can be sent now is sent there

    def _settle(self) -> None:
        """Do everything that follows from what has happened."""
        while True:
            if self._wakes:
                worker = self._wakes.popleft()
                self._guard(worker.channel, worker.channel.wake)
            elif self._events:
                self._decide(self._events.popleft())
            elif not self._attend():
                return

    def _attend(self) -> bool:
        """Go on with channels on which something may be done; returns whether anything was."""
        touched, self._touched = self._touched, set()
        for channel in touched:
            if channel not in self._workers:
                continue
            if channel.sends and self._guard(channel, channel.flush):
                self._hear(channel)
            if channel.has_left:
                self._guard(channel, channel.receive)
            self._register(channel)
        return bool(self._wakes or self._events)

    def _touch(self, channel: Channel) -> None:
        self._touched.add(channel)

    def _hear(self, channel: Channel) -> None:
        worker = self._workers.get(channel)
        if worker is not None and worker.member is not None:
            self.coordinator.heard(worker.member, time.monotonic())

    def _guard(self, channel: Channel, call: Callable[[], Any]) -> Any:
        """Do something at a connection, whose errors end it, and perhaps the run."""
        try:
            return call()
        except LeftError as error:
            self._left(channel, error)
        except SparkDLError as error:
            if self.coordinator.ended:
                self._part(channel, {"stopped": str(self.coordinator.failure or error)})
            self.tell(on.Failed(error))
        return None

    def _left(self, channel: Channel, error: LeftError) -> None:
        worker = self._workers.get(channel)
        if worker is None:
            return
        if worker.member is None:
            logger.info("a worker left before it had joined: %s", error)
        elif channel not in self._leaving:
            why = f"ended its connection in the middle of training ({error}). The executor's log "
            self.tell(on.Lost(worker.member, why + "says why"))
        self._close(channel)

    def _adopt(self, stream: Stream, proof: bytes) -> None:
        channel = Channel(stream, self._staging, self._touch)
        channel.send([memoryview(proof)])
        self._workers[channel] = worker = Worker(channel, self)
        channel.begin(worker.conversation())
        self._touched.add(channel)
        if self.coordinator.ended:  # nothing that it could say would change that
            self._part(channel, {"stopped": self.coordinator.farewell})

    def _register(self, channel: Channel) -> None:
        mask = selectors.EVENT_READ if channel.listens else 0
        mask |= selectors.EVENT_WRITE if channel.sends else 0
        before = self._registered.get(channel, 0)
        if mask == before or channel not in self._workers:
            return
        if not before:
            self._selector.register(channel.stream, mask, channel)
        elif not mask:
            self._selector.unregister(channel.stream)
        else:
            self._selector.modify(channel.stream, mask, channel)
        self._registered[channel] = mask

    def _part(self, channel: Channel, farewell: dict[str, Any]) -> None:
        """Say something last to a worker, and close once it has read that."""
        if channel in self._leaving:
            return
        self._leaving[channel] = time.monotonic() + FAREWELL_S
        channel.end_conversation()
        channel.send([memoryview(header_message(farewell))], then=channel.end_sending)

    def _close(self, channel: Channel) -> None:
        worker = self._workers.pop(channel, None)
        if worker is None:
            return
        if self._registered.pop(channel, 0):
            self._selector.unregister(channel.stream)
        self._leaving.pop(channel, None)
        if worker.member is not None:
            self._by_member.pop(worker.member, None)
            self._forget_turn(worker)
        channel.close()

    def _forget_turn(self, worker: Worker) -> None:
        assert worker.member is not None
        waiting = self._await_turn.get(worker.member.rank)
        if waiting is not None and waiting[0] is worker:
            del self._await_turn[worker.member.rank]

    # Decisions.

    def _decide(self, event: Event) -> None:
        if isinstance(event, on.CheckpointWritten):
            self.saving = None
        with self.lock:
            decisions = self.coordinator.handle(event, time.monotonic())
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
                self.reports.put(event)
            case do.Welcome(member):
                self._do(member, Worker.welcome)
            case do.ReadOn(member):
                self._do(member, lambda worker: worker.channel.send_header({"read_on": True}))
            case do.GoOn(member):
                self._do(member, lambda worker: worker.channel.send_header({"go_on": True}))
            case do.AskOwnState(member):
                self._do(member, lambda worker: worker.ask_own_state(now=True))
            case do.Tell(members, gathered):
                self._send_all(members, {"gathered": list(gathered)})
            case do.TellEpochLosses(member, losses):
                self._send_all((member,), {"epoch_losses": losses})
            case do.SayWaiting(members):
                self._send_all(members, {"waiting": True})
            case do.StartOver(members):
                self._start_over(members)
            case do.Drop(member, why):
                self._do(member, lambda worker: self._close(worker.channel))
                if not self.coordinator.followed:  # else the coordinator has it reported
                    self.report(WorkerLost(member.rank, why))
            case do.Dismiss(member):
                self._do(member, lambda worker: self._part(worker.channel, {"finished": True}))
            case do.Refuse(member, reason):
                self._do(member, lambda worker: self._part(worker.channel, {"stopped": reason}))
            case do.BeginCheckpoint():
                self._begin_checkpoint(decision)
            case do.WriteCheckpoint():
                self._write_checkpoint()
            case do.End():
                self._end(decision)

    def _do(self, member: Member, act: Callable[[Worker], None]) -> None:
        worker = self._by_member.get(member)
        if worker is not None:
            self._guard(worker.channel, lambda: act(worker))

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
        """Go on without a rank; whoever waited for its turn to end need not any more."""
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
            except Exception as error:  # a mistake of ours must not leave the workers waiting
                failure = CheckpointError(f"the thread that writes checkpoints: {error!r}")
                self.post(on.Failed(failure))
                raise
            self.post(on.CheckpointWritten())

        self._writer = threading.Thread(target=write, name="sparkdl-saving", daemon=True)
        self._writer.start()

    def _end(self, decision: do.End) -> None:
        if decision.failure is not None or decision.stopped is not None:
            self._await_turn.clear()
            farewell = {"stopped": self.coordinator.farewell}
            for channel in list(self._workers):
                self._part(channel, farewell)
        self.reports.put(None)
