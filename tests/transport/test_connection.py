"""Connections: how they are reached, who is let in, what survives the way, what is refused."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from every_row import every
from toys import DTYPES
from virtual_time import VirtualClock

from sparkdl.errors import DeadlineError, DisconnectedError, TrainingError
from sparkdl.transport import connecting, connection
from sparkdl.transport.connecting import ServiceAddress, reach
from sparkdl.transport.connection import Connection
from sparkdl.transport.handshake import ANSWER_BYTES, MAGIC, REFUSAL, Challenge, channel_of
from sparkdl.transport.sockets import Certificate, Encrypted, connect


class Attempts:
    """Attempts to reach a port, of which the first ``times`` fail; they count themselves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, cause: OSError) -> None:
        self.made, self._times, self._cause = 0, times, cause
        monkeypatch.setattr(connecting.sockets, "connect", self._connect)
        monkeypatch.setattr(connecting.local, "connect", lambda *_: None)

    def __call__(self) -> str:
        with contextlib.suppress(KeyError):
            ServiceAddress("there", 1, "token", None).connect(0, "the averager", SILENCE_S)
        return "connected"

    def _connect(self, *_: Any) -> None:
        self.made += 1
        if self.made <= self._times:
            raise self._cause
        raise KeyError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """Time that passes while somebody waits for another attempt."""
    clock = VirtualClock()

    def sleep(seconds: float) -> None:
        clock.passed += seconds

    monkeypatch.setattr(connecting, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    return clock


@pytest.mark.usefixtures("clock")
@every(
    "cause",
    [
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
        TimeoutError("timed out"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    ],
)
def test_what_may_pass_is_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cause: OSError
) -> None:
    attempts = Attempts(monkeypatch, 2, cause)
    assert reach(attempts, patience_s=20) == "connected"
    assert attempts.made == 3
    told = f"rank 0 cannot reach the averager: {cause}; retrying for 20 s"
    assert [record.message for record in caplog.records] == [told]


@every(
    "cause",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        OSError("the certificate found there has another SHA-256"),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    ],
)
def test_what_will_not_pass_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, cause: OSError
) -> None:
    attempts = Attempts(monkeypatch, 1, cause)
    with pytest.raises(DisconnectedError, match="rank 0 cannot reach the averager"):
        reach(attempts, patience_s=20)
    assert attempts.made == 1


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


@every(("dtype", "numel"), itertools.product(DTYPES, [0, 37, 4_096, 300_001]))
def test_values_survive_the_wire_bit_for_bit(
    connected: Connect, dtype: torch.dtype, numel: int
) -> None:
    values = torch.randn(numel + 2).mul(100).to(dtype)
    values[[0, -1]] = 0  # neither sent nor received
    received = torch.zeros(numel + 2, dtype=dtype)
    with connected() as (left, right):
        receive = partial(right.receive_values, received[1:-1])
        both(partial(left.send_values, values[1:-1]), receive)
    assert torch.equal(received, values)


@every(("numel", "said"), itertools.product([0, 37, 300_003], [1, 3_000_000]))
def test_a_header_sent_along_with_values_arrives_before_them(
    connected: Connect, numel: int, said: int
) -> None:
    values, received, header = torch.randn(numel), torch.zeros(numel), {"said": "x" * said}
    with connected() as (left, right):
        send = partial(left.send_values, values, header)
        _, came = both(send, lambda: (right.receive_header(), right.receive_values(received)))
    assert came[0] == header
    assert torch.equal(received, values)


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


def test_an_end_that_says_or_takes_nothing_is_noticed_at_the_deadline(connected: Connect) -> None:
    with connected(silence_s=0.2) as (left, right):
        with pytest.raises(DeadlineError):
            right.receive_header()
        with pytest.raises(DeadlineError):
            left.send_values(torch.zeros(5_000_000))


def test_an_interrupt_wakes_who_waits(connected: Connect) -> None:
    with connected(silence_s=60) as (left, _), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(left.receive_header)
        time.sleep(0.1)
        left.interrupt()
        assert isinstance(waiting.exception(timeout=10), DisconnectedError)


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
            averager.send_last({"stopped": "why"})

        assert both(work, stop)[0] == {"stopped": "why"}


def accept(end: socket.socket, token: str) -> bool:
    """The averager's part of a handshake; returns whether the other end knows the token."""
    challenge = Challenge(token, channel_of(end))
    end.sendall(challenge.hello)
    proof = challenge.reply(end.recv(ANSWER_BYTES, socket.MSG_WAITALL))
    end.sendall(REFUSAL if proof is None else proof)
    return proof is not None


def pass_on_a_handshake(token: str, *ends: socket.socket) -> tuple[list[bool], bytes]:
    """Who was let in, and what was sent, the worker's last, if somebody stands between two ends."""
    worker, left, right, averager = ends
    seen: dict[str, bytes] = {"averager": b"", "worker": b""}

    def pass_on(sender: str, source: socket.socket, sink: socket.socket) -> None:
        while octets := source.recv(4096):
            seen[sender] += octets
            sink.sendall(octets)
        sink.shutdown(socket.SHUT_WR)

    def introduce() -> bool:
        known = Connection(worker, SILENCE_S).introduce(token)
        worker.shutdown(socket.SHUT_WR)
        return known

    def answer() -> bool:
        known = accept(averager, token)
        averager.shutdown(socket.SHUT_WR)
        return known

    answers = both(
        introduce,
        answer,
        lambda: pass_on("worker", left, right),
        lambda: pass_on("averager", right, left),
    )
    return answers[:2], seen["averager"] + seen["worker"]


@pytest.fixture(params=[tcp, local])
def pair(request: pytest.FixtureRequest) -> Iterator[Callable[[], Ends]]:
    """Makes two connected sockets on this machine."""
    with contextlib.ExitStack() as stack:

        def make() -> Ends:
            left, right = request.param()
            return stack.enter_context(left), stack.enter_context(right)

        yield make


class TestHandshake:
    @every("token", ["", "t0k3", "t0k3n ", "T0K3N"])
    def test_another_token_is_refused_by_both_ends(
        self, token: str, pair: Callable[[], Ends]
    ) -> None:
        left, right = pair()
        worker = Connection(left, SILENCE_S)
        answers = both(lambda: worker.introduce(token), lambda: accept(right, "t0k3n"))
        assert answers == [False, False]

    def test_an_end_without_a_word_is_no_refusal(self, pair: Callable[[], Ends]) -> None:
        """The averager may have had too many strangers; another attempt may do better."""
        left, right = pair()

        def leave() -> None:
            right.sendall(MAGIC + bytes(32))
            right.recv(ANSWER_BYTES, socket.MSG_WAITALL)
            right.close()

        worker = Connection(left, SILENCE_S)
        with pytest.raises(DisconnectedError, match="closed the connection") as left_alone:
            both(lambda: worker.introduce("t"), leave)
        assert left_alone.value.retry

    def test_an_averager_that_trickles_is_left_at_the_deadline(
        self, pair: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "INTRODUCE_S", 0.5)
        left, right = pair()
        given_up = threading.Event()

        def trickle() -> bool:
            hello = MAGIC + bytes(32)
            with contextlib.suppress(OSError):  # it has gone
                for octet in hello[:-1]:
                    right.sendall(bytes([octet]))
                    if given_up.wait(0.3):
                        return True
            return given_up.is_set()

        def introduce() -> None:
            with pytest.raises(DisconnectedError, match="too long") as slow:
                Connection(left, silence_s=60.0).introduce("t")
            assert slow.value.retry
            given_up.set()
            left.close()

        assert both(introduce, trickle)[1]

    def test_the_token_is_never_on_the_wire_and_a_proof_seen_once_opens_nothing_later(
        self, pair: Callable[[], Ends]
    ) -> None:
        """A man in the middle passes everything on, looks for it and says it again."""
        token = "a-very-secret-token"
        answers, seen = pass_on_a_handshake(token, *pair(), *pair())
        assert answers == [True, True]
        assert seen.startswith(MAGIC)
        assert token.encode() not in seen
        left, right = pair()
        left.sendall(seen[-ANSWER_BYTES:])
        assert not accept(right, token)

    def test_whoever_is_no_averager_is_recognised(self, pair: Callable[[], Ends]) -> None:
        left, right = pair()
        right.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
        with pytest.raises(DisconnectedError, match="not an averager") as refused:
            Connection(left, SILENCE_S).introduce("t")
        assert not refused.value.retry


def test_a_proof_for_one_kind_of_channel_is_none_for_another() -> None:
    """Whoever has been taken for the other end locally cannot pass that on to the TCP port."""
    with contextlib.ExitStack() as stack:
        ends = [*local(), *tcp()]
        for end in ends:
            stack.enter_context(end)
        answers, _ = pass_on_a_handshake("t", *ends)
    assert answers == [False, False]


@every(
    ("sent", "receive", "words"),
    [
        *(
            (
                struct.pack("!BI", 2, 4 * numel) + bytes(4 * numel),
                lambda end: end.receive_values(torch.zeros(4)),
                rf"{4 * numel} bytes arrived where 4 values of torch.float32 "
                r"\(16 bytes\) were expected",
            )
            for numel in (0, 3, 5)
        ),
        (struct.pack("!BI", 2, 2) + b"{}", Connection.receive_header, "a header was expected"),
        (struct.pack("!BI", 7, 2) + b"{}", Connection.receive_header, "unknown kind 7"),
        (struct.pack("!BI", 1, 1) + b"{", Connection.receive_header, "readable header"),
    ],
)
def test_what_no_end_of_ours_sends_is_refused(
    sent: bytes, receive: Callable[[Connection], Any], words: str
) -> None:
    left, right = local()
    with left, right:
        left.sendall(sent)
        with pytest.raises(TrainingError, match=words):
            receive(Connection(right, SILENCE_S))


def test_headers_that_are_not_taken_are_skipped() -> None:
    left, right = local()
    with left, right:
        here = Connection(left, SILENCE_S)
        there = Connection(right, SILENCE_S, takes=lambda header: "waiting" not in header)
        here.send_header({"waiting": True})
        here.send_values(torch.ones(3), {"waiting": True})
        assert there.receive_values(torch.zeros(3)).tolist() == [1.0] * 3


@every("ends", [tcp, local])
def test_an_end_that_leaves_in_the_middle_of_values_is_lost(ends: Callable[[], Ends]) -> None:
    left, right = ends()
    with left, right:
        left.sendall(struct.pack("!BI", 2, 16) + b"12345")
        left.close()
        with pytest.raises(DisconnectedError, match="closed the connection"):
            Connection(right, SILENCE_S).receive_values(torch.zeros(4))
