"""One connection of a service: messages in, messages out, and never a wait.

The conversation on it is a generator: it yields what it needs next, and the service serves others
until that has arrived and can be sent in. So it reads like a thread's code, but costs neither a
thread nor a lock.

    HEADER              the next message, a header
    values of a tensor  the next message, its bytes received in place
    UpTo(values)        the same, but there may be fewer; how many bytes came is sent in
    PAUSE               whatever ``wake`` is called with; nothing is received meanwhile
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, Final

from sparkdl.errors import TrainingError
from sparkdl.transport.framing import (
    HEADER_KIND,
    PREFIX_BYTES,
    header_message,
    read_header,
    read_prefix,
)
from sparkdl.transport.sockets import RECORD_BYTES, Encrypted

IN_PLACE_BYTES = RECORD_BYTES
"""As long as at least this many bytes of values are missing, they are received straight into place.
With room for less, what is left of a record of TLS would stay where no selector sees it."""
BUDGET_BYTES = 4 << 20
"""How much is received from one worker before the others get their turn."""
FRAMES_AT_ONCE = 64
UNREAD_HEADERS = 64
"""Headers that may wait for the other end to take them; beyond that, it is not listened to."""
UNREAD_BYTES = 1 << 20
"""The same limit in bytes."""


class _Need(Enum):
    HEADER = "header"
    PAUSE = "pause"


HEADER: Final = _Need.HEADER
PAUSE: Final = _Need.PAUSE


@dataclass(frozen=True, slots=True)
class UpTo:
    """Values of which fewer may come than there is room for.

    Attributes:
        room: where to receive them.
    """

    room: memoryview


Need = _Need | memoryview | UpTo
Conversation = Generator[Need, Any, None]
Frames = list[memoryview]
"""The bytes of messages, in the order in which they are to be sent."""


class LeftError(Exception):
    """The other end is gone."""


class Channel:
    """Messages over a connected socket.

    Args:
        connected: the socket, which does not block; owned from here on.
        staging: the receive buffer, shared by all channels of a service; as large as a record of
            TLS or larger.
        touched: called when there is something to send, or the conversation can go on.

    Attributes:
        check: called with each header that arrives, even in the middle of values; may raise.
    """

    def __init__(
        self,
        connected: socket.socket | Encrypted,
        staging: memoryview,
        touched: Callable[[Channel], None],
    ) -> None:
        self.connected = connected
        # Whether a short count means that no more can be received or sent now: TLS goes by records.
        self._short_is_all = not isinstance(connected, Encrypted)
        self._staging = staging
        self._touched = touched
        self.check: Callable[[dict[str, Any]], None] | None = None
        self._conversation: Conversation | None = None
        self._need: _Need | memoryview = PAUSE
        # Whether values have to fill their room; if not, how long the message is.
        self._exact = True
        self._length = 0
        self._running = False
        self._wakes: deque[Any] = deque()
        # What has arrived but has not been asked for yet.
        self._leftover = b""
        self._prefix = bytearray(PREFIX_BYTES)
        self._prefixed = 0
        self._header: bytearray | None = None
        # The part of the message's body that has yet to come.
        self._rest = memoryview(b"")
        self._outgoing: deque[_Outgoing] = deque()
        # Headers among those, and their bytes; values are not counted, because they are not copied.
        self._unread = self._unread_bytes = 0

    def begin(self, conversation: Conversation) -> None:
        """Start the channel's only conversation."""
        self._conversation = conversation
        self._advance(None)

    def wake(self, value: Any = None) -> None:
        """Resume the conversation, which has paused or is about to."""
        if self._conversation is None:
            return
        self._wakes.append(value)
        if not self._running and self._need is PAUSE:
            self._advance(self._wakes.popleft())
        self._touched(self)

    def end_conversation(self) -> None:
        """Stop listening to the other end; what it still sends is discarded."""
        if self._conversation is not None and not self._running:
            self._conversation.close()
        self._conversation = None
        # A message that has arrived in part now has no receiver, and must not write to its memory.
        self._rest, self._header, self._leftover = memoryview(b""), None, b""

    def redirect(self, room: Callable[[int], memoryview]) -> None:
        """Receive the values now on their way somewhere else, because their place is needed.

        Args:
            room: returns room for so many bytes.
        """
        if isinstance(self._need, memoryview):
            into = room(len(self._need))
            if self._rest and self._header is None:
                self._rest = into[self._length - len(self._rest) : self._length]
            self._need = into

    @property
    def listens(self) -> bool:
        """Whether what arrives is wanted now.

        A peer that asks without taking the answers has to wait: they would fill the driver's
        memory.
        """
        if self._conversation is None:
            return True
        full = self._unread >= UNREAD_HEADERS or self._unread_bytes > UNREAD_BYTES
        return self._need is not PAUSE and not full

    @property
    def has_leftover(self) -> bool:
        """Whether something wanted has already arrived that a selector does not know of."""
        return self.listens and bool(self._leftover)

    def receive(self) -> bool:
        """Receive what has arrived; returns whether there may be more.

        Raises:
            LeftError: the other end is gone.
            TrainingError: it sent something that no worker sends.
            SparkDLError: whatever the conversation raises.
        """
        received = 0
        while self.listens and received < BUDGET_BYTES:
            if self._leftover:
                octets, self._leftover = self._leftover, b""
                self._take(memoryview(octets))
                continue
            room = self._room()
            try:
                count = self.connected.recv_into(room)
            except BlockingIOError:
                return False
            except OSError as error:
                raise LeftError(f"the connection broke: {error}") from error
            if count == 0:
                raise LeftError("the other end closed the connection")
            received += count
            if room is not self._rest:
                self._take(room[:count])
            else:
                self._rest = self._rest[count:]
                if not self._rest:
                    self._end_message()
            if count < len(room) and self._short_is_all:
                return False
        return self.listens

    def send_header(self, fields: dict[str, Any]) -> None:
        """Send a JSON object."""
        self.send([memoryview(header_message(fields))])

    def send(self, frames: Frames, then: Callable[[], None] | None = None) -> None:
        """Send messages as they are.

        Args:
            frames: the messages' bytes; they must not change until they are sent.
            then: called once they are sent.
        """
        # A header is a single frame.
        outgoing = _Outgoing(deque(frames), then, len(frames[0]) if len(frames) == 1 else 0)
        self._outgoing.append(outgoing)
        self._count(outgoing, 1)
        self._touched(self)

    def flush(self) -> bool:
        """Send what can be sent now.

        Returns:
            Whether some of it was values. Sent headers prove nothing: the system has room for them
                whether the other end takes them or not.

        Raises:
            LeftError: the other end is gone.
        """
        moved = False
        while self._outgoing:
            first = self._outgoing[0]
            if first.frames:
                frames = list(islice(first.frames, FRAMES_AT_ONCE))
                try:
                    sent = self.connected.sendmsg(frames)
                except BlockingIOError:
                    return moved
                except OSError as error:
                    raise LeftError(f"the connection broke: {error}") from error
                moved = moved or not first.header_bytes
                first.advance(sent)
                if self._short_is_all and sent < sum(map(len, frames)):
                    return moved
            if not first.frames:
                self._outgoing.popleft()
                self._count(first, -1)
                if first.then is not None:
                    first.then()
        return moved

    def end_sending(self) -> None:
        """Signal to the other end that nothing follows; it may be gone already."""
        with contextlib.suppress(OSError):
            self.connected.shutdown(socket.SHUT_WR)

    @property
    def sends(self) -> bool:
        """Whether something has yet to be sent."""
        return bool(self._outgoing)

    def close(self) -> None:
        """Close at once."""
        try:
            self.end_conversation()
        finally:  # whatever the conversation does as it ends
            self._outgoing.clear()
            self.connected.close()

    def _count(self, outgoing: _Outgoing, sign: int) -> None:
        self._unread += sign * bool(outgoing.header_bytes)
        self._unread_bytes += sign * outgoing.header_bytes

    def _room(self) -> memoryview:
        """Where to receive what comes next: values in place, all else in the staging buffer."""
        if len(self._rest) >= IN_PLACE_BYTES:
            return self._rest
        # Not much more than is due: it would have to be kept, or copied to its place.
        ends_soon = self._rest or isinstance(self._need, memoryview)
        return self._staging[:IN_PLACE_BYTES] if ends_soon else self._staging

    def _take(self, octets: memoryview) -> None:
        """Process what has arrived; what is not wanted yet is kept."""
        while octets:
            if self._conversation is None:
                return
            if not self.listens:
                self._leftover = bytes(octets)
                return
            if self._rest:
                count = min(len(octets), len(self._rest))
                self._rest[:count] = octets[:count]
                self._rest = self._rest[count:]
                octets = octets[count:]
            else:
                count = min(len(octets), PREFIX_BYTES - self._prefixed)
                self._prefix[self._prefixed : self._prefixed + count] = octets[:count]
                self._prefixed += count
                octets = octets[count:]
                if self._prefixed < PREFIX_BYTES:
                    return
                self._begin_message()
            if not self._rest:
                self._end_message()

    def _begin_message(self) -> None:
        kind, length = read_prefix(self._prefix)
        self._prefixed = 0
        if kind == HEADER_KIND:
            self._header = bytearray(length)
            self._rest = memoryview(self._header)
            return
        if not isinstance(self._need, memoryview):
            raise TrainingError("values arrived where a header was expected")
        if length > len(self._need) or (self._exact and length < len(self._need)):
            most = "" if self._exact else "at most "
            raise TrainingError(
                f"{length} bytes of values arrived, expected {most}{len(self._need)}; both ends "
                "must train the same model"
            )
        self._length = length
        self._rest = self._need[:length]

    def _end_message(self) -> None:
        if self._header is None:
            self._advance(None if self._exact else self._length)
            return
        header, self._header = read_header(self._header), None
        if self.check is not None:
            self.check(header)
        if self._need is not HEADER:
            raise TrainingError(f"a header arrived in the middle of values: {header}")
        self._advance(header)

    def _advance(self, value: Any) -> None:
        conversation = self._conversation
        assert conversation is not None
        self._running = True
        try:
            self._want(conversation.send(value))
            while self._need is PAUSE and self._wakes and self._conversation is not None:
                self._want(conversation.send(self._wakes.popleft()))
        except StopIteration:
            self._conversation = None
        finally:
            self._running = False

    def _want(self, need: Need) -> None:
        self._exact = not isinstance(need, UpTo)
        self._need = need.room if isinstance(need, UpTo) else need


@dataclass
class _Outgoing:
    """Frames on their way."""

    frames: deque[memoryview]
    then: Callable[[], None] | None
    header_bytes: int
    """Size of the header that they are, in bytes; 0 for values."""

    def advance(self, count: int) -> None:
        while self.frames and count >= len(self.frames[0]):
            count -= len(self.frames.popleft())
        if count:
            self.frames[0] = self.frames[0][count:]
