"""The real averager and its conversations, over connections in memory and in virtual time."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sparkdl.averager.coordination.actions import Decision
from sparkdl.averager.coordination.coordinator import Coordinator, Event, P
from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.coordination.run_state import Restart, RunSpec
from sparkdl.averager.messages.run_events import Position, Progress, RunEvent
from sparkdl.averager.service.saving import Saving
from sparkdl.averager.service.server import Averager as RealAverager
from sparkdl.averager.service.server import EdgeOptions, Snapshot
from sparkdl.averager.values.center_update import Contributions
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.testing.simulation.center import Center, trained
from sparkdl.testing.simulation.network import Clock, Selector, Stream
from sparkdl.transport.channel import Channel
from sparkdl.transport.daemon_pool import DaemonPool
from sparkdl.transport.service import STAGING_BYTES, Handler, Service

if TYPE_CHECKING:
    from sparkdl.testing.simulation.run import Simulation

T = TypeVar("T")


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


class Averager(RealAverager, _InMemory):
    """The averager, in one thread with the workers.

    Args:
        decides: makes what makes the decisions.
        spec: how the run is planned.
        restart: where it goes on.
        center: the center that the rounds change.
        pass_s: how long it takes for what it found at one look, in seconds.
        clock: the run's clock.
        observer: is told what happens, and checks it.
    """

    center: Center

    def __init__(
        self,
        decides: Callable[..., Coordinator],
        spec: RunSpec,
        restart: Restart,
        center: Center,
        pass_s: float,
        clock: Clock,
        observer: Simulation,
    ) -> None:
        self._clock, self._pass_s, self._observer = clock, pass_s, observer
        self._paused_until = 0.0
        self._is_due = False
        # The members that are being sent the center.
        self._reading: set[Member] = set()
        # The center from which each rank goes on, and the number of updates before it.
        self._begun: dict[int, tuple[list[float], int]] = {}
        self._updates = 0
        self._decisions: list[Decision] = []
        edge = EdgeOptions(now=lambda: clock.now)
        super().__init__(spec, center.spec, Snapshot(center=center.values), edge)
        self.coordinator, self.center = decides(spec, clock.now, restart), center
        self._look_soon()

    def end_conversations(self) -> None:
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
        return len(self.by_member) + sum(map(len, waiting))

    def knows(self, rank: int) -> bool:
        """Whether a worker of that rank is connected and has introduced itself."""
        return any(member.rank == rank for member in self.by_member)

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

    def tell(self, event: Event[P], *arguments: P.args, **options: P.kwargs) -> None:
        """Have an event decided on, along with everything that follows from it."""
        if event.__name__ == "taken":
            self._reading.difference_update(arguments)
        super().tell(event, *arguments, **options)

    def _decide(self, event: Event[P], *arguments: P.args, **options: P.kwargs) -> None:
        self._observer.before(event.__name__, saved=bool(options.get("saved")))
        super()._decide(event, *arguments, **options)
        self._observer.decided(self.coordinator.do.decisions)

    def open_sum(self, ranks: tuple[int, ...]) -> None:
        """Check that nobody reads what the sum overwrites."""
        reading = self._reading & self.by_member.keys()
        assert not reading, f"what {reading} are being sent is overwritten"
        super().open_sum(ranks)

    def receive(self, member: Member, weight: float, staleness: int) -> None:
        """Check how stale it is said to be."""
        if member in self.by_member:
            assert staleness == self._updates - self._begun[member.rank][1]
        super().receive(member, weight, staleness)

    def welcome(self, member: Member) -> None:
        """Remember what a worker begins with."""
        self._begins_to_read(member)
        super().welcome(member)

    def reply(self, member: Member, *, final: bool, values: bool, worker_state: bool) -> None:
        """Remember what a worker goes on with."""
        self._begins_to_read(member)
        super().reply(member, final=final, values=values, worker_state=worker_state)

    def _begins_to_read(self, member: Member) -> None:
        self._begun[member.rank] = self.center.numbers, self._updates
        if member in self.by_member:
            self._reading.add(member)

    def report(self, event: RunEvent) -> None:
        """Tell the observer what it waits for."""
        super().report(event)
        if isinstance(event, DataStatistics):
            self._observer.statistics_known(event)
        elif isinstance(event, EpochSummary):
            self._observer.epoch_ended(event)

    def commit(self, contributions: Contributions) -> None:
        """Change the center, and check that it is what the windows give."""
        windows = self._committed(contributions)
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
        super().commit(contributions)
        self.center.require(before, contributions, values, begun, fragment)
        self._updates += bool(weighted)
        self._observer.committed(windows)

    def _committed(self, contributions: Contributions) -> list[WindowReport]:
        """The reports of the windows that a commit consists of, which follow it."""
        decisions = iter(self.coordinator.do.decisions)
        next(each for each in decisions if contributions is next(iter(each.arguments), None))
        reports = takewhile(lambda each: each.action == "report", decisions)
        events = (each.arguments[0] for each in reports)
        return list(takewhile(lambda event: isinstance(event, WindowReport), events))

    # Checkpoints.

    def begin_checkpoint(self, progress: Progress, statistics: DataStatistics) -> None:
        """Begin one in memory."""
        self.saving = Saving(cast(Any, None), progress, {}, {})

    def write_checkpoint(self) -> None:
        """Let the observer write it."""
        assert self.saving is not None
        states = {n: b"".join(s.blocks(4096)) for n, s in self.saving.worker_states.items()}
        positions = {rank: Position(**json.loads(octets)) for rank, octets in states.items()}
        self._observer.write(self.saving.progress, positions)
