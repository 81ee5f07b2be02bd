"""What holds of a connection whatever carries it: TCP, the machine's own sockets, or TLS."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from toys import DTYPES

from sparkdl.transport.connection import Connection, ConnectionLostError, SilenceError
from sparkdl.transport.sockets import Certificate, Encrypted, connect

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
