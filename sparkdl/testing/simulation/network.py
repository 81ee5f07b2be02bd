"""Time that passes at once, and connections in memory: bytes arrive late, in pieces, or never."""

from __future__ import annotations

import heapq
import random
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Any

PIECES = 0.25
"""How likely it is that what is sent at once arrives in two pieces, or is not taken at once."""


class Clock:
    """A queue of timed calls; those due at the same time run in the order of their scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedule a call after some seconds."""
        self.at(self.now + seconds, call)

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Schedule a call at a time; one in the past goes behind all others that are due."""
        self._count += 1
        heapq.heappush(self._due, (max(time, self.now), self._count, call))

    def step(self) -> bool:
        """Make the call that is due first; returns whether there was one."""
        if not self._due:
            return False
        at, _, call = heapq.heappop(self._due)
        self.now = at
        call()
        return True

    def forget(self) -> None:
        """Drop all scheduled calls."""
        self._due.clear()


class Wire:
    """One direction of a connection.

    Args:
        clock: the run's clock.
        draw: draws the delays.
        delay_s: the longest delay.

    Attributes:
        arrived: what has arrived and was not taken yet.
        ended: whether nothing more will arrive.
        on_arrival: called whenever something has arrived, or the end.
    """

    def __init__(self, clock: Clock, draw: random.Random, delay_s: float) -> None:
        self.arrived = bytearray()
        self.ended = False
        self.on_arrival: Callable[[], None] = lambda: None
        self._clock, self._draw, self._delay_s = clock, draw, delay_s
        self._last = 0.0
        self._closed = False

    def send(self, octets: bytes) -> None:
        """Have bytes arrive later, in order, perhaps in two pieces."""
        cut = self._draw.randrange(len(octets)) if self._draw.random() < PIECES else 0
        if cut:
            self._deliver(octets[:cut])
        self._deliver(octets[cut:])

    def end(self, after_s: float = 0.0) -> None:
        """Send nothing more, which the other end notices, at the soonest after some seconds."""
        if not self._closed:
            self._last = max(self._last, self._clock.now + after_s)
            self._deliver(b"")
            self._closed = True

    def take(self, into: memoryview) -> int:
        """Take what has arrived, as far as there is room; returns how many bytes."""
        count = min(len(into), len(self.arrived))
        into[:count] = self.arrived[:count]
        del self.arrived[:count]
        return count

    def _deliver(self, octets: bytes) -> None:
        if self._closed:
            return
        self._last = max(self._last, self._clock.now + self._draw.random() * self._delay_s)

        def arrive() -> None:
            self.arrived += octets
            self.ended = not octets
            self.on_arrival()

        self._clock.at(self._last, arrive)


class Link:
    """One connection, as its two ends see it: a stream for the averager, a socket for the worker.

    Args:
        clock: the run's clock.
        draw: draws the delays.
        delay_s: the longest delay.
        wait: has the worker wait until ``up`` or ``down`` has news.
    """

    def __init__(
        self, clock: Clock, draw: random.Random, delay_s: float, wait: Callable[[Wire], None]
    ) -> None:
        draw = random.Random(draw.random())  # whatever order the averager serves connections in
        self.up, self.down = Wire(clock, draw, delay_s), Wire(clock, draw, delay_s)
        self.stream = Stream(self, clock, draw, delay_s)
        self.wait = wait
        self.broken = False

    def break_off(self, *, noticed_after_s: float = 0.0) -> None:
        """Cut the worker off; the averager learns of it after everything already sent."""
        self.broken = True
        self.up.end(noticed_after_s)

    # A socket, as far as ``Connection`` uses one.

    family = socket.AF_UNIX

    def setsockopt(self, *_: object) -> None:
        """Nothing is to be set."""

    settimeout = setsockopt

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        """Send all of it."""
        octets = b"".join(buffers)
        self.sendall(octets)
        return len(octets)

    def sendall(self, octets: Any) -> None:
        """Send all of it, which never takes long."""
        self._require_whole()
        self.up.send(bytes(octets))

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0) -> int:
        """Wait until something has arrived."""
        self._require_whole()
        while not self.down.arrived:
            if self.down.ended:
                return 0
            self.wait(self.down)
            self._require_whole()
        return self.down.take(buffer)

    def close(self) -> None:
        """Close the worker's end."""
        self.up.end()

    def _require_whole(self) -> None:
        if self.broken:
            raise ConnectionResetError("the simulated connection broke")


class Stream:
    """The averager's end, as ``Channel`` uses one.

    Args:
        link: the connection.
        clock: the run's clock.
        draw: draws how much is taken at once, and for how long the rest is not.
        delay_s: the longest that a worker takes to make room for more.
    """

    short_is_all = True

    def __init__(self, link: Link, clock: Clock, draw: random.Random, delay_s: float) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self.link = link
        self._clock, self._draw, self._delay_s = clock, draw, delay_s
        self._full_until = 0.0

    def fileno(self) -> int:
        """There is none."""
        return -1

    def ready(self, mask: int) -> int:
        """What can be done at once of what a selector is asked for."""
        up = self.link.up
        reads = selectors.EVENT_READ if up.arrived or up.ended else 0
        writes = selectors.EVENT_WRITE if self._clock.now >= self._full_until else 0
        return mask & (reads | writes)

    def receive(self, into: Sequence[memoryview]) -> int | None:
        """Fill buffers with what has arrived; None if nothing has."""
        up = self.link.up
        if not up.arrived:
            return 0 if up.ended else None
        return sum(up.take(buffer) for buffer in into)

    def send(self, buffers: Sequence[memoryview]) -> int | None:
        """Send all of it, or the beginning, and nothing more for a while."""
        if self._clock.now < self._full_until:
            return None
        octets = b"".join(buffers)
        if self._draw.random() < PIECES:
            octets = octets[: self._draw.randrange(1, len(octets) + 1)]
            self._full_until = self._clock.now + self._draw.random() * self._delay_s
            self._clock.at(self._full_until, self.on_room)
        self.link.down.send(octets)
        return len(octets)

    def end_sending(self) -> None:
        """Send nothing more."""
        self.link.down.end()

    def close(self) -> None:
        """Close: what the worker still sends is not received."""
        self.link.up.on_arrival = lambda: None
        self.link.down.end()


class Selector:
    """What can be done at the averager's ends, as ``Service`` asks for it; it never waits."""

    def __init__(self) -> None:
        self._registered: dict[Stream, tuple[int, Any]] = {}

    def register(self, stream: Stream, mask: int, channel: Any) -> None:
        """Watch a stream."""
        self._registered[stream] = mask, channel

    modify = register

    def unregister(self, stream: Stream) -> None:
        """Watch it no longer."""
        del self._registered[stream]

    def select(self, timeout_s: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What can be done now."""
        found = []
        for stream, (mask, channel) in list(self._registered.items()):
            if ready := stream.ready(mask):
                found.append((selectors.SelectorKey(-1, -1, mask, channel), ready))
        return found
