"""The way in: whoever connects has to authenticate first; one thread handles all of them.

It knows nothing of what follows: a connection whose other end has proved that it knows the job's
token is handed over. The thread never waits for any one of them, and runs until it is closed.
However many unauthenticated connections there are, and however they behave, they cost little: their
number is limited, and so is the time that each has, and at most ``UNAUTHENTICATED_PER_S`` are
accepted that prove nothing; the rest wait in the kernel's backlog. Whoever is slow on purpose hurts
only his own connections: where there is one too many, the oldest of the source with the most goes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict

from sparkdl.transport import local
from sparkdl.transport.handshake import ANSWER_BYTES, REFUSAL, TLS, Challenge, channel_of
from sparkdl.transport.sockets import Certificate, Encrypted, listen

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Seconds that a connection has in total, from being accepted to having authenticated."""
MAX_UNAUTHENTICATED = 512
"""The most connections at once whose other ends have not yet proved that they know the token."""
UNAUTHENTICATED_PER_S = 400.0
"""The most that a listener accepts per second when they keep coming and prove nothing.
That takes a twenty-fifth of a core, and with a thousand of them nobody waits as long as 1.3 s."""
BACKLOG = 4_096
"""Connections that may wait to be accepted, if the kernel's own limit is not lower."""
_BATCH = 16
_REST_S = 0.02
_TROUBLE_S = 0.1
_CLOSE_S = 10.0
_EXHAUSTED = {errno.EMFILE, errno.ENFILE}
_IPV6_NETWORK_BYTES = 8

Admit = Callable[[socket.socket | Encrypted, bytes], None]


class Listening(TypedDict, total=False):
    """Settings of a port, by keyword; see ``Acceptor``."""

    advertised_host: str | None
    encrypted: bool
    ports: tuple[int, int] | None
    now: Callable[[], float]


class Acceptor:
    """Listen on a port until closed, and hand over connections that have authenticated.

    Args:
        host: the interface to bind to, as an address or name of this machine.
        token: the job's secret.
        admit: called with each connection that has authenticated, which it then owns, and with the
            proof that has to be sent on it before anything else. It must not block. If it raises,
            the connection is closed, and the other end may try again.
        advertised_host: the name under which others know it; ``host`` by default.
        encrypted: whether connections are encrypted, with the port's own certificate.
        ports: first and last port to try; None for any free one.
        now: reads the time, in seconds, by which an unauthenticated connection has too long.

    Raises:
        ConfigError: encryption was asked for, and the package that it needs is missing; or all
            ``ports`` are taken.

    Attributes:
        number: the port's number.
        fingerprint: of the certificate; None for no encryption.
    """

    def __init__(
        self,
        host: str,
        token: str,
        admit: Admit,
        *,
        advertised_host: str | None = None,
        encrypted: bool = False,
        ports: tuple[int, int] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = token
        self._admit = admit
        self._certificate = Certificate() if encrypted else None
        self.fingerprint = None if self._certificate is None else self._certificate.fingerprint
        self._now = now
        self._closed = False
        self._unauthenticated = UnauthenticatedConnections()
        with contextlib.ExitStack() as on_failure:
            listeners = [listen(host, ports, "spark.sparkdl.driver.port", BACKLOG)]
            on_failure.callback(_end_listening, listeners[0])
            self.number: int = listeners[0].getsockname()[1]
            known_as = advertised_host or host
            if not encrypted and (beside := local.listen(known_as, self.number, token, BACKLOG)):
                listeners.append(beside)
                on_failure.callback(_end_listening, beside)
            self._selector = on_failure.enter_context(selectors.DefaultSelector())
            self._waker, woken = (on_failure.enter_context(end) for end in socket.socketpair())
            self._selector.register(woken, selectors.EVENT_READ)
            for listener in listeners:
                listener.setblocking(False)
                rate = RateLimit(MAX_UNAUTHENTICATED, UNAUTHENTICATED_PER_S, now)
                channel = TLS if encrypted else channel_of(listener)
                key = _Listener(listener, rate, channel)
                self._selector.register(listener, selectors.EVENT_READ, key)
            self._thread = threading.Thread(target=self._run, name="sparkdl-port", daemon=True)
            self._thread.start()
            self._resources = on_failure.pop_all()

    def close(self) -> None:
        """Stop listening, and end every connection that has not authenticated."""
        if self._closed:
            return
        self._closed = True
        self._waker.send(b"\0")
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("a port did not close within %.0f s", _CLOSE_S)
            return
        self._resources.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                if self._iterate():  # each iteration has a cost: let more of them gather first
                    time.sleep(_REST_S)
            except Exception:  # a bug of ours, or no memory: nobody else would let others in
                logger.exception("a port continues after an error")
                time.sleep(_TROUBLE_S)
        while (connection := self._unauthenticated.oldest) is not None:
            self._evict(connection)

    def _iterate(self) -> bool:
        """Do what can be done now; returns whether more are coming than are let in."""
        oldest = self._unauthenticated.oldest
        left = None if oldest is None else max(0.0, oldest.until - self._now())
        ready = [key for key, _ in self._selector.select(left)]
        try:
            # Those that have answered go before newcomers, for which they make room.
            for key in ready:
                if isinstance(key.data, Unauthenticated):
                    self._advance(key.data)
        finally:
            self._evict_overdue()
        limited = False
        for key in ready:
            if isinstance(key.data, _Listener):
                limited |= self._accept(key.data)
        return limited

    def _evict_overdue(self) -> None:
        now = self._now()
        while (oldest := self._unauthenticated.oldest) is not None and oldest.until <= now:
            self._evict(oldest)

    def _accept(self, listener: _Listener) -> bool:
        """Accept some of those waiting; returns whether they come faster than is allowed."""
        for _ in range(_BATCH):
            if not listener.rate.take():
                return True
            try:
                connected, address = listener.socket.accept()
            except BlockingIOError:
                listener.rate.give_back()
                return False
            except OSError as error:
                logger.warning("a connection could not be accepted: %s", error)
                if error.errno in _EXHAUSTED and self._unauthenticated:
                    self._evict(self._unauthenticated.to_evict)
                listener.rate.suspend(_TROUBLE_S)
                return True
            self._challenge(connected, address, listener)
        return False

    def _challenge(self, connected: socket.socket, address: Any, listener: _Listener) -> None:
        if listener.socket.family == socket.AF_UNIX and not local.is_trusted(connected):
            connected.close()
            return
        connected.setblocking(False)
        try:
            end = connected if self._certificate is None else self._certificate.wrap(connected)
        except OSError as error:
            logger.debug("a connection ended before it could be encrypted: %s", error)
            return
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            self._evict(self._unauthenticated.to_evict)
        connection = Unauthenticated(
            end,
            source_of(listener.socket.family, address),
            Challenge(self._token, listener.channel),
            self._now() + HANDSHAKE_S,
            listener.rate,
        )
        self._selector.register(end, selectors.EVENT_READ, connection)
        self._unauthenticated.add(connection)
        self._advance(connection)

    def _advance(self, connection: Unauthenticated) -> None:
        try:
            event = connection.advance()
        except OSError as error:
            logger.debug("a connection ended before it authenticated: %s", error)
            self._evict(connection)
            return
        if event:
            self._selector.modify(connection.socket, event, connection)
            return
        proof = connection.challenge.reply(connection.answer)
        if proof is None:
            with contextlib.suppress(OSError):  # it has gone
                connection.socket.send(REFUSAL)
            self._evict(connection)
            return
        self._remove(connection)
        connection.rate.give_back()
        end = connection.socket
        try:
            self._admit(Encrypted(end) if isinstance(end, ssl.SSLSocket) else end, proof)
        except Exception as error:  # no memory for a thread, say, which the next one may find
            logger.warning("an accepted connection could not be served: %s", error)
            end.close()

    def _evict(self, connection: Unauthenticated) -> None:
        self._remove(connection)
        connection.socket.close()

    def _remove(self, connection: Unauthenticated) -> None:
        self._unauthenticated.remove(connection)
        self._selector.unregister(connection.socket)


def _end_listening(listener: socket.socket) -> None:
    """Close a socket, whose address is then free, even if a process forked meanwhile has it too."""
    with contextlib.suppress(OSError):  # not every system knows this of a listening socket
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@dataclass(frozen=True)
class _Listener:
    """A listening socket, its limit, and what all its connections have in common."""

    socket: socket.socket
    rate: RateLimit
    channel: bytes


class RateLimit:
    """A token bucket: ``at_once`` may come at once, refilled with ``per_s`` every second."""

    def __init__(
        self, at_once: int, per_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._at_once = at_once
        self._per_s = per_s
        self._left = float(at_once)
        self._now = now
        self._counted = now()

    def take(self) -> bool:
        """Count one that comes; returns whether it may come in."""
        now = self._now()
        self._left = min(self._left + (now - self._counted) * self._per_s, self._at_once)
        self._counted = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Give one back."""
        self._left += 1

    def suspend(self, seconds: float) -> None:
        """Let nobody come for this long."""
        self._left = -seconds * self._per_s


@dataclass(eq=False)
class Unauthenticated:
    """A connection that has not authenticated yet; nothing here waits.

    Attributes:
        socket: a non-blocking one, owned from here on.
        source: where it comes from, as returned by ``source_of``.
        challenge: what it has to answer.
        until: when it must have authenticated, on the port's clock.
        rate: the limit that it was counted against.
        answer: the bytes received so far, of ``ANSWER_BYTES``.
    """

    socket: socket.socket | ssl.SSLSocket
    source: bytes
    challenge: Challenge
    until: float
    rate: RateLimit
    answer: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        self._unsent = self.challenge.hello

    def advance(self) -> int:
        """Send and receive what is possible now.

        Returns:
            The event of ``selectors`` to wait for; 0 once the answer is there.

        Raises:
            OSError: the other end is gone, or does not speak TLS although it should.
        """
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            while missing := ANSWER_BYTES - len(self.answer):
                octets = self.socket.recv(missing)
                if not octets:
                    raise ConnectionResetError("the other end closed the connection")
                self.answer += octets
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        except BlockingIOError:
            return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ
        return 0


class UnauthenticatedConnections:
    """All of them at one port, in the order in which they came."""

    def __init__(self) -> None:
        self._all: dict[Unauthenticated, None] = {}
        self._by_source: dict[bytes, dict[Unauthenticated, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Unauthenticated) -> None:
        """Add the newest one, which has the most time left of all."""
        self._all[connection] = None
        self._by_source.setdefault(connection.source, {})[connection] = None

    def remove(self, connection: Unauthenticated) -> None:
        """Forget one that has left, or has authenticated."""
        del self._all[connection]
        of_source = self._by_source[connection.source]
        del of_source[connection]
        if not of_source:
            del self._by_source[connection.source]

    @property
    def oldest(self) -> Unauthenticated | None:
        """The one whose time runs out next."""
        return next(iter(self._all), None)

    @property
    def to_evict(self) -> Unauthenticated:
        """The oldest from the source that has the most; there has to be one."""
        most: dict[Unauthenticated, None] = max(self._by_source.values(), key=len)
        return next(iter(most))


def source_of(family: int, address: Any) -> bytes:
    """Those that share one source: an IPv4 address, an IPv6 network, or this machine.

    Args:
        family: the address's family.
        address: the address of a connection's other end, as returned by ``accept``.
    """
    if family == socket.AF_INET:
        return socket.inet_aton(address[0])
    if family == socket.AF_INET6:
        # Whoever has one IPv6 address has 2**64 of them.
        number = socket.inet_pton(socket.AF_INET6, address[0].partition("%")[0])
        return number[:_IPV6_NETWORK_BYTES]
    return b"local"
