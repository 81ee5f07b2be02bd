"""A port that many connect to, served by one thread, however many they are.

The thread never waits for one of them; what takes long, with files or streams that somebody else
reads, is done by a few threads beside it. Whoever connects proves itself (``acceptor.py``); what it
says first is looked up in the table of the service's handlers, and who is found there serves it
from then on:

    service = Service("127.0.0.1", handlers={"attend": lambda channel: Attendee(channel)})
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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from sparkdl.errors import SparkDLError, TrainingError
from sparkdl.transport.address import ServiceAddress
from sparkdl.transport.channel import HEADER, Channel, Conversation, LeftError
from sparkdl.transport.connection import set_up
from sparkdl.transport.daemon_pool import DaemonPool
from sparkdl.transport.framing import header_message
from sparkdl.transport.port import Listener
from sparkdl.transport.streams import stream_over
from sparkdl.transport.tls import Encrypted

logger = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""Seconds that the other end has to read what it was told last."""
CLOSE_S = 10.0
"""Seconds to wait for the service's thread when it closes."""
FILE_THREADS = 4
STAGING_BYTES = 64 << 10
TICK_S = 1.0
"""Seconds between two looks at the clock."""

T = TypeVar("T")


class Peer(Protocol):
    """Who is at the other end of a channel; its methods are called by the service's thread."""

    def conversation(self, said: dict[str, Any]) -> Conversation:
        """Listen to it.

        Args:
            said: the header with which it began.
        """

    def note_heartbeat(self) -> None:
        """Take note that something has come from it, or that it takes what it is sent."""

    def left(self, error: LeftError) -> None:
        """Take note that it has gone without having been told to; the channel is closed next."""

    def failed(self, error: SparkDLError) -> None:
        """Take note of what its conversation has raised, or of what nobody can read."""

    def closed(self) -> None:
        """Take note that the channel is closed."""


Handler = Callable[[Channel], Peer]


class Service:
    """Serve connections until closed, in a thread of its own; a context manager.

    A subclass may have more to do in that thread: ``follow_up``, ``tick`` and ``broke``.

    Args:
        host: interface to bind to, an address or name of this machine.
        handlers: by a field of the header with which a connection begins, who serves it. The first
            of them also serves those that begin in another way. More may be added later.
        advertised_host: the name under which others reach it; ``host`` by default.
        encrypted: whether connections are, by a certificate of the port's own.
        name: of the thread.

    Raises:
        ConfigError: they are to be encrypted, and the package for that is missing.

    Attributes:
        address: for those who connect.
        handlers: as given.
        failure: with what the thread has ended by a mistake of ours; None if it has not.
    """

    def __init__(
        self,
        host: str,
        handlers: Mapping[str, Handler] | None = None,
        *,
        advertised_host: str | None = None,
        encrypted: bool = False,
        name: str = "sparkdl-service",
    ) -> None:
        self.handlers: dict[str, Handler] = dict(handlers or {})
        self.failure: TrainingError | None = None
        self._on_break: list[Callable[[TrainingError], None]] = []
        # None until it has said who it is.
        self._peers: dict[Channel, Peer | None] = {}
        self._touched: set[Channel] = set()
        self._leaving: dict[Channel, float] = {}
        self._registered: dict[Channel, int] = {}
        self._staging = memoryview(bytearray(STAGING_BYTES))
        # What other threads want done here; reentrant, so that a signal handler may.
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ringing = threading.RLock()
        self._closing = self._closed = False
        self._files = DaemonPool(FILE_THREADS, "sparkdl-files")
        self._tick_at = time.monotonic()
        # It lets nobody in before this has returned: nobody else knows the token.
        token, known_as = secrets.token_urlsafe(32), advertised_host or host
        self._port = Listener(
            host, token, self._admit, advertised_host=known_as, encrypted=encrypted
        )
        known_as = f"[{known_as}]" if ":" in known_as else known_as
        uri = f"tcp://{known_as}:{self._port.number}"
        self.address = ServiceAddress(uri, token, self._port.fingerprint)
        self._selector = selectors.DefaultSelector()
        self._bell, self._rung = socket.socketpair()
        self._rung.setblocking(False)
        self._bell.setblocking(False)
        self._selector.register(self._rung, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called by any thread.

    def post(self, call: Callable[[], None]) -> None:
        """Have something done in the service's thread; after the end, in this one or not at all."""
        self._posted.put(call)
        with self._ringing:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # it has been rung often enough
                    self._bell.send(b"\0")
            elif threading.current_thread() is not self._thread:
                self._refuse_late()

    def on_break(self, call: Callable[[TrainingError], None]) -> None:
        """Call with ``failure`` when the thread ends by a mistake, perhaps twice; if it has, now.

        Whoever waits for what the service is told would wait for ever.
        """
        self._on_break.append(call)
        if self.failure is not None:
            call(self.failure)

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._port.close()
        self._closing = True
        self.post(lambda: None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s did not end in %.0f s", self._thread.name, CLOSE_S)
        self._files.close(cancel=True)

    def _admit(self, connected: socket.socket | Encrypted, proof: bytes) -> None:
        """Serve a connection whose other end has proved that it knows the token."""
        set_up(connected)
        stream = stream_over(connected)

        def adopt() -> None:
            channel = Channel(stream, self._staging, self._touch)
            channel.send([memoryview(proof)])
            self._peers[channel] = None
            channel.begin(self._introduction(channel))
            self._touched.add(channel)

        self.post(adopt)

    def _refuse_late(self) -> None:
        """See that nothing that was posted stays undone: whoever connects now is left."""
        self._do_posted()
        for channel in list(self._peers):
            self.close_channel(channel)

    def _do_posted(self) -> None:
        while True:
            try:
                # After the end a signal handler may do so in the middle of this.
                call = self._posted.get_nowait()
            except queue.Empty:
                return
            call()

    # For peers, in the service's thread.

    def part(self, channel: Channel, farewell: dict[str, Any] | None = None) -> None:
        """Say something last, if anything, and close once the other end has read that.

        Args:
            channel: whose conversation ends with it.
            farewell: the header to send.
        """
        if channel in self._leaving:
            return
        self._leaving[channel] = time.monotonic() + FAREWELL_S
        channel.end_conversation()
        frames = [] if farewell is None else [memoryview(header_message(farewell))]
        channel.send(frames, then=channel.end_sending)

    def close_channel(self, channel: Channel) -> None:
        """Close at once."""
        if channel not in self._peers:
            return
        peer = self._peers.pop(channel)
        if self._registered.pop(channel, 0):
            self._selector.unregister(channel.stream)
        self._leaving.pop(channel, None)
        try:
            channel.close()
        finally:
            if peer is not None:
                peer.closed()

    def guard(self, channel: Channel, call: Callable[[], T]) -> T | None:
        """Do something at a connection, whose errors are its peer's to take note of."""
        try:
            return call()
        except LeftError as error:
            if channel not in self._leaving and channel in self._peers:
                self._peer(channel).left(error)
            self.close_channel(channel)
        except SparkDLError as error:
            if channel in self._peers:
                self._peer(channel).failed(error)
        return None

    def elsewhere(
        self,
        job: Callable[[], T],
        then: Callable[[Future[T]], None],
        pool: DaemonPool | None = None,
    ) -> None:
        """Do what may take long beside this thread.

        Args:
            job: what to do.
            then: called here afterwards, with what ``job`` has returned or raised.
            pool: does it; by default one for files.
        """

        def done(future: Future[T]) -> None:
            if not future.cancelled():
                self.post(lambda: then(future))

        (pool or self._files).submit(job).add_done_callback(done)

    # What a subclass has to do besides.

    def follow_up(self) -> bool:
        """Do everything that follows from what has happened; returns whether there was any."""
        return False

    def tick(self) -> float:
        """Look at the clock; returns the seconds until the next look."""
        return TICK_S

    def broke(self, failure: TrainingError) -> None:
        """Take note that a mistake of ours has ended the thread; farewells still go out."""

    # The thread.

    def _introduction(self, channel: Channel) -> Conversation:
        said = yield HEADER
        first = next(iter(self.handlers.values()))
        handler = next((self.handlers[each] for each in self.handlers if each in said), first)
        self._peers[channel] = peer = handler(channel)
        yield from peer.conversation(said)

    def _peer(self, channel: Channel) -> Peer:
        """Who is there; the first handler's if nobody has understood it."""
        peer = self._peers[channel]
        if peer is None:
            self._peers[channel] = peer = next(iter(self.handlers.values()))(channel)
        return peer

    def _run(self) -> None:
        try:
            while not self._closing:
                self._iterate()
            self._do_posted()
            self._settle()  # farewells go as far as they go at once
        except BaseException as error:  # a mistake of ours must not leave others waiting
            logger.exception("%s ended", self._thread.name)
            self._break(error)
        finally:
            self._close_all()
            self._selector.close()
            with self._ringing:
                self._closed = True
                self._bell.close()
                self._rung.close()
                while not self._in_spite(self._refuse_late):  # one thread at a time
                    pass

    def _break(self, error: BaseException) -> None:
        """Tell everyone who may wait for this thread, whatever else is wrong."""
        failure = TrainingError(
            f"the driver's thread {self._thread.name} ended with {error!r}, which is a mistake of "
            "sparkdl's; the driver's log has its traceback"
        )
        self.failure = failure
        for call in (self.broke, *self._on_break):
            self._in_spite(lambda call=call: call(failure))  # type: ignore[misc]
        for channel in list(self._leaving):  # farewells go as far as they go at once
            with contextlib.suppress(Exception):
                channel.flush()

    def _close_all(self) -> None:
        for channel in list(self._peers):
            self._in_spite(lambda channel=channel: self.close_channel(channel))  # type: ignore[misc]

    def _in_spite(self, call: Callable[[], None]) -> bool:
        """Call at the thread's end, of which a mistake must not keep the rest; whether it went."""
        try:
            call()
        except Exception:
            logger.exception("%s: another mistake at its end", self._thread.name)
            return False
        return True

    def _iterate(self) -> None:
        """One iteration of the event loop."""
        timeout_s = 0.0 if self._touched else max(0.0, self._tick_at - time.monotonic())
        for key, mask in self._selector.select(timeout_s):
            if key.data is None:
                self._rung.recv(1 << 12)
            else:
                self._serve(key.data, mask)
        self._do_posted()
        self._settle()
        # Only when the sockets have been looked at.
        if (now := time.monotonic()) >= self._tick_at:
            self._tick_at = now + self.tick()
            for channel in [each for each, until in self._leaving.items() if now >= until]:
                self.close_channel(channel)
            self._settle()

    def _serve(self, channel: Channel, mask: int) -> None:
        if mask & selectors.EVENT_READ and channel in self._peers:
            self.guard(channel, channel.receive)
            self._receive(channel)
        self._touched.add(channel)  # what can be sent now is sent there

    def _settle(self) -> None:
        self.follow_up()
        self._attend()
        while self.follow_up():
            self._attend()

    def _attend(self) -> None:
        """Go on with channels on which something may be done."""
        touched, self._touched = self._touched, set()
        for channel in touched:
            if channel not in self._peers:
                continue
            if channel.sends and self.guard(channel, channel.flush):
                self._receive(channel)
            if channel.has_left:
                self.guard(channel, channel.receive)
            self._register(channel)

    def _touch(self, channel: Channel) -> None:
        self._touched.add(channel)

    def _receive(self, channel: Channel) -> None:
        peer = self._peers.get(channel)
        if peer is not None:
            peer.note_heartbeat()

    def _register(self, channel: Channel) -> None:
        mask = selectors.EVENT_READ if channel.listens else 0
        mask |= selectors.EVENT_WRITE if channel.sends else 0
        before = self._registered.get(channel, 0)
        if mask == before or channel not in self._peers:
            return
        if not before:
            self._selector.register(channel.stream, mask, channel)
        elif not mask:
            self._selector.unregister(channel.stream)
        else:
            self._selector.modify(channel.stream, mask, channel)
        self._registered[channel] = mask
