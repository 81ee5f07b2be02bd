"""Where a port of the driver is, and reaching it even if the network is down for a while."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from sparkdl.errors import DisconnectedError, StoppedError
from sparkdl.transport import local, sockets
from sparkdl.transport.connection import Connection, Takes

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_S = 10.0
"""Seconds that one attempt may take: the kernel would go on waiting after the network is back."""
RETRY_S = 0.25
_AWAY = {
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
    errno.ECONNABORTED,
    errno.ECONNRESET,
    errno.EPIPE,
}


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where a port of ours is and what opens it; travels to the workers with the task."""

    host: str
    """As advertised by the port's owner."""
    port: int
    token: str = field(repr=False)
    """The job's secret, which both ends prove that they know."""
    fingerprint: str | None = None
    """Fingerprint of the certificate that it has to show; None if connections are not encrypted."""

    @property
    def uri(self) -> str:
        """The address as ``tcp://host:port``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The parts of ``uri``."""
        return self.host, self.port

    def connect(
        self, rank: int, name: str, silence_s: float | None, takes: Takes = lambda _: True
    ) -> Connection:
        """Connect a worker to it, once, and let both ends prove who they are.

        It uses a local socket if the port is on this machine and has one.

        Args:
            rank: the worker's rank, for messages.
            name: who listens there, for messages.
            silence_s: the longest that one message may make no progress, in seconds; None for no
                limit.
            takes: as for a ``Connection``.

        Raises:
            DisconnectedError: the port cannot be reached.
            StoppedError: it belongs to another job.
        """
        timeout_s = CONNECT_S if silence_s is None else min(CONNECT_S, silence_s)
        address = self.host_and_port

        def proved(connected: socket.socket | sockets.Encrypted) -> Connection:
            connection = Connection(connected, silence_s, (f"rank {rank}", name), takes)
            try:
                if connection.introduce(self.token):
                    return connection
                raise StoppedError(
                    f"rank {rank} and {name} do not have the same token: it belongs to another job"
                )
            except BaseException:
                connection.close()
                raise

        if (
            self.fingerprint is None
            and (found := local.connect(address, self.token, timeout_s)) is not None
        ):
            try:
                return proved(found)
            except StoppedError as error:
                logger.info("%s:%d is reached over TCP instead of locally: %s", *address, error)
        try:
            connected = sockets.connect(address, self.fingerprint, timeout_s)
        except OSError as error:
            raise DisconnectedError(
                f"rank {rank} cannot reach {name}: {error}", retry=_may_pass(error)
            ) from error
        return proved(connected)


def reach(attempt: Callable[[], T], patience_s: float) -> T:
    """Connect, retrying as long as whatever prevents it may pass.

    A refused connection will not pass: the driver opens its port before it starts a worker, so the
    port is closed for good. Nor will a port that belongs to somebody else.

    Args:
        attempt: connects once.
        patience_s: seconds to keep trying.

    Returns:
        What ``attempt`` returned.

    Raises:
        DisconnectedError: the last attempt's.
    """
    until = time.monotonic() + patience_s
    has_warned = False
    while True:
        try:
            return attempt()
        except DisconnectedError as error:
            if not error.retry or time.monotonic() >= until:
                raise
            if not has_warned:
                logger.warning("%s; retrying for %.0f s", error, patience_s)
                has_warned = True
            time.sleep(RETRY_S)


def _may_pass(error: OSError) -> bool:
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    return isinstance(error, TimeoutError | ssl.SSLEOFError) or error.errno in _AWAY
