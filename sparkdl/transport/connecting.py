"""Reaching a port of the driver's although the network is away for a while."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import TypeVar

from sparkdl.errors import DisconnectedError, StoppedError
from sparkdl.transport import local, tls
from sparkdl.transport.connection import (
    Connection,
    ConnectionLostError,
    SilenceError,
    StrangerError,
    UnprovedError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_S = 10.0
"""Seconds that one attempt may take: the kernel's would still wait when the network is back."""
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
    """Connect a worker to a port of the driver's, once, and let both prove who they are.

    Args:
        rank: the worker's, for messages.
        name: of who listens there, for messages.
        address: the port's host and number.
        token: the job's secret.
        fingerprint: of the certificate that the port has to show; None without encryption.
        silence_s: the longest that one message may make no progress, in seconds; None for no limit.

    Returns:
        The proved connection.

    Raises:
        DisconnectedError: the port cannot be reached.
        StoppedError: it is another job's.
    """
    timeout_s = CONNECT_S if silence_s is None else min(CONNECT_S, silence_s)
    try:
        return dial(address, token, fingerprint, timeout_s, silence_s)
    except UnprovedError as error:
        raise StoppedError(
            f"rank {rank} and {name} do not have the same token: it is another job's"
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
    """Connect to a port of ours, by the shorter way if it is on this machine and that is open.

    Args:
        address: the host as the port's owner has advertised it, and the port's number.
        token: the job's secret, which both ends prove to know.
        fingerprint: of the certificate that it has to show; None for a port without encryption.
        timeout_s: seconds to wait until it is reached.
        silence_s: the longest that one message may make no progress, in seconds; None for no limit.

    Raises:
        OSError: nobody can be reached there, or it has another certificate.
        ConnectionLostError: it broke; UnprovedError if that end does not have the token.
        SilenceError: that end did not prove itself in time.
    """
    if fingerprint is None and (found := local.connect(address, token, timeout_s)) is not None:
        try:
            return _proved(found, token, silence_s)
        except (ConnectionLostError, SilenceError) as error:
            logger.info("%s:%d is reached by TCP, for locally: %s", *address, error)
    return _proved(tls.connect(address, fingerprint, timeout_s), token, silence_s)


def _proved(
    connected: socket.socket | tls.Encrypted, token: str, silence_s: float | None
) -> Connection:
    connection = Connection(connected, silence_s)
    try:
        if not connection.introduce(token):
            raise UnprovedError("whoever answers there does not have the job's token")
    except BaseException:
        connection.close()
        raise
    return connection


def reach(attempt: Callable[[], T], patience_s: float) -> T:
    """Connect, again and again as long as what stands in the way may pass.

    A port that refuses will not: the driver opens it before it starts a worker, so it is closed
    for good. Neither will one that is somebody else's.

    Args:
        attempt: to connect once; its errors have what went wrong as their cause.
        patience_s: seconds for which to go on trying.

    Returns:
        What ``attempt`` returned.

    Raises:
        DisconnectedError: from the last attempt.
    """
    until = time.monotonic() + patience_s
    told = False
    while True:
        try:
            return attempt()
        except DisconnectedError as error:
            if not _may_pass(error.__cause__) or time.monotonic() >= until:
                raise
            if not told:
                logger.warning("%s; trying again for %.0f s", error, patience_s)
                told = True
            time.sleep(RETRY_S)


def _may_pass(cause: BaseException | None) -> bool:
    if isinstance(cause, StrangerError):
        return False
    if isinstance(cause, ConnectionLostError | SilenceError | TimeoutError | ssl.SSLEOFError):
        return True
    if isinstance(cause, socket.gaierror):
        return cause.errno == socket.EAI_AGAIN
    return isinstance(cause, OSError) and cause.errno in _AWAY
