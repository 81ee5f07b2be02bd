"""Connecting, by each kind of connection."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toys import DTYPES
from virtual_time import VirtualClock

from sparkdl.averager.client.client import AveragerClient
from sparkdl.averager.values.wire_format import FullPrecision
from sparkdl.errors import DisconnectedError
from sparkdl.transport import connecting
from sparkdl.transport.connecting import RETRY_S, ServiceAddress, reach
from sparkdl.transport.connection import (
    Connection,
    ConnectionLostError,
    NotAnAveragerError,
    SilenceError,
)
from sparkdl.transport.sockets import Certificate, Encrypted, connect

CLOSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
AWAY = OSError(errno.EHOSTUNREACH, "No route to host")


def failing(times: int, cause: Exception) -> tuple[Callable[[], str], list[int]]:
    """An attempt that fails so often before it succeeds; counts how often it was made."""
    made: list[int] = []

    def connect() -> str:
        made.append(1)
        if len(made) <= times:
            raise DisconnectedError(f"rank 0 cannot reach the averager: {cause}") from cause
        return "connected"

    return connect, made


def test_what_may_pass_is_waited_for(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    for cause in [
        AWAY,
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
        TimeoutError("timed out"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        ConnectionLostError("the other end closed the connection"),
        SilenceError("nothing moved for 20 s"),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    ]:
        with subtests.test(cause=cause):
            caplog.clear()
            connect, made = failing(2, cause)
            assert reach(connect, patience_s=20) == "connected"
            assert len(made) == 3
            assert [record.message for record in caplog.records] == [
                f"rank 0 cannot reach the averager: {cause}; retrying for 20 s"
            ]


def test_what_will_not_pass_is_an_error_at_once(subtests: pytest.Subtests) -> None:
    for cause in [
        CLOSED,
        NotAnAveragerError("the other end is not an averager"),
        OSError("the certificate found there has another SHA-256"),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    ]:
        with subtests.test(cause=cause):
            connect, made = failing(1, cause)
            with pytest.raises(DisconnectedError, match="rank 0 cannot reach the averager"):
                reach(connect, patience_s=20)
            assert len(made) == 1


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()

    def sleep(seconds: float) -> None:
        clock.passed += seconds

    monkeypatch.setattr(connecting, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    connect, made = failing(10_000, AWAY)
    with pytest.raises(DisconnectedError, match="No route to host"):
        reach(connect, patience_s=60.0)
    assert clock.passed == 60.0
    assert len(made) == 60 / RETRY_S + 1


def test_a_closed_port_is_named(free_port: int) -> None:
    address = ServiceAddress(f"tcp://127.0.0.1:{free_port}", "token", None)
    with pytest.raises(
        DisconnectedError, match=rf"rank 3 cannot reach .*127.0.0.1:{free_port}: .*refused"
    ):
        AveragerClient(address, 3, FullPrecision(), deadline_s=60)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


SILENCE_S = 10.0

Ends = tuple[Any, Any]
Connect = Callable[..., contextlib.AbstractContextManager[tuple[Connection, Connection]]]


def tcp() -> Ends:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname(), timeout=SILENCE_S)
        right, _ = listener.accept()
    return left, right


def local() -> Ends:
    return socket.socketpair(socket.AF_UNIX)


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return Certificate()


def encrypted(certificate: Certificate) -> Ends:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = listener.getsockname()
        left = pool.submit(connect, address, certificate.fingerprint, SILENCE_S)
        right = Encrypted(certificate.wrap(listener.accept()[0]))
        # The handshake goes on with what is said first.
        Connection(right, SILENCE_S).send_header({"hello": 1})
        assert Connection(left.result(10), SILENCE_S).receive_header() == {"hello": 1}
    return left.result(), right


@pytest.fixture(params=["tcp", "local", "encrypted"])
def connected(request: pytest.FixtureRequest, certificate: Certificate) -> Connect:
    kinds = {"tcp": tcp, "local": local, "encrypted": lambda: encrypted(certificate)}

    @contextlib.contextmanager
    def make(silence_s: float = SILENCE_S) -> Iterator[tuple[Connection, Connection]]:
        left, right = (Connection(end, silence_s) for end in kinds[request.param]())
        try:
            yield left, right
        finally:
            left.close()
            right.close()

    return make


def both(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=30) for future in [pool.submit(call) for call in calls]]


def test_values_survive_the_wire_bit_for_bit(connected: Connect, subtests: pytest.Subtests) -> None:
    for dtype, numel in itertools.product(DTYPES, [0, 1, 37, 4_095, 4_096, 1_000_003]):
        with subtests.test(numel=numel, dtype=dtype):
            values = torch.randn(numel).mul(100).to(dtype)
            received = torch.zeros(numel, dtype=dtype)
            with connected() as (left, right):
                both(partial(left.send_values, values), partial(right.receive_values, received))
            assert torch.equal(received, values)


def received_of(right: Connection, values: torch.Tensor) -> tuple[Any, Any]:
    return right.receive_header(), right.receive_values(values)


def test_a_header_sent_along_with_values_arrives_before_them(
    connected: Connect, subtests: pytest.Subtests
) -> None:
    for numel, said in itertools.product([0, 37, 1_000_003], [1, 20_000, 3_000_000]):
        with subtests.test(said=said, numel=numel):
            values, received, header = torch.randn(numel), torch.zeros(numel), {"said": "x" * said}

            with connected() as (left, right):
                receive = partial(received_of, right, received)
                _, came = both(partial(left.send_values, values, header), receive)
            assert came == (header, None)
            assert torch.equal(received, values)


def test_a_header_and_short_values_wake_the_other_end_once(subtests: pytest.Subtests) -> None:
    for said in [1, 9_000]:
        with subtests.test(said=said):
            left, right = local()
            with left, right:
                Connection(left, SILENCE_S).send_values(torch.ones(4_000), {"said": "x" * said})
                assert len(right.recv(1 << 20, socket.MSG_DONTWAIT)) > 16_000 + said


def test_both_ends_may_send_and_receive_at_the_same_time(connected: Connect) -> None:
    values = torch.randn(1_000_000)
    received = [torch.zeros(1_000_000), torch.zeros(1_000_000)]
    with connected() as (left, right):
        both(
            lambda: left.send_values(values),
            lambda: right.send_values(-values),
            lambda: left.receive_values(received[0]),
            lambda: right.receive_values(received[1]),
        )
    assert torch.equal(received[0], -values)
    assert torch.equal(received[1], values)


def test_silence_ends_at_the_deadline(connected: Connect) -> None:
    with connected(silence_s=0.2) as (_, right), pytest.raises(SilenceError):
        right.receive_header()


def test_an_end_that_takes_nothing_is_noticed_at_the_deadline(connected: Connect) -> None:
    with connected(silence_s=0.2) as (left, _), pytest.raises(SilenceError):
        left.send_values(torch.zeros(50_000_000))


def test_an_interrupt_wakes_who_waits(connected: Connect) -> None:
    with connected(silence_s=60) as (left, _), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(left.receive_header)
        time.sleep(0.1)
        left.interrupt()
        assert isinstance(waiting.exception(timeout=10), ConnectionLostError)


def test_what_was_said_last_arrives_though_more_was_being_sent(connected: Connect) -> None:
    """Closing a socket with unread input resets it and would lose the farewell."""
    with connected() as (worker, averager):
        sending = threading.Event()

        def work() -> dict[str, Any]:
            sending.set()
            worker.send_values(torch.zeros(5_000_000))
            header = worker.receive_header()
            worker.close()
            return header

        def stop() -> None:
            assert sending.wait(10)
            averager.send_header({"stopped": "why"})
            averager.close_after(10)

        assert both(work, stop)[0] == {"stopped": "why"}
