"""A worker's port, from which others fetch rows and through which they visit it.

Each connection is served in its own thread, which may wait for the training and for the disk. The
driver's port is another: its service handles all connections in one thread (``service.py``).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from typing_extensions import Unpack

from sparkdl.errors import DeadlineError, DisconnectedError
from sparkdl.transport.acceptor import Acceptor, Listening
from sparkdl.transport.connection import Connection
from sparkdl.transport.sockets import Encrypted

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Seconds for which a closing port waits for the threads that serve connections."""


class Port:
    """Listen on a free port until closed, and serve each connection in a thread of its own.

    Args:
        host: the interface to bind to, as an address or name of this machine.
        token: the job's secret.
        serve: called with each connection that has authenticated; it is closed afterwards.
        listening: see ``Acceptor``.

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
        **listening: Unpack[Listening],
    ) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, Connection] = {}
        self._acceptor = Acceptor(host, token, self._admit, **listening)
        self.number = self._acceptor.number
        self.fingerprint = self._acceptor.fingerprint

    def close(self) -> None:
        """Stop listening, end every connection and wait for the threads."""
        self._acceptor.close()
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
        except (DisconnectedError, DeadlineError) as error:
            logger.debug("a connection ended: %s", error)
        finally:
            connection.close()
            with self._lock:
                del self._open[threading.current_thread()]
