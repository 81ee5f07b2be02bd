"""Reaching a port of the driver's although the network is away for a while."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import TypeVar

from sparkdl.averager.connection import ConnectionLostError
from sparkdl.errors import DisconnectedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_S = 10.0
"""Seconds that one attempt may take; the kernel's own would still sleep when the network is back."""
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


def reach(connect: Callable[[], T], patience_s: float) -> T:
    """Connect, again and again as long as what stands in the way may pass.

    A port that refuses will not: the driver opens it before it starts a worker, so it is closed
    for good. Neither will one that shows the wrong certificate.

    Args:
        connect: one attempt; its errors have what went wrong as their cause.
        patience_s: seconds for which to go on trying.

    Returns:
        What ``connect`` returned.

    Raises:
        DisconnectedError: from the last attempt.
    """
    until = time.monotonic() + patience_s
    told = False
    while True:
        try:
            return connect()
        except DisconnectedError as error:
            if not _may_pass(error.__cause__) or time.monotonic() >= until:
                raise
            if not told:
                logger.warning("%s; trying again for %.0f s", error, patience_s)
                told = True
            time.sleep(RETRY_S)


def _may_pass(cause: BaseException | None) -> bool:
    if isinstance(cause, ConnectionLostError | TimeoutError | ssl.SSLEOFError):
        return True
    if isinstance(cause, socket.gaierror):
        return cause.errno == socket.EAI_AGAIN
    return isinstance(cause, OSError) and cause.errno in _AWAY
