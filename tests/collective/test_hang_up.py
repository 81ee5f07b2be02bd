"""A process that hangs up ends its connections, but for those that are still needed."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

HANGS_UP = """
import socket, sys
from sparkdl.collective.network import hang_up
kept, ended = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
listener, (mine, other) = socket.create_server(("127.0.0.1", 0)), socket.socketpair()
hang_up({kept.getpeername()[1]})
kept.sendall(b"kept")
mine.sendall(b"local")
assert other.recv(9) == b"local"
socket.create_connection(listener.getsockname()).close()
sys.stdin.read()
"""


@pytest.mark.timeout(600)
def test_the_connections_to_other_ports_are_at_their_end_and_only_those() -> None:
    here = ("127.0.0.1", 0)
    with socket.create_server(here) as first, socket.create_server(here) as second:
        ports = [str(each.getsockname()[1]) for each in (first, second)]
        child = subprocess.Popen([sys.executable, "-c", HANGS_UP, *ports], stdin=subprocess.PIPE)
        with first.accept()[0] as kept, second.accept()[0] as ended:
            assert kept.recv(9) == b"kept"
            assert ended.recv(9) == b""
        assert child.poll() is None
        child.communicate(timeout=300)
        assert child.returncode == 0
