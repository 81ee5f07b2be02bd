"""The way in: strangers, however many and however slow, keep nobody out for long."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import socket
import ssl
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flood import Flood
from toys import sparkdl_threads
from virtual_time import VirtualClock
from waiting import WAIT_S, eventually

from sparkdl.transport import acceptor, local
from sparkdl.transport.acceptor import (
    HANDSHAKE_S,
    MAX_UNAUTHENTICATED,
    RateLimit,
    Unauthenticated,
    UnauthenticatedConnections,
    source_of,
)
from sparkdl.transport.connecting import ServiceAddress, reach
from sparkdl.transport.connection import Connection
from sparkdl.transport.handshake import HELLO_BYTES, Challenge
from sparkdl.transport.port import Port

HOST, TOKEN = "127.0.0.1", "the job's secret"
JOINS_S = 4.0
"""Virtual seconds in which somebody with the token gets in, whatever strangers do."""
KINDS = ["tcp", "local", "encrypted"]
HALF_A_TLS_HELLO = b"\x16\x03\x01\x02\x00\x01" + bytes(40)


def greet(connection: Connection) -> None:
    connection.send_header({"welcome": True})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """Time that passes while a port rests, and when the test says so."""
    clock = VirtualClock()

    def rest(seconds: float) -> None:
        clock.passed += seconds
        time.sleep(0.001)  # the others' turn

    monkeypatch.setattr(acceptor, "time", SimpleNamespace(sleep=rest))
    return clock


def listening(clock: VirtualClock, kind: str = "tcp") -> contextlib.closing[Port]:
    encrypted = kind == "encrypted"
    return contextlib.closing(Port(HOST, TOKEN, greet, encrypted=encrypted, now=clock))


def address_of(port: Port, kind: str) -> Any:
    place = HOST, port.number
    return local.name_of(*place, TOKEN) if kind == "local" else place


def join(port: Port, clock: VirtualClock) -> float:
    """The seconds that pass until a worker is let in and greeted."""
    began = clock.passed
    address = ServiceAddress(HOST, port.number, TOKEN, port.fingerprint)
    with contextlib.closing(
        reach(lambda: address.connect(0, "the driver", WAIT_S), WAIT_S)
    ) as connection:
        assert connection.receive_header() == {"welcome": True}
    return clock.passed - began


def stranger_at(port: Port, kind: str) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX if kind == "local" else socket.AF_INET)
    stranger.settimeout(WAIT_S)
    stranger.connect(address_of(port, kind))
    return stranger


def let_in(port: Port, kind: str, stack: contextlib.ExitStack, there: int) -> socket.socket:
    """Another stranger, who makes so many with those whose time is not up."""
    stranger = stack.enter_context(stranger_at(port, kind))
    assert eventually(lambda: len(port._acceptor._unauthenticated) == there)
    return stranger


def is_ended(stranger: socket.socket) -> bool:
    """Whether nothing more comes from a port, once what it has sent has been read."""
    with contextlib.suppress(ConnectionError):  # it was sent what it has not read
        while stranger.recv(HELLO_BYTES):
            pass
    return True


@pytest.mark.nightly_variants
@pytest.mark.parametrize("drip_s", [None, 0.1], ids=["silent", "dripping"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_strangers_that_come_back_at_once_keep_no_worker_out(
    clock: VirtualClock, kind: str, drip_s: float | None
) -> None:
    with (
        listening(clock, kind) as port,
        Flood(address_of(port, kind), 1000, drip_s=drip_s) as flood,
    ):
        assert eventually(lambda: flood.opened >= 1000 and flood.closed)
        assert max(join(port, clock) for _ in range(2)) < JOINS_S


@pytest.mark.parametrize("said", [b"", HALF_A_TLS_HELLO], ids=["silent", "dripping"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_has_so_long_and_not_longer_however_it_behaves(
    clock: VirtualClock, kind: str, said: bytes
) -> None:
    with listening(clock, kind) as port, contextlib.ExitStack() as stack:
        stranger = let_in(port, kind, stack, there=1)
        for index in range(49):
            stranger.send(said[index : index + 1])
            clock.passed += HANDSHAKE_S / 50
        let_in(port, kind, stack, there=2)
        clock.passed += HANDSHAKE_S / 25
        let_in(port, kind, stack, there=2)
        assert is_ended(stranger)


def test_one_that_has_spoken_tls_has_no_more_time_than_others(clock: VirtualClock) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with listening(clock, "encrypted") as port, contextlib.ExitStack() as stack:
        plain = let_in(port, "encrypted", stack, there=1)
        clock.passed += HANDSHAKE_S / 2
        with context.wrap_socket(plain) as stranger:
            assert len(stranger.recv(HELLO_BYTES)) == HELLO_BYTES
            clock.passed += HANDSHAKE_S / 2 - 0.1
            let_in(port, "encrypted", stack, there=2)
            clock.passed += 0.2
            let_in(port, "encrypted", stack, there=2)
            with contextlib.suppress(ssl.SSLError):
                assert is_ended(stranger)


def test_strangers_cost_no_threads(clock: VirtualClock) -> None:
    before = len(sparkdl_threads())
    with listening(clock) as port, contextlib.ExitStack() as stack:
        for _ in range(50):
            stranger = stack.enter_context(stranger_at(port, "tcp"))
            assert len(stranger.recv(HELLO_BYTES, socket.MSG_WAITALL)) == HELLO_BYTES
        assert len(sparkdl_threads()) == before + 1


def test_when_there_are_too_many_the_source_that_has_most_suffers(clock: VirtualClock) -> None:
    with listening(clock) as port, contextlib.ExitStack() as stack:

        def come_from(source: str) -> socket.socket:
            end = socket.create_connection((HOST, port.number), WAIT_S, (source, 0))
            stack.enter_context(end)
            assert len(end.recv(HELLO_BYTES, socket.MSG_WAITALL)) == HELLO_BYTES
            return end

        quiet = come_from("127.0.0.2")
        noisy = [come_from("127.0.0.3") for _ in range(MAX_UNAUTHENTICATED)]
        with contextlib.suppress(ConnectionResetError):
            assert noisy[0].recv(1) == b""  # the oldest, since there is one too many
        for stays in (quiet, noisy[1], noisy[-1]):
            stays.settimeout(0.02)
            with pytest.raises(TimeoutError):
                stays.recv(1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_nobody_leaves_whose_source_has_no_more_than_its_share(sources: list[int]) -> None:
    connections = UnauthenticatedConnections()
    came: list[tuple[int, Unauthenticated]] = []
    left, right = socket.socketpair()
    with left, right:
        for number, source in enumerate(sources):
            connection = Unauthenticated(
                left, bytes([source]), Challenge(TOKEN, b"tcp"), float(number), RateLimit(1, 1.0)
            )
            connections.add(connection)
            came.append((source, connection))
        while came:
            assert (connections.oldest, len(connections)) == (came[0][1], len(came))
            counts = [sum(s == source for s, _ in came) for source in range(6)]
            leaving = next(pair for pair in came if pair[1] is connections.to_evict)
            assert counts[leaving[0]] == max(counts)
            assert leaving == next(pair for pair in came if pair[0] == leaving[0])
            connections.remove(leaving[1])
            came.remove(leaving)
        assert connections.oldest is None


def test_an_address_is_a_source_and_in_ipv6_its_network_is() -> None:
    def four(host: str, port: int) -> bytes:
        return source_of(socket.AF_INET, (host, port))

    def six(host: str) -> bytes:
        return source_of(socket.AF_INET6, (host, 5, 0, 0))

    assert four("10.0.0.1", 5) == four("10.0.0.1", 6) != four("10.0.0.2", 5)
    assert six("2001:db8::1") == six("2001:db8::2") != six("2001:db8:0:1::1")
    assert six("fe80::1%eth0") == six("fe80::2")


def test_an_rate_grows_with_time_but_not_without_end() -> None:
    now = [100.0]
    rate = RateLimit(3, per_s=8.0, now=lambda: now[0])
    assert [rate.take() for _ in range(4)] == [True, True, True, False]
    now[0] += 0.125
    assert [rate.take() for _ in range(2)] == [True, False]
    rate.give_back()
    assert rate.take()
    now[0] += 1000
    assert [rate.take() for _ in range(4)] == [True, True, True, False]
    rate.suspend(0.5)
    now[0] += 0.5 + 0.0625
    assert not rate.take()
    now[0] += 0.0625
    assert rate.take()


def test_a_thread_that_cannot_be_started_keeps_nobody_else_out(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [1, 2, 3]
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == "sparkdl-port-connection" and failures:
            failures.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    with listening(clock) as port, caplog.at_level(logging.WARNING):
        assert join(port, clock) < JOINS_S
        assert join(port, clock) < JOINS_S
    assert not failures
    assert "could not be served: can't start new thread" in caplog.text


def test_a_port_is_free_again_although_a_process_that_was_forked_meanwhile_lives_on() -> None:
    """A pool of processes that a callback has started, for example."""
    wait, leave = os.pipe()
    first = Port(HOST, TOKEN, greet)
    child = os.fork()
    if not child:
        os.close(leave)
        os.read(wait, 1)
        os._exit(0)
    try:
        first.close()
        Port(HOST, TOKEN, greet, ports=(first.number, first.number)).close()
    finally:
        os.close(leave)
        os.close(wait)
        os.waitpid(child, 0)


def test_a_port_that_cannot_start_its_thread_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: queue.SimpleQueue[Any] = queue.SimpleQueue()
    create = socket.create_server

    def create_server(*arguments: Any, **options: Any) -> socket.socket:
        listener = create(*arguments, **options)
        opened.put(listener)
        return listener

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(socket, "create_server", create_server)
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Port(HOST, TOKEN, greet)
    assert opened.get().fileno() == -1


def test_a_mistake_with_one_stranger_does_not_end_the_port(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    advance = Unauthenticated.advance
    mistakes = [1]

    def advance_or_fail(connection: Unauthenticated) -> int:
        if mistakes:
            mistakes.pop()
            raise MemoryError
        return advance(connection)

    monkeypatch.setattr(Unauthenticated, "advance", advance_or_fail)
    with listening(clock) as port, stranger_at(port, "tcp"):
        assert join(port, clock) < JOINS_S
    assert "a port continues after an error" in caplog.text


def test_without_file_descriptors_a_port_waits_for_better_times(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening(clock) as port, contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(socket.socket()) for _ in range(4)]
        lowest_free = max(socket.socket().detach(), waiting[-1].fileno())
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
            for each in waiting:
                each.connect((HOST, port.number))
            assert eventually(lambda: "could not be accepted" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "could not be accepted: [Errno 24]" in caplog.text
        assert join(port, clock) < JOINS_S
