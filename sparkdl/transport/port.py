"""Ports that let in whoever knows the job's token.

The driver has one per fit or run, whose service handles all connections in one thread
(``service.py``). A worker has one that others fetch rows from, or visit: it serves each connection
in its own thread, which may wait for the training and for the disk.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from sparkdl.transport import local
from sparkdl.transport.acceptor import BACKLOG, Acceptor, Admit
from sparkdl.transport.connection import Connection, ConnectionLostError, SilenceError
from sparkdl.transport.tls import Certificate, Encrypted

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Seconds for which a closing port waits for the threads that serve connections."""


class Listener:
    """Listen on a free port until closed, and hand over connections that have proved themselves.

    Args:
        host: the interface to bind to, as an address or name of this machine.
        token: the job's secret.
        admit: called with each connection that has proved itself, see ``Acceptor``.
        advertised_host: the name under which others know it; ``host`` by default.
        encrypted: whether connections are encrypted, with the port's own certificate.
        now: see ``Acceptor``.

    Raises:
        ConfigError: encryption was asked for, and the package that it needs is missing.

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
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        certificate = Certificate() if encrypted else None
        self.fingerprint = None if certificate is None else certificate.fingerprint
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listeners = [socket.create_server(address[:2], family=family, backlog=BACKLOG)]
        self.number: int = listeners[0].getsockname()[1]
        known_as = advertised_host or host
        if not encrypted and (beside := local.listen(known_as, self.number, token, BACKLOG)):
            listeners.append(beside)
        self._acceptor = Acceptor(listeners, token, admit, certificate, now)

    def close(self) -> None:
        """Stop listening, and end every connection that has not proved itself."""
        self._acceptor.close()


class Port:
    """Listen on a free port until closed, and serve each connection in a thread of its own.

    Args:
        host: the interface to bind to, as an address or name of this machine.
        token: the job's secret.
        serve: called with each connection that has proved itself; it is closed afterwards.
        advertised_host: the name under which others know it; ``host`` by default.
        encrypted: whether connections are encrypted, with the port's own certificate.
        now: see ``Acceptor``.

    Raises:
        ConfigError: encryption was asked for, and the package that it needs is missing.

    Attributes:
        number: the port's number.
        fingerprint: of the certificate; None for no encryption.
    """

    def __init__(
        self,
        host: str,
        token: str,
        serve: Callable[[Connection], None],
        *,
        advertised_host: str | None = None,
        encrypted: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, Connection] = {}
        self._listener = Listener(
            host,
            token,
            self._admit,
            advertised_host=advertised_host,
            encrypted=encrypted,
            now=now,
        )
        self.number = self._listener.number
        self.fingerprint = self._listener.fingerprint

    def close(self) -> None:
        """Stop listening, end every connection and wait for the threads."""
        self._listener.close()
        with self._lock:
            remaining = dict(self._open)
        for connection in remaining.values():
            connection.interrupt()
        until = time.monotonic() + CLOSE_S
        for thread in remaining:
            thread.join(max(0.0, until - time.monotonic()))
        if left := [thread.name for thread in remaining if thread.is_alive()]:
            logger.warning("%d connections did not end within %.0f s", len(left), CLOSE_S)

    def _admit(self, connected: socket.socket | Encrypted, proof: bytes) -> None:
        connection = Connection(connected, silence_s=None)
        thread = threading.Thread(
            target=self._run, args=(connection, proof), name="sparkdl-port-connection", daemon=True
        )
        with self._lock:
            thread.start()
            self._open[thread] = connection

    def _run(self, connection: Connection, proof: bytes) -> None:
        try:
            connection.welcome(proof)
            self._serve(connection)
        except (ConnectionLostError, SilenceError) as error:
            logger.debug("a connection ended: %s", error)
        finally:
            connection.close()
            with self._lock:
                del self._open[threading.current_thread()]
