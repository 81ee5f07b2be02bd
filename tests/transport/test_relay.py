"""Another local user between a worker and the driver: what is relayed from host to host is refused.

A second host is a network namespace, in which local names are free that the first has taken.
"""

from __future__ import annotations

import ctypes
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from virtual_time import VirtualClock
from waiting import WAIT_S

from sparkdl.errors import DisconnectedError
from sparkdl.transport import local
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.transport.connection import Connection
from sparkdl.transport.port import Port

pytestmark = pytest.mark.skipif(
    not local.HAS_LOCAL_NAMES or os.geteuid() != 0,
    reason="only root may make a second network and be nobody, and only Linux has them",
)

HOST, TOKEN = "127.0.0.1", "the job's secret"
NOBODY = 65534
CLONE_NEWNET = 0x40000000

RELAY = """
import os, socket, sys, threading
os.setgroups([]); os.setgid(65534); os.setuid(65534)
name, side = bytes.fromhex(sys.argv[1]), sys.argv[2]
between = socket.socket(fileno=int(sys.argv[3]))
end = socket.socket(socket.AF_UNIX)
if side == "worker's":
    end.bind(name)
    end.listen()
    print("ready", flush=True)
    end, _ = end.accept()
else:
    end.connect(name)
    print("ready", flush=True)

def pass_on(source, sink):
    while octets := source.recv(4096):
        sink.sendall(octets.replace(b"1.0", b"666"))
    sink.shutdown(socket.SHUT_WR)

threading.Thread(target=pass_on, args=(end, between), daemon=True).start()
pass_on(between, end)
"""


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """A thread on another host: its network, and that of the processes it starts, is another."""

    def leave() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "this root may not make a network namespace")

    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(leave).result()
        except OSError as error:
            pytest.skip(str(error))
        yield thread


def name_of(port: Port) -> bytes:
    """The port's local name, which any user of the host may read."""
    name = local.name_of(HOST, port.number, TOKEN)
    assert f"@{name[1:].decode()}" in Path("/proc/net/unix").read_text()
    return name


@pytest.fixture
def until_done() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def relay(
    until_done: ExitStack, name: bytes, side: str, between: socket.socket
) -> subprocess.Popen[str]:
    """A process of ``nobody`` that passes on what it receives, and changes it."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", RELAY, name.hex(), side, str(between.fileno())],
        pass_fds=[between.fileno()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    until_done.callback(process.communicate)
    until_done.callback(process.kill)

    process.stdout.readline()
    return process


def test_a_user_of_two_hosts_cannot_stand_between_them(
    elsewhere: ThreadPoolExecutor, until_done: ExitStack
) -> None:
    told: queue.SimpleQueue[object] = queue.SimpleQueue()

    def serve(connection: Connection) -> None:
        told.put(connection.receive_header())
        connection.send_header({"center": "1.0"})

    port = until_done.enter_context(closing(Port(HOST, TOKEN, serve, now=VirtualClock())))
    here, there = map(until_done.enter_context, socket.socketpair())
    name = name_of(port)
    elsewhere.submit(relay, until_done, name, "worker's", there).result(WAIT_S)
    relay(until_done, name, "driver's", here)

    def work() -> object:
        connection = ServiceAddress(HOST, port.number, TOKEN, None).connect(0, "the driver", WAIT_S)
        connection.send_header({"worker": "1.0"})
        return connection.receive_header()

    with pytest.raises(DisconnectedError, match="rank 0 cannot reach the driver"):
        pytest.fail(f"the worker was told {elsewhere.submit(work).result(4 * WAIT_S)}")
    assert told.empty()


def test_another_user_who_listens_under_the_name_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, until_done: ExitStack
) -> None:
    """As one may who waits until the driver has died, for workers that come back."""
    with monkeypatch.context() as patched:
        patched.setattr(local, "listen", lambda *_: None)
        port = Port(HOST, TOKEN, Connection.close, now=VirtualClock())
    until_done.enter_context(closing(port))
    name = local.name_of(HOST, port.number, TOKEN)

    _, there = map(until_done.enter_context, socket.socketpair())
    impostor = relay(until_done, name, "worker's", there)
    connection = ServiceAddress(HOST, port.number, TOKEN, None).connect(0, "the driver", WAIT_S)
    connection.close()
    assert connection._socket.family == socket.AF_INET
    assert impostor.poll() is None


def test_another_user_who_connects_to_the_name_is_not_even_challenged(
    until_done: ExitStack,
) -> None:
    port = Port(HOST, TOKEN, Connection.close, now=VirtualClock())
    until_done.enter_context(closing(port))
    here, there = map(until_done.enter_context, socket.socketpair())
    relay(until_done, name_of(port), "driver's", there)
    here.settimeout(WAIT_S)
    assert here.recv(1) == b""
