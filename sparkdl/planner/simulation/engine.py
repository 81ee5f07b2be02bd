"""Virtual time, and the driver's link in it: what everything that is simulated runs on."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial

Call = Callable[[], None]


class Clock:
    """A queue of timed calls; those due at the same time run in the order of their scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Call]] = []
        self._count = 0

    def __call__(self) -> float:
        """Read the time, in seconds."""
        return self.now

    def after(self, seconds: float, call: Call) -> None:
        """Schedule a call after some seconds."""
        self.at(self.now + seconds, call)

    def at(self, time: float, call: Call) -> None:
        """Schedule a call at a time; one in the past goes behind all others that are due."""
        self._count += 1
        heapq.heappush(self._due, (max(time, self.now), self._count, call))

    def step(self, until: float = math.inf) -> bool:
        """Make the call that is due first; returns whether there was one before ``until``."""
        if not self._due or self._due[0][0] >= until:
            return False
        self.now, _, call = heapq.heappop(self._due)
        call()
        return True

    def forget(self) -> None:
        """Drop all scheduled calls."""
        self._due.clear()


class SharedLink:
    """Transfers in one direction of a link, which share its bandwidth equally: replies.

    Args:
        clock: of the simulation.
        bandwidth: bytes a second.
    """

    def __init__(self, clock: Clock, bandwidth: float) -> None:
        self._clock, self._bandwidth = clock, bandwidth
        # Bytes that each transfer has had since the beginning, as of a time.
        self._served = self._at = 0.0
        self._under_way: list[tuple[float, int, Call]] = []
        self._changes = 0

    def add(self, octets: float, then: Call) -> None:
        """Begin a transfer; ``then`` is called when it is complete."""
        if self._under_way:
            passed_s = self._clock.now - self._at
            self._served += passed_s * self._bandwidth / len(self._under_way)
        heapq.heappush(self._under_way, (self._served + octets, self._changes, then))
        self._look()

    def _look(self) -> None:
        """Schedule the next end anew."""
        self._changes += 1
        self._at, count = self._clock.now, len(self._under_way)
        if count:
            missing = max(0.0, self._under_way[0][0] - self._served)
            end = partial(self._end, self._changes)
            self._clock.after(missing * count / self._bandwidth, end)

    def _end(self, changes: int) -> None:
        if changes == self._changes:
            self._served, _, then = heapq.heappop(self._under_way)
            self._look()
            then()


class Sum:
    """Contributions that pass the driver's link and are added, one after the other.

    Args:
        clock: of the simulation.
        add_s: seconds that one takes.
        then: called with each rank whose contribution has been added.
        in_order: whether a rank waits for all before it; otherwise it is buffered.
    """

    def __init__(
        self, clock: Clock, add_s: float, then: Callable[[int], None], *, in_order: bool
    ) -> None:
        self._clock, self._add_s, self._then, self._in_order = clock, add_s, then, in_order
        self.open(())

    def open(self, ranks: Sequence[int]) -> None:
        """Begin another sum."""
        self._queue: dict[int, None] = dict.fromkeys(ranks if self._in_order else ())
        self._ready: set[int] = set()
        self._adds = False

    def add(self, rank: int) -> None:
        """Let a rank's contribution be added."""
        self._queue.setdefault(rank)
        self._ready.add(rank)
        self._go_on()

    def skip(self, rank: int) -> None:
        """Do without a rank."""
        self._queue.pop(rank, None)
        self._go_on()

    def _go_on(self) -> None:
        """Begin to add the next contribution, if it may be added."""
        rank = next(iter(self._queue), None)
        if rank in self._ready and not self._adds:
            del self._queue[rank]
            self._adds = True
            self._clock.after(self._add_s, partial(self._added, self._queue, rank))

    def _added(self, queue: dict[int, None], rank: int) -> None:
        if queue is self._queue:
            self._adds = False
            self._go_on()
            self._then(rank)
