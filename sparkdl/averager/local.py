"""The shorter way between two processes of one machine: the kernel's own sockets in place of TCP.

Bytes over TCP cost about twice the processor time, also when they never leave the machine. So every
port listens under a local name too, and who connects tries that first. The name is derived from the
port's address and the job's token: whoever knows it has been let in on both, and on another machine
it does not exist. It is an abstract one, so that no file can stay behind; containers see it exactly
if they share the network, as with a port. Ports that encrypt have none, and only Linux has them:
TCP is always there.
"""

from __future__ import annotations

import hmac
import socket
import sys

from sparkdl.averager import tls
from sparkdl.averager.tls import Encrypted

HAS_LOCAL_NAMES = sys.platform == "linux"


def listen_locally(host: str, port: int, token: str, backlog: int) -> socket.socket:
    """Listen for processes of this machine that would connect to ``host:port``.

    Args:
        host: as the others know it.
        port: of the TCP port beside it.
        token: the job's secret.
        backlog: connections that may wait to be accepted.

    Returns:
        The listening socket.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_name(host, port, token))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(
    address: tuple[str, int], token: str, fingerprint: str | None, timeout_s: float
) -> socket.socket | Encrypted:
    """Connect to a port of ours, by the shorter way if it is on this machine.

    Args:
        address: the host as the port's owner has advertised it, and the port's number.
        token: the job's secret.
        fingerprint: of the certificate that it has to show; None for a port without encryption.
        timeout_s: seconds to wait for each answer.

    Raises:
        OSError: nobody can be reached there, or it is somebody else.
    """
    if HAS_LOCAL_NAMES and fingerprint is None:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(timeout_s)  # with it, a queue that is full is an error
        try:
            connected.connect(_name(*address, token))
            return connected
        except OSError:  # on another machine, or too many wait: TCP has the last word
            connected.close()
    return tls.connect(address, fingerprint, timeout_s)


def _name(host: str, port: int, token: str) -> bytes:
    digest = hmac.digest(token.encode(), f"{host.lower()}:{port}".encode(), "sha256")
    return b"\0sparkdl-" + digest.hex().encode()
