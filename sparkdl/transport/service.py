"""A port that many connect to, served by one thread however many they are.

The thread never waits for any one of them; slow work, with files or streams that somebody else
reads, is done by a few threads beside it. Whoever connects authenticates (``acceptor.py``); its
first header is looked up in the service's table of handlers, and the handler found serves it from
then on:

    service = Service("127.0.0.1", handlers={"attend": lambda channel: ReportingWorker(channel)})
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from typing_extensions import Self, Unpack

from sparkdl.errors import SparkDLError, TrainingError
from sparkdl.transport.acceptor import Acceptor, Listening
from sparkdl.transport.channel import HEADER, Channel, Conversation, LeftError
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.transport.connection import set_up
from sparkdl.transport.daemon_pool import DaemonPool
from sparkdl.transport.framing import header_message
from sparkdl.transport.sockets import Encrypted

logger = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""Seconds that the other end has to read the last thing it was sent."""
CLOSE_S = 10.0
"""Seconds for which a closing service waits for its thread."""
FILE_THREADS = 4
STAGING_BYTES = 64 << 10
TICK_S = 1.0
"""Seconds between two looks at the clock."""

T = TypeVar("T")


class Session(Protocol):
    """The service's side of one channel; the service's thread calls its methods."""

    def conversation(self, first: dict[str, Any]) -> Conversation:
        """The conversation with it.

        Args:
            first: the header with which it began.
        """

    def note_heartbeat(self) -> None:
        """Take note that something has come from it, or that it is reading what it is sent."""

    def left(self, error: LeftError) -> None:
        """Take note that it has left unasked; the channel is closed next."""

    def failed(self, error: SparkDLError) -> None:
        """Take note of an error raised by its conversation, or of an unreadable message."""

    def closed(self) -> None:
        """Take note that the channel is closed."""


Handler = Callable[[Channel], Session]


class Service:
    """Serve connections until closed, in its own thread; a context manager.

    A subclass may do more in that thread, in ``follow_up`` and ``tick``.

    Args:
        host: the interface to bind to, as an address or name of this machine.
        handlers: what serves a connection, by a field of the header with which it begins. The first
            handler also serves connections that begin in any other way. More may be added later.
        name: the thread's name.
        listening: see ``Acceptor``.

    Raises:
        ConfigError: encryption was asked for, and the package that it needs is missing; or all
            ``ports`` are taken.

    Attributes:
        address: where to connect.
        handlers: as given.
        now: reads the time, in seconds, by which others are late; tests let it pass.
        failure: the error with which a bug of ours ended the thread; None if none did.
    """

    def __init__(
        self,
        host: str,
        handlers: Mapping[str, Handler] | None = None,
        *,
        name: str = "sparkdl-service",
        **listening: Unpack[Listening],
    ) -> None:
        self.now = listening.get("now", time.monotonic)
        self.handlers: dict[str, Handler] = dict(handlers or {})
        self.failure: TrainingError | None = None
        self._on_break: list[Callable[[TrainingError], None]] = []
        # None until the other end has said who it is.
        self._sessions: dict[Channel, Session | None] = {}
        self._touched: set[Channel] = set()
        self._leaving: dict[Channel, float] = {}
        self._registered: dict[Channel, int] = {}
        self._staging = memoryview(bytearray(STAGING_BYTES))
        # What other threads want done here; reentrant, so that a signal handler may post too.
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waking = threading.RLock()
        self._closing = self._closed = False
        self._files = DaemonPool(FILE_THREADS, "sparkdl-files")
        self._tick_at = self.now()
        # Nobody can get in before this has returned: nobody else knows the token.
        token, known_as = secrets.token_urlsafe(32), listening.get("advertised_host") or host
        self._acceptor = Acceptor(host, token, self._admit, **listening)
        number, fingerprint = self._acceptor.number, self._acceptor.fingerprint
        self.address = ServiceAddress(known_as, number, token, fingerprint)
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called by any thread.

    def post(self, call: Callable[[], None]) -> None:
        """Have something done in the service's thread; after its end, in this one or not at all."""
        self._posted.put(call)
        with self._waking:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # it is about to wake already
                    self._waker.send(b"\0")
            elif threading.current_thread() is not self._thread:
                self._refuse_late()

    def on_break(self, call: Callable[[TrainingError], None]) -> None:
        """Call with ``failure`` when a bug ends the thread, perhaps twice; at once if one has.

        Otherwise whoever waits for news from the service would wait forever.
        """
        self._on_break.append(call)
        if self.failure is not None:
            call(self.failure)

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._acceptor.close()
        self._closing = True
        self.post(lambda: None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s did not end in %.0f s", self._thread.name, CLOSE_S)
        self._files.close(cancel=True)

    def _admit(self, connected: socket.socket | Encrypted, proof: bytes) -> None:
        """Serve a connection whose other end has proved that it knows the token."""
        set_up(connected)
        connected.setblocking(False)

        def adopt() -> None:
            channel = Channel(connected, self._staging, self._touched.add)
            channel.send([memoryview(proof)])
            self._sessions[channel] = None
            channel.begin(self._introduction(channel))
            self._touched.add(channel)

        self.post(adopt)

    def _refuse_late(self) -> None:
        """Leave nothing posted undone: whoever connects now is closed."""
        self._do_posted()
        for channel in list(self._sessions):
            self.close_channel(channel)

    def _do_posted(self) -> None:
        while True:
            try:
                # After the end, a signal handler may get here in the middle of this.
                call = self._posted.get_nowait()
            except queue.Empty:
                return
            call()

    # For sessions, in the service's thread.

    def part(self, channel: Channel, farewell: dict[str, Any] | None = None) -> None:
        """Send a last header, if any, and close once the other end has read it.

        Args:
            channel: the channel, whose conversation ends with this.
            farewell: the header to send.
        """
        if channel in self._leaving:
            return
        self._leaving[channel] = self.now() + FAREWELL_S
        channel.end_conversation()
        frames = [] if farewell is None else [memoryview(header_message(farewell))]
        channel.send(frames, then=channel.end_sending)

    def close_channel(self, channel: Channel) -> None:
        """Close at once."""
        if channel not in self._sessions:
            return
        session = self._sessions.pop(channel)
        if self._registered.pop(channel, 0):
            self._selector.unregister(channel.connected)
        self._leaving.pop(channel, None)
        try:
            channel.close()
        finally:
            if session is not None:
                session.closed()

    def guard(self, channel: Channel, call: Callable[[], T]) -> T | None:
        """Do something for a connection; its session takes note of any error."""
        try:
            return call()
        except LeftError as error:
            if channel not in self._leaving and channel in self._sessions:
                self._session(channel).left(error)
            self.close_channel(channel)
        except SparkDLError as error:
            if channel in self._sessions:
                self._session(channel).failed(error)
        return None

    def elsewhere(self, channel: Channel, job: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do slow work with files in another thread.

        Args:
            channel: the connection that it is done for; its session takes note of any error.
            job: what to do.
            then: called in this thread afterwards, with what ``job`` returned.
        """

        def done(future: Future[T]) -> None:
            if not future.cancelled():
                self.post(lambda: self.guard(channel, lambda: then(future.result())))

        self._files.submit(job).add_done_callback(done)

    # What a subclass does besides.

    def follow_up(self) -> bool:
        """Do everything that follows from what has happened; returns whether there was anything."""
        return False

    def tick(self) -> float:
        """Check the clock; returns the seconds until the next check."""
        return TICK_S

    # The thread.

    def _introduction(self, channel: Channel) -> Conversation:
        first = yield HEADER
        yield from self._session(channel, first).conversation(first)

    def _session(self, channel: Channel, first: Collection[str] = ()) -> Session:
        """The session there; the first handler's if no handler understands the first header."""
        session = self._sessions[channel]
        if session is None:
            known = [self.handlers[field] for field in self.handlers if field in first]
            handler = known[0] if known else next(iter(self.handlers.values()))
            self._sessions[channel] = session = handler(channel)
        return session

    def _run(self) -> None:
        try:
            while not self._closing:
                self._iterate()
            self._do_posted()
            self._settle()  # as much of the farewells as goes out at once
        except BaseException as error:  # a bug of ours must not leave others waiting
            logger.exception("%s ended", self._thread.name)
            self._break(error)
        finally:
            self._close_all()
            self._selector.close()
            with self._waking:
                self._closed = True
                self._waker.close()
                self._woken.close()
                while not self._in_spite(self._refuse_late):  # one thread at a time
                    pass

    def _break(self, error: BaseException) -> None:
        """Tell everyone who may be waiting for this thread, whatever else is wrong."""
        failure = TrainingError(
            f"the driver's thread {self._thread.name} ended with {error!r}, which is a bug in "
            "sparkdl; the driver's log has its traceback"
        )
        self.failure = failure
        for call in self._on_break:
            self._in_spite(lambda call=call: call(failure))  # type: ignore[misc]
        for channel in list(self._leaving):  # as much of the farewells as goes out at once
            with contextlib.suppress(Exception):
                channel.flush()

    def _close_all(self) -> None:
        for channel in list(self._sessions):
            self._in_spite(lambda channel=channel: self.close_channel(channel))  # type: ignore[misc]

    def _in_spite(self, call: Callable[[], None]) -> bool:
        """Call something as the thread ends, whatever it raises; returns whether it worked."""
        try:
            call()
        except Exception:
            logger.exception("%s: another error while ending", self._thread.name)
            return False
        return True

    def _iterate(self) -> None:
        """Run one iteration of the event loop."""
        timeout_s = 0.0 if self._touched else max(0.0, self._tick_at - self.now())
        for key, mask in self._selector.select(timeout_s):
            if key.data is None:
                self._woken.recv(1 << 12)
            else:
                self._serve(key.data, mask)
        self._do_posted()
        self._settle()
        # Only after the sockets have been checked.
        if (now := self.now()) >= self._tick_at:
            self._tick_at = now + self.tick()
            for channel in [each for each, until in self._leaving.items() if now >= until]:
                self.close_channel(channel)
            self._settle()

    def _serve(self, channel: Channel, mask: int) -> None:
        if mask & selectors.EVENT_READ and channel in self._sessions:
            self.guard(channel, channel.receive)
            self._receive(channel)
        self._touched.add(channel)  # what can be sent now is sent by _attend

    def _settle(self) -> None:
        self.follow_up()
        self._attend()
        while self.follow_up():
            self._attend()

    def _attend(self) -> None:
        """Advance the channels on which something can be done."""
        touched = list(self._touched)
        self._touched.clear()
        for channel in touched:
            if channel not in self._sessions:
                continue
            if channel.sends and self.guard(channel, channel.flush):
                self._receive(channel)
            if channel.has_leftover:
                self.guard(channel, channel.receive)
            self._register(channel)

    def _receive(self, channel: Channel) -> None:
        session = self._sessions.get(channel)
        if session is not None:
            session.note_heartbeat()

    def _register(self, channel: Channel) -> None:
        mask = selectors.EVENT_READ if channel.listens else 0
        mask |= selectors.EVENT_WRITE if channel.sends else 0
        before = self._registered.get(channel, 0)
        if mask == before or channel not in self._sessions:
            return
        if not before:
            self._selector.register(channel.connected, mask, channel)
        elif not mask:
            self._selector.unregister(channel.connected)
        else:
            self._selector.modify(channel.connected, mask, channel)
        self._registered[channel] = mask
