"""The averager's real loop and conversations, over connections in memory and in virtual time."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, cast

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.events import Member
from sparkdl.averager.messages.progress import Position, Progress
from sparkdl.averager.service.conversation import Worker
from sparkdl.averager.service.loop import EdgeOptions, Loop
from sparkdl.averager.service.saving import CheckpointFiles, Saving
from sparkdl.averager.values.center_update import Contributions
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.testing.simulation.center import Center, trained
from sparkdl.testing.simulation.network import Clock, Selector, Stream
from sparkdl.transport.channel import Channel
from sparkdl.transport.daemon_pool import DaemonPool
from sparkdl.transport.service import STAGING_BYTES, Handler, Service

T = TypeVar("T")


class Observer(Protocol):
    """Is told what the averager does, and checks it."""

    def before(self, event: on.Event) -> None:
        """Called when an event is about to be decided on."""

    def decided(self, decisions: Sequence[do.Decision]) -> None:
        """Called when decisions have been made."""

    def committed(self, windows: Sequence[WindowReport]) -> None:
        """Called when a round has been committed."""

    def epoch_ended(self, summary: EpochSummary) -> None:
        """Called when an epoch has ended."""

    def statistics_known(self, statistics: DataStatistics) -> None:
        """Called when the driver has learned the statistics of the rows."""

    def write(self, progress: Progress, states: Mapping[int, Position]) -> None:
        """Called to write a checkpoint."""


class _Channel(Channel):
    """A channel that sets have in the same order in every process."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _InMemory(Service):
    """A service without a port, and without a thread: its iterations are made for it."""

    def __init__(
        self, host: str, handlers: Mapping[str, Handler], *, now: Callable[[], float], **_: object
    ) -> None:
        self.now, self.handlers, self.failure = now, dict(handlers), None
        self._sessions, self._touched, self._leaving, self._registered = {}, set(), {}, {}
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._posted = queue.SimpleQueue()
        self._tick_at, self._accepted = now(), 0
        self.selector = Selector()
        self._selector = cast(Any, self.selector)

    def accept(self, stream: Stream) -> None:
        """Serve a connection; that both ends know the token is no matter here."""
        channel = _Channel(stream, self._staging, self._touch)
        self._accepted += 1
        channel.number = self._accepted
        self._sessions[channel] = None
        channel.begin(self._introduction(channel))
        self._touched.add(channel)


class Averager(Loop, _InMemory):
    """The averager's loop.

    Args:
        coordinator: the decisions.
        center: the center that the rounds change.
        pass_s: how long it takes for what it found at one look, in seconds.
        clock: the run's clock.
        observer: checks what happens.

    Attributes:
        over: whether the run is over.
        failure_of_run: why it failed.
    """

    center: Center

    def __init__(
        self,
        coordinator: Coordinator,
        center: Center,
        pass_s: float,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self._clock, self._pass_s, self._observer = clock, pass_s, observer
        self._paused_until = 0.0
        self._is_due = False
        # The members that are being sent the center.
        self._reading: set[Member] = set()
        # The center from which each rank goes on, and the number of updates before it.
        self._begun: dict[int, tuple[list[float], int]] = {}
        self._updates = 0
        self._decisions: list[do.Decision] = []
        now = EdgeOptions(now=lambda: clock.now)
        super().__init__(coordinator, center, CheckpointFiles(), None, now)
        self._handle, coordinator.handle = coordinator.handle, self._watched  # type: ignore[method-assign]
        self._look_soon()

    def end(self) -> None:
        """End all conversations now, and not whenever their memory is collected."""
        self._close_all()

    def pause(self, seconds: float) -> None:
        """Do nothing for a while; what arrives is handled afterwards."""
        self._paused_until = max(self._paused_until, self._clock.now + seconds)

    @property
    def remembered(self) -> int:
        """How many things are remembered that eventually have to be forgotten."""
        this = self.coordinator.round
        waiting = this.entered, this.late, this.queue, this.ranks.windows
        return len(self._by_member) + sum(map(len, waiting))

    def knows(self, rank: int) -> bool:
        """Whether a worker of that rank is connected and has introduced itself."""
        return any(member.rank == rank for member in self._by_member)

    # In place of a thread.

    def accept(self, stream: Stream) -> None:
        """Serve a connection."""
        stream.on_room = stream.link.up.on_arrival = self._look_soon
        super().accept(stream)
        self._look_soon()

    def post(self, call: Callable[[], None]) -> None:
        """Have something done at the next look."""
        self._posted.put(call)
        self._look_soon()

    def elsewhere(
        self,
        job: Callable[[], T],
        then: Callable[[Future[T]], None],
        pool: DaemonPool | None = None,
    ) -> None:
        """Do something at once, whose end is noticed at the next look."""
        future: Future[T] = Future()
        future.set_result(job())
        self.post(lambda: then(future))

    def _look_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._clock.at(self._paused_until, self._look)

    def _look(self) -> None:
        if self._clock.now < self._paused_until:
            self._clock.at(self._paused_until, self._look)
            return
        self._is_due = False
        found, ticks_at = self.selector.select(), self._tick_at
        self._iterate()
        if self._tick_at != ticks_at:
            self._clock.at(self._tick_at, self._look_soon)
        if found:
            self.pause(self._pass_s)
        if self._touched or self.selector.select():
            self._look_soon()

    # Checks.

    def tell(self, event: on.Event) -> None:
        """Have an event decided on, along with everything that follows from it."""
        if isinstance(event, on.Taken):
            self._reading.discard(event.member)
        super().tell(event)

    def left(self, worker: Worker) -> None:
        """Take note that a worker's connection is closed."""
        super().left(worker)
        if worker.member is not None:
            self._reading.discard(worker.member)

    def _watched(self, event: on.Event, now: float) -> list[do.Decision]:
        self._decisions = self._handle(event, now)
        return self._decisions

    def _decide(self, event: on.Event) -> None:
        self._observer.before(event)
        super()._decide(event)
        self._observer.decided(self._decisions)

    def _carry_out(self, decision: do.Decision) -> None:
        match decision:
            case do.Commit(contributions):
                self._check_commit(decision, contributions)
                return
            case do.OpenSum():
                assert not self._reading, f"what {self._reading} are being sent is overwritten"
            case do.Receive(member, _, staleness) if member in self._by_member:
                assert staleness == self._updates - self._begun[member.rank][1]
            case do.Welcome(member) | do.Reply(member):
                self._begun[member.rank] = self.center.numbers, self._updates
                if member in self._by_member:
                    self._reading.add(member)
        super()._carry_out(decision)
        match decision:
            case do.Report(DataStatistics() as statistics):
                self._observer.statistics_known(statistics)
            case do.Report(EpochSummary() as summary):
                self._observer.epoch_ended(summary)

    def _check_commit(self, commit: do.Commit, contributions: Contributions) -> None:
        """Change the center, and check that it is what the windows give."""
        windows = list(_windows_after(commit, self._decisions))
        weighted = [window for window in windows if window.weight]
        assert contributions.weights == tuple(window.weight for window in weighted)
        fragment = self.center.rounds_of_epoch % self.center.fragments
        values, begun = {}, {}
        for window in weighted:
            rank = window.rank
            numbers, updates = self._begun[rank]
            begun[rank] = numbers[fragment]
            values[rank] = trained(begun[rank], rank, window.epoch, window.step_of_epoch)
            assert window.staleness == self._updates - updates
        staleness = max((window.staleness for window in weighted), default=0)
        assert contributions.staleness == staleness
        assert not staleness or not self.coordinator.round.policy.in_step
        before = self.center.numbers[fragment]
        super()._carry_out(commit)
        self.center.require(before, contributions, values, begun, fragment)
        self._updates += bool(weighted)
        self._observer.committed(windows)

    # Checkpoints.

    def _begin_checkpoint(self, decision: do.BeginCheckpoint) -> None:
        self.saving = Saving(cast(Any, None), decision.progress, {}, {})

    def _write_checkpoint(self) -> None:
        assert self.saving is not None
        states = {n: b"".join(read(4096)) for n, read in self.saving.worker_states.items()}
        positions = {rank: Position(**json.loads(octets)) for rank, octets in states.items()}
        self._observer.write(self.saving.progress, positions)


def _windows_after(commit: do.Commit, decisions: Sequence[do.Decision]) -> Iterator[WindowReport]:
    """The reports of the windows that a commit consists of, which follow it."""
    (at,) = (index for index, each in enumerate(decisions) if each is commit)
    for decision in decisions[at + 1 :]:
        if not isinstance(decision, do.Report) or not isinstance(decision.event, WindowReport):
            return
        yield decision.event
