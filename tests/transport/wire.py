"""A channel over a stream that a test writes: what arrives in which pieces, what is taken."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from sparkdl.transport.channel import HEADER, PAUSE, Channel, Conversation
from sparkdl.transport.framing import header_message, values_prefix


class Wire:
    """A stream that delivers what arrives in given pieces, and takes a given number of bytes."""

    short_is_all = False

    def __init__(self, pieces: Iterable[bytes] = (), takes: Iterable[int | None] = ()) -> None:
        self.arriving = deque(pieces)
        self.sent = b""
        self.offers: list[int] = []
        self.closed = self.ended = False
        self.broken = False
        self._takes = deque(takes)

    def fileno(self) -> int:
        return -1

    def receive(self, into: Sequence[memoryview]) -> int | None:
        """One piece at most, as much as there is room for; an empty one is the end."""
        if self.broken:
            raise ConnectionResetError("reset")
        if not self.arriving:
            return None
        piece = self.arriving.popleft()
        count, left = 0, piece
        for buffer in into:
            size = min(len(buffer), len(left))
            buffer[:size] = left[:size]
            count, left = count + size, left[size:]
        if left:
            self.arriving.appendleft(left)
        return count

    def send(self, buffers: Sequence[memoryview]) -> int | None:
        """As much as it is to take next; everything in the end."""
        if self.broken:
            raise BrokenPipeError("broken")
        octets = b"".join(buffers)
        self.offers.append(len(buffers))
        takes = self._takes.popleft() if self._takes else len(octets)
        if takes is None:
            return None
        self.sent += octets[:takes]
        return min(takes, len(octets))

    def end_sending(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True


def values(octets: bytes) -> bytes:
    return bytes(values_prefix(len(octets))) + octets


def channel_over(
    *pieces: bytes, takes: Iterable[int | None] = (), staging: int = 64
) -> tuple[Channel, Wire]:
    wire = Wire(pieces, takes)
    return Channel(wire, memoryview(bytearray(staging)), lambda channel: None), wire


def receive_all(channel: Channel) -> None:
    """Receive until nothing is left that is wanted."""
    while channel.receive():
        pass


def cut(octets: bytes, places: Iterable[int]) -> list[bytes]:
    """The same bytes in pieces."""
    bounds = [0, *sorted(set(places)), len(octets)]
    return [octets[a:b] for a, b in itertools.pairwise(bounds) if a < b]


# A header, values in two messages, a pause, and a header once more, twice over.
MESSAGES = (
    header_message({"window": 1})
    + values(bytes(range(20)))
    + values(bytes(range(100, 130)))
    + header_message({})
) * 2


def listen(received: list[Any]) -> Conversation:
    """Take note of everything that ``MESSAGES`` has."""
    for _ in range(2):
        received.append((yield HEADER))
        for size in (20, 30):
            place = bytearray(size)
            assert (yield memoryview(place)) is None
            received.append(bytes(place))
        received.append((yield PAUSE))
        received.append((yield HEADER))


EXPECTED = [{"window": 1}, bytes(range(20)), bytes(range(100, 130)), "woken", {}] * 2
