"""The end of a process's connections before the end of the process."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection

_DESCRIPTORS = "/dev/fd"


def hang_up(keep: Collection[int]) -> None:
    """Send nothing more over any TCP connection of this process, so that its peers learn that.

    A process group ends its connections when nothing holds it any more, and that may be never: a
    module of the user's may, or a cycle of objects. Those who still exchange would wait for torch's
    30 minutes. What was sent before still arrives, also where a peer goes on sending, which a
    connection that is closed answers by a reset.

    Args:
        keep: ports, at either end, of the connections that are still needed.
    """
    for descriptor in map(int, os.listdir(_DESCRIPTORS)):
        # What is no socket, only listens, or is closed by now.
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
