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
from urllib.parse import urlsplit

from sparkdl.errors import DisconnectedError, StoppedError
from sparkdl.transport import local, sockets
from sparkdl.transport.connection import (
    Connection,
    ConnectionLostError,
    NotAnAveragerError,
    SilenceError,
    WrongTokenError,
)


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where a service in the driver is and what opens it; travels to the workers with the task."""

    uri: str
    """``tcp://host:port``"""
    token: str = field(repr=False)
    fingerprint: str | None = None
    """Fingerprint of the certificate that it has to show; None if connections are not encrypted."""

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The parts of ``uri``."""
        parts = urlsplit(self.uri)
        return parts.hostname or "", parts.port or 0


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


def introduced(
    rank: int,
    name: str,
    address: tuple[str, int],
    token: str,
    fingerprint: str | None,
    silence_s: float | None,
) -> Connection:
    """Connect a worker to one of the driver's ports, once, and let both ends prove who they are.

    Args:
        rank: the worker's rank, for messages.
        name: who listens there, for messages.
        address: the port's host and number.
        token: the job's secret.
        fingerprint: of the certificate that the port has to show; None for no encryption.
        silence_s: the longest that one message may make no progress, in seconds; None for no limit.

    Returns:
        The proved connection.

    Raises:
        DisconnectedError: the port cannot be reached.
        StoppedError: it belongs to another job.
    """
    timeout_s = CONNECT_S if silence_s is None else min(CONNECT_S, silence_s)
    try:
        return dial(address, token, fingerprint, timeout_s, silence_s)
    except WrongTokenError as error:
        raise StoppedError(
            f"rank {rank} and {name} do not have the same token: it belongs to another job"
        ) from error
    except (OSError, ConnectionLostError, SilenceError) as error:
        raise DisconnectedError(f"rank {rank} cannot reach {name}: {error}") from error


def dial(
    address: tuple[str, int],
    token: str,
    fingerprint: str | None,
    timeout_s: float,
    silence_s: float | None,
) -> Connection:
    """Connect to a port of ours, over a local socket if it is on this machine and has one.

    Args:
        address: the host as advertised by the port's owner, and the port's number.
        token: the job's secret, which both ends prove that they know.
        fingerprint: of the certificate that it has to show; None for a port without encryption.
        timeout_s: seconds in which the port has to be reached.
        silence_s: the longest that one message may make no progress, in seconds; None for no limit.

    Raises:
        OSError: nobody can be reached there, or the certificate is another one.
        ConnectionLostError: the connection broke; WrongTokenError if the other end does not have
            the token.
        SilenceError: the other end did not prove itself in time.
    """
    if fingerprint is None and (found := local.connect(address, token, timeout_s)) is not None:
        try:
            return _proved(found, token, silence_s)
        except (ConnectionLostError, SilenceError) as error:
            logger.info("%s:%d is reached over TCP instead of locally: %s", *address, error)
    return _proved(sockets.connect(address, fingerprint, timeout_s), token, silence_s)


def _proved(
    connected: socket.socket | sockets.Encrypted, token: str, silence_s: float | None
) -> Connection:
    connection = Connection(connected, silence_s)
    try:
        if not connection.introduce(token):
            raise WrongTokenError("the other end does not have the job's token")
    except BaseException:
        connection.close()
        raise
    return connection


def reach(attempt: Callable[[], T], patience_s: float) -> T:
    """Connect, retrying as long as whatever prevents it may pass.

    A refused connection will not pass: the driver opens its port before it starts a worker, so the
    port is closed for good. Nor will a port that belongs to somebody else.

    Args:
        attempt: connects once; what went wrong is the cause of the errors it raises.
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
            if not _may_pass(error.__cause__) or time.monotonic() >= until:
                raise
            if not has_warned:
                logger.warning("%s; retrying for %.0f s", error, patience_s)
                has_warned = True
            time.sleep(RETRY_S)


def _may_pass(cause: BaseException | None) -> bool:
    if isinstance(cause, NotAnAveragerError):
        return False
    if isinstance(cause, ConnectionLostError | SilenceError | TimeoutError | ssl.SSLEOFError):
        return True
    if isinstance(cause, socket.gaierror):
        return cause.errno == socket.EAI_AGAIN
    return isinstance(cause, OSError) and cause.errno in _AWAY
