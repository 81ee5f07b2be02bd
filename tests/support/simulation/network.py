"""Connections in memory and in virtual time: bytes arrive late, in pieces, or never."""

from __future__ import annotations

import random
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Any

from sparkdl.planner.simulation.engine import Clock

PIECES = 0.25
"""How likely it is that what is sent at once arrives in two pieces, or is not taken at once."""


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
        self.ended = self._closed = False
        self.on_arrival: Callable[[], None] = lambda: None
        self._clock, self._draw, self._delay_s = clock, draw, delay_s
        self._last = 0.0

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
    """A connection; this is the worker's end, a socket as far as ``Connection`` uses one.

    Args:
        clock: the run's clock.
        draw: draws the delays.
        delay_s: the longest delay, and the longest that a worker takes to make room for more.
        wait: has the worker wait until ``down`` has news.
    """

    family = socket.AF_UNIX

    def __init__(
        self, clock: Clock, draw: random.Random, delay_s: float, wait: Callable[[Wire], None]
    ) -> None:
        # Whatever order the averager serves connections in.
        self.clock, self.draw, self.delay_s = clock, random.Random(draw.random()), delay_s
        self.up, self.down = (Wire(clock, self.draw, delay_s) for _ in range(2))
        self._wait = wait
        self._broken = False

    def break_off(self, *, noticed_after_s: float = 0.0) -> None:
        """Cut the worker off; the averager learns of it after everything already sent."""
        self._broken = True
        self.up.end(noticed_after_s)

    def setsockopt(self, *_: object) -> None:
        """Nothing is to be set."""

    settimeout = setsockopt

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        """Send all of it, which never takes long."""
        octets = b"".join(buffers)
        self._require_whole()
        self.up.send(octets)
        return len(octets)

    def sendall(self, octets: Any) -> None:
        """Send all of it."""
        self.sendmsg([octets])

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0) -> int:
        """Wait until something has arrived."""
        self._require_whole()
        while not (self.down.arrived or self.down.ended):
            self._wait(self.down)
            self._require_whole()
        return self.down.take(buffer)

    def close(self) -> None:
        """Close the worker's end."""
        self.up.end()

    def _require_whole(self) -> None:
        if self._broken:
            raise ConnectionResetError("the simulated connection broke")


class Stream:
    """The averager's end of a connection, as ``Channel`` uses a socket.

    Attributes:
        on_room: called when more can be sent again.
    """

    def __init__(self, link: Link, on_room: Callable[[], None]) -> None:
        link.up.on_arrival = on_room
        self._link, self._on_room = link, on_room
        self._full_until = 0.0

    @property
    def ready(self) -> int:
        """What can be done at once."""
        up = self._link.up
        reads = selectors.EVENT_READ if up.arrived or up.ended else 0
        return reads | (selectors.EVENT_WRITE if self._room else 0)

    @property
    def _room(self) -> bool:
        return self._link.clock.now >= self._full_until

    def recv_into(self, buffer: memoryview) -> int:
        """Receive what has arrived."""
        up = self._link.up
        if not (up.arrived or up.ended):
            raise BlockingIOError
        return up.take(buffer)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send all of it, or the beginning, and nothing more for a while."""
        link = self._link
        if not self._room:
            raise BlockingIOError
        octets = b"".join(buffers)
        if link.draw.random() < PIECES:
            octets = octets[: link.draw.randrange(1, len(octets) + 1)]
            self._full_until = link.clock.now + link.draw.random() * link.delay_s
            link.clock.at(self._full_until, self._on_room)
        link.down.send(octets)
        return len(octets)

    def shutdown(self, how: int) -> None:
        """Send nothing more."""
        self._link.down.end()

    def close(self) -> None:
        """Close: what the worker still sends is not received."""
        self._link.up.on_arrival = lambda: None
        self._link.down.end()


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
        return [
            (selectors.SelectorKey(-1, -1, mask, channel), ready)
            for stream, (mask, channel) in self._registered.items()
            if (ready := stream.ready & mask)
        ]
