"""Ending a process's connections before the process ends."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection

_DESCRIPTORS = "/dev/fd"


def hang_up(keep: Collection[int]) -> None:
    """Shut down sending on all of this process's TCP connections, so that its peers notice.

    A process group ends its connections once nothing holds it, and that may be never: a module of
    the user's or a reference cycle may hold it. The ranks still exchanging would wait for torch's
    30 minutes. What was already sent still arrives, even if a peer goes on sending, to which a
    closed connection would respond with a reset.

    Args:
        keep: the ports, at either end, of connections that are still needed.
    """
    for descriptor in map(int, os.listdir(_DESCRIPTORS)):
        # Not a socket, only listening, or closed by now.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    _hang_up(found, keep)


def _hang_up(connection: socket.socket, keep: Collection[int]) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    ports = {connection.getsockname()[1], connection.getpeername()[1]}
    if not ports & set(keep):
        connection.shutdown(socket.SHUT_WR)
