"""The way in: whoever connects has to prove itself first; one thread handles all of them.

It knows nothing of what follows: a connection whose other end has proved that it knows the job's
token is handed over. The thread never waits for any one of them, and runs until it is closed.
However many strangers there are, and however they behave, they cost little: a listener lets in at
most ``STRANGERS_PER_S`` that prove nothing; the rest wait in the kernel's queue.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.transport import local
from sparkdl.transport.handshake import REFUSAL, TLS, Challenge, channel_of
from sparkdl.transport.strangers import Allowance, Stranger, Strangers, source_of
from sparkdl.transport.tls import Certificate, Encrypted

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Seconds that a stranger has in total, from being accepted to having proved itself."""
MAX_STRANGERS = 512
"""The most connections at once whose other ends have not yet proved that they know the token."""
STRANGERS_PER_S = 400.0
"""The most strangers that a listener accepts per second when they keep coming and prove nothing.
That takes a twenty-fifth of a core, and with a thousand of them nobody waits as long as 1.3 s."""
BACKLOG = 4_096
"""Connections that may wait to be accepted, if the kernel's own limit is not lower."""
_BATCH = 16
_REST_S = 0.02
_TROUBLE_S = 0.1
_CLOSE_S = 10.0
_EXHAUSTED = {errno.EMFILE, errno.ENFILE}

Admit = Callable[[socket.socket | Encrypted, bytes], None]


@dataclass(frozen=True)
class _Door:
    """A listener, how many more it lets in, and what all who come through it have in common."""

    listener: socket.socket
    allowance: Allowance
    family: int
    channel: bytes


class Acceptor:
    """Accept connections, and hand over those whose other end knows the token, until closed.

    Args:
        listeners: sockets that already listen; owned from here on.
        token: the job's secret.
        admit: called with each connection that has proved itself, which it then owns, and with the
            proof that has to be sent on it before anything else. It must not block. If it raises,
            the connection is closed, and the other end may try again.
        certificate: encrypts the connections; None for no encryption.
        now: reads the time, in seconds, by which a stranger has too long.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: str,
        admit: Admit,
        certificate: Certificate | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = token
        self._admit = admit
        self._certificate = certificate
        self._now = now
        self._closed = False
        self._strangers = Strangers()
        with contextlib.ExitStack() as on_failure:
            for listener in listeners:
                on_failure.callback(listener.close)
            self._selector = on_failure.enter_context(selectors.DefaultSelector())
            self._waker, woken = (on_failure.enter_context(end) for end in socket.socketpair())
            self._selector.register(woken, selectors.EVENT_READ)
            for listener in listeners:
                listener.setblocking(False)
                allowance = Allowance(MAX_STRANGERS, STRANGERS_PER_S, now)
                channel = TLS if certificate is not None else channel_of(listener)
                door = _Door(listener, allowance, listener.family, channel)
                self._selector.register(listener, selectors.EVENT_READ, door)
            self._thread = threading.Thread(target=self._run, name="sparkdl-port", daemon=True)
            self._thread.start()
            self._resources = on_failure.pop_all()

    def close(self) -> None:
        """Stop listening, and end every connection that has not proved itself."""
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
                if self._pass():  # each pass has a cost: let more of them gather first
                    time.sleep(_REST_S)
            except Exception:  # a bug of ours, or no memory: nobody else would let others in
                logger.exception("a port continues after an error")
                time.sleep(_TROUBLE_S)
        while (stranger := self._strangers.oldest) is not None:
            self._dismiss(stranger)

    def _pass(self) -> bool:
        """Do what can be done now; returns whether more are coming than are let in."""
        oldest = self._strangers.oldest
        left = None if oldest is None else max(0.0, oldest.until - self._now())
        ready = [key for key, _ in self._selector.select(left)]
        try:
            # Those that have answered go before newcomers, for which they make room.
            for key in ready:
                if isinstance(key.data, Stranger):
                    self._go_on(key.data)
        finally:
            self._dismiss_overdue()
        pressed = False
        for key in ready:
            if isinstance(key.data, _Door):
                pressed |= self._accept(key.data)
        return pressed

    def _dismiss_overdue(self) -> None:
        now = self._now()
        while (oldest := self._strangers.oldest) is not None and oldest.until <= now:
            self._dismiss(oldest)

    def _accept(self, door: _Door) -> bool:
        """Let in some of those waiting; returns whether they come faster than is allowed."""
        for _ in range(_BATCH):
            if not door.allowance.take():
                return True
            try:
                connected, address = door.listener.accept()
            except BlockingIOError:
                door.allowance.give_back()
                return False
            except OSError as error:
                logger.warning("a connection could not be accepted: %s", error)
                if error.errno in _EXHAUSTED and self._strangers:
                    self._dismiss(self._strangers.superfluous)
                door.allowance.suspend(_TROUBLE_S)
                return True
            self._let_in(connected, address, door)
        return False

    def _let_in(self, connected: socket.socket, address: Any, door: _Door) -> None:
        if door.family == socket.AF_UNIX and not local.is_trusted(connected):
            connected.close()
            return
        connected.setblocking(False)
        try:
            end = connected if self._certificate is None else self._certificate.wrap(connected)
        except OSError as error:
            logger.debug("a connection ended before it could be encrypted: %s", error)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._dismiss(self._strangers.superfluous)
        stranger = Stranger(
            end,
            source_of(door.family, address),
            Challenge(self._token, door.channel),
            self._now() + HANDSHAKE_S,
            door.allowance,
        )
        self._selector.register(end, selectors.EVENT_READ, stranger)
        self._strangers.add(stranger)
        self._go_on(stranger)

    def _go_on(self, stranger: Stranger) -> None:
        try:
            event = stranger.advance()
        except OSError as error:
            logger.debug("a connection ended before it authenticated: %s", error)
            self._dismiss(stranger)
            return
        if event:
            self._selector.modify(stranger.socket, event, stranger)
            return
        proof = stranger.challenge.reply(stranger.answer)
        if proof is None:
            with contextlib.suppress(OSError):  # it has gone
                stranger.socket.send(REFUSAL)
            self._dismiss(stranger)
            return
        self._forget(stranger)
        stranger.allowance.give_back()
        end = stranger.socket
        try:
            self._admit(Encrypted(end) if isinstance(end, ssl.SSLSocket) else end, proof)
        except Exception as error:  # no memory for a thread, say, which the next one may find
            logger.warning("an accepted connection could not be served: %s", error)
            end.close()

    def _dismiss(self, stranger: Stranger) -> None:
        self._forget(stranger)
        stranger.socket.close()

    def _forget(self, stranger: Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.socket)
