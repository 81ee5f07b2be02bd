"""A port that lets in who knows the job's token, each in a thread of its own.

The averager has one, and so has whoever else is connected to: the driver that gathers the workers'
output, a worker that others send rows to.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from sparkdl.averager.connection import Connection, ConnectionLostError, SilenceError
from sparkdl.averager.local import HAS_LOCAL_NAMES, listen_locally
from sparkdl.averager.tls import Certificate, Encrypted

logger = logging.getLogger(__name__)

MAX_STRANGERS = 256
"""Connections at once whose other end has not yet proved that it knows the token."""
CLOSE_S = 10.0
"""Seconds to wait, when the port closes, for the threads that serve connections."""


class Port:
    """Listen on a free port until closed.

    Args:
        host: interface to bind to, an address or name of this machine.
        token: the job's secret.
        serve: called with each connection that has proved itself; it is closed afterwards.
        advertised_host: the name under which others know it; ``host`` by default.
        encrypted: whether connections are, by a certificate of the port's own.

    Raises:
        ConfigError: they are to be encrypted, and the package for that is missing.

    Attributes:
        number: of the port.
        fingerprint: of the certificate; None without encryption.
    """

    def __init__(
        self,
        host: str,
        token: str,
        serve: Callable[[Connection], None],
        *,
        advertised_host: str | None = None,
        encrypted: bool = False,
    ) -> None:
        self._certificate = Certificate() if encrypted else None
        self.fingerprint = None if self._certificate is None else self._certificate.fingerprint
        self._token = token
        self._serve = serve
        self._closed = False
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._open: dict[threading.Thread, Connection] = {}
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=MAX_STRANGERS)
        self.number: int = listener.getsockname()[1]
        self._listeners = [listener]
        if HAS_LOCAL_NAMES and not encrypted:
            known_as = advertised_host or host
            self._listeners.append(listen_locally(known_as, self.number, token, MAX_STRANGERS))
        self._threads = [
            threading.Thread(target=self._listen, args=(each,), name="sparkdl-port", daemon=True)
            for each in self._listeners
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop listening, end every connection and wait for the threads."""
        with self._lock:
            self._closed = True
            remaining = dict(self._open)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                # Wakes the thread that accepts; closing alone would not, except where this fails.
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for connection in remaining.values():
            connection.interrupt()
        for thread in remaining:
            thread.join(max(0.0, until - time.monotonic()))
        if left := [thread.name for thread in remaining if thread.is_alive()]:
            logger.warning("%d connections did not end in %.0f s", len(left), CLOSE_S)

    def _listen(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connected, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                # Out of file descriptors, or a client that has gone: the next may do better.
                logger.warning("a connection could not be accepted: %s", error)
                time.sleep(0.1)
                continue
            if not self._strangers.acquire(blocking=False):
                connected.close()
                continue
            try:
                connection = Connection(self._encrypt(connected), silence_s=None)
            except OSError as error:  # it has gone already
                logger.debug("a connection ended before it could be encrypted: %s", error)
                self._strangers.release()
                continue
            self._start(connection)

    def _encrypt(self, connected: socket.socket) -> socket.socket | Encrypted:
        return connected if self._certificate is None else self._certificate.accept(connected)

    def _start(self, connection: Connection) -> None:
        thread = threading.Thread(
            target=self._admit, args=(connection,), name="sparkdl-port-connection", daemon=True
        )
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._open[thread] = connection
        thread.start()

    def _admit(self, connection: Connection) -> None:
        try:
            try:
                known = connection.accept(self._token)
            finally:
                self._strangers.release()
            if known:
                self._serve(connection)
        except (ConnectionLostError, SilenceError) as error:
            logger.debug("a connection ended before it had proved itself: %s", error)
        finally:
            connection.close()
            with self._lock:
                del self._open[threading.current_thread()]
