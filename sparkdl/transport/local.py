"""The shorter way between two processes on one machine: Unix sockets in place of TCP.

Bytes over TCP cost about twice the processor time, even when they never leave the machine. So every
port also listens under a local name, which clients try first. The name is an abstract one, so no
file can be left behind. It is derived from the job's token, the port's address, and the kernel and
network namespace that the port is in: on another machine, or in a container with its own network,
nobody can know the name that is looked up there, although anyone with an account on this machine
can list the names on it. Both ends ask the kernel who the other is and accept their own user and
root. Encrypted ports have no local name, and only Linux has abstract names; TCP is always there.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import struct
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

HAS_LOCAL_NAMES = sys.platform == "linux"
_CREDENTIALS = struct.Struct("iII")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/thread-self/ns/net")


def listen(host: str, port: int, token: str, backlog: int) -> socket.socket | None:
    """Listen for processes on this machine that would connect to ``host:port``.

    Args:
        host: the host as the others know it.
        port: number of the TCP port beside it.
        token: the job's secret.
        backlog: connections that may wait to be accepted.

    Returns:
        The listening socket; None if there are no local names.
    """
    name = name_of(host, port, token)
    if name is None:
        return None
    try:
        with contextlib.ExitStack() as on_failure:
            listener = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(name)
            listener.listen(backlog)
            on_failure.pop_all()
            return listener
    except OSError as error:
        logger.info("port %d has no local socket beside it: %s", port, error)
        return None


def connect(address: tuple[str, int], token: str, timeout_s: float) -> socket.socket | None:
    """Connect to a port of ours if it is on this machine.

    Args:
        address: the host as advertised by the port's owner, and the port's number.
        token: the job's secret.
        timeout_s: seconds to wait for each answer.

    Returns:
        The socket; None if the port is on another machine, too many are waiting at it, or another
        user listens under its name: TCP then decides.
    """
    name = name_of(*address, token)
    if name is None:
        return None
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(timeout_s)  # with a timeout, a full queue is an error
    try:
        connected.connect(name)
        if is_trusted(connected):
            return connected
    except OSError:
        pass
    connected.close()
    return None


def is_trusted(connected: socket.socket) -> bool:
    """Whether the other end of a local connection belongs to this process's user, or to root."""
    size = _CREDENTIALS.size
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in (0, os.geteuid())


def name_of(host: str, port: int, token: str) -> bytes | None:
    """The local name of a port; None where the kernel does not identify itself."""
    if not HAS_LOCAL_NAMES:
        return None
    try:
        boot, network = _BOOT.read_text().strip(), _NETWORK.stat()
    except OSError:  # there is no /proc, or only part of it
        return None
    place = f"{host.lower()}:{port} {boot} {network.st_dev}:{network.st_ino}"
    digest = hmac.digest(token.encode(), place.encode(), "sha256")
    return b"\0sparkdl-" + digest.hex().encode()
