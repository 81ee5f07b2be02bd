"""The real averager and its conversations, over connections in memory and in virtual time."""

from __future__ import annotations

import json
import math
import queue
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar, cast

from support.simulation.network import Link, Selector, Stream
from support.simulation.workers import PRIME, trained

from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.coordination.run_state import Restart, RunSpec
from sparkdl.averager.run_events import Position, Progress, RunEvent
from sparkdl.averager.service.saving import Saving, Snapshot
from sparkdl.averager.service.server import Averager as RealAverager
from sparkdl.averager.service.server import EdgeOptions
from sparkdl.averager.values.center_update import Contributions
from sparkdl.events import WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.transport.channel import Channel
from sparkdl.transport.service import STAGING_BYTES, Handler, Service

if TYPE_CHECKING:
    from support.simulation.run import Simulation

T = TypeVar("T")

TOLERANCE = 1e-12 * PRIME
"""Values are up to a few times PRIME, and their rounding errors stay even where they cancel."""


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
        self._posted, self._on_break = queue.SimpleQueue(), []
        self._tick_at, self._accepted = now(), 0
        self._selector = cast(Any, Selector())


class Averager(RealAverager, _InMemory):
    """The averager, in one thread with the workers.

    Args:
        run: what it is part of, which is told what happens, and checks it.
        spec: how the run is planned.
        restart: where it goes on.
    """

    def __init__(self, run: Simulation, spec: RunSpec, restart: Restart) -> None:
        self._run, self._clock = run, run.clock
        self._paused_until = 0.0
        self._is_due = False
        # The members that are being sent the center.
        self._reading: set[Member] = set()
        # The center from which each rank goes on, and the number of updates before it.
        self._begun: dict[int, tuple[list[float], int]] = {}
        self._updates = 0
        edge = EdgeOptions(now=run.clock)
        super().__init__(spec, run.spec, Snapshot(center=run.center.values), edge)
        self.coordinator = run.decides(spec, run.clock.now, restart)
        self.center = run.center
        self._look_soon()

    @property
    def numbers(self) -> list[float]:
        """The number of each fragment of the center."""
        first, *others = (segment.tolist() for segment in self.center.values)
        assert all(other == first for other in others), "the chunks of one sum differ"
        return first

    def pause(self, seconds: float) -> None:
        """Do nothing for a while; what arrives is handled afterwards."""
        self._paused_until = max(self._paused_until, self._clock.now + seconds)

    # In place of a thread.

    def accept(self, link: Link) -> None:
        """Serve a connection; that both ends know the token is no matter here."""
        channel = _Channel(
            cast(Any, Stream(link, self._look_soon)), self._staging, self._touched.add
        )
        self._accepted += 1
        channel.number = self._accepted
        self._sessions[channel] = None
        channel.begin(self._introduction(channel))
        self._touched.add(channel)
        self._look_soon()

    def post(self, call: Callable[[], None]) -> None:
        """Have something done at the next look."""
        self._posted.put(call)
        self._look_soon()

    def elsewhere(self, channel: Channel, job: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do something at once, whose end is noticed at the next look."""
        done = job()
        self.post(lambda: self.guard(channel, lambda: then(done)))

    def _look_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._clock.at(self._paused_until, self._look)

    def _look(self) -> None:
        if self._clock.now < self._paused_until:
            self._clock.at(self._paused_until, self._look)
            return
        self._is_due = False
        found, ticks_at = self._selector.select(), self._tick_at
        self._iterate()
        if self._tick_at != ticks_at:
            self._clock.at(self._tick_at, self._look_soon)
        if found:
            self.pause(self._run.plan.pass_s)
        if self._touched or self._selector.select():
            self._look_soon()

    # Checks.

    def tell(self, event: Any, *arguments: Any, **options: Any) -> None:
        """Have an event decided on, along with everything that follows from it."""
        if event.__name__ == "taken":
            self._reading.difference_update(arguments)
        super().tell(event, *arguments, **options)

    def _decide(self, event: Any, *arguments: Any, **options: Any) -> None:
        self._run.before(event.__name__, saved=bool(options.get("saved")))
        super()._decide(event, *arguments, **options)
        self._run.decided(self.coordinator.do.decisions)

    def open_sum(self, ranks: tuple[int, ...]) -> None:
        """Check that nobody reads what the sum overwrites."""
        reading = self._reading & self.by_member.keys()
        assert not reading, f"what {reading} are being sent is overwritten"
        super().open_sum(ranks)

    def _carry_out(self, action: str, arguments: Any, options: Any) -> None:
        member, *others = arguments or [None]
        if action == "receive" and member in self.by_member:
            staleness = others[1]
            assert staleness == self._updates - self._begun[member.rank][1]
        if action in ("welcome", "reply"):  # what it begins or goes on with
            self._begun[member.rank] = self.numbers, self._updates
            self._reading |= {member} & self.by_member.keys()
        super()._carry_out(action, arguments, options)

    def report(self, event: RunEvent) -> None:
        """Tell the run, which may wait for it."""
        super().report(event)
        self._run.reported(event)

    def commit(self, contributions: Contributions) -> None:
        """Change the center, and check that it is what the windows give."""
        # Their reports follow the commit.
        decisions = iter(self.coordinator.do.decisions)
        next(each for each in decisions if contributions is next(iter(each.arguments), None))
        told = (each.arguments[0] for each in takewhile(lambda d: d.action == "report", decisions))
        windows = list(takewhile(lambda event: isinstance(event, WindowReport), told))
        weighted = [window for window in windows if window.weight]
        assert contributions.weights == tuple(window.weight for window in weighted)
        fragment = self.center.rounds_of_epoch % self._run.spec.fragments
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
        expected = self.numbers[fragment]
        super().commit(contributions)
        found, round_ = self.numbers[fragment], self.center._rounds
        if values or self._run.spec.update.moves_alone(round_):
            at = replace(contributions, round=round_)
            expected = self._run.oracle(expected, at, values, begun)
        assert math.isclose(found, expected, rel_tol=1e-12, abs_tol=TOLERANCE), (
            f"the center is {found!r} after {contributions}, and the oracle's {expected!r}"
        )
        self._updates += bool(weighted)
        self._run.committed(windows)

    # Checkpoints.

    def begin_checkpoint(self, progress: Progress, statistics: DataStatistics) -> None:
        """Begin one in memory."""
        self.saving = Saving(cast(Any, None), progress, {}, {})

    def write_checkpoint(self) -> None:
        """Let the run write it."""
        assert self.saving is not None
        states = {n: b"".join(s.blocks(4096)) for n, s in self.saving.worker_states.items()}
        positions = {rank: Position(**json.loads(octets)) for rank, octets in states.items()}
        self._run.write(self.saving.progress, positions)
