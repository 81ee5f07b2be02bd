"""One connection: who is let in, what survives the way, what is refused, what never hangs."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.errors import TrainingError
from sparkdl.transport import connection
from sparkdl.transport.connection import (
    Connection,
    ConnectionLostError,
    SilenceError,
)
from sparkdl.transport.framing import MAX_HEADER_BYTES
from sparkdl.transport.handshake import ANSWER_BYTES, MAGIC, REFUSAL, Challenge, channel_of

SILENCE_S = 10.0


def tcp_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname(), timeout=SILENCE_S)
        right, _ = listener.accept()
    return left, right


def local_sockets() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX)


connected_sockets: Callable[[], tuple[socket.socket, socket.socket]] = tcp_sockets


@pytest.fixture(autouse=True, params=[tcp_sockets, local_sockets])
def every_test_is_of_both_kinds(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "connected_sockets", request.param)


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets on this machine."""
    left, right = connected_sockets()
    with left, right:
        yield left, right


@contextlib.contextmanager
def connected(silence_s: float = SILENCE_S) -> Iterator[tuple[Connection, Connection]]:
    with pair() as (left, right):
        yield Connection(left, silence_s), Connection(right, silence_s)


def accept(end: socket.socket, token: str) -> bool:
    """The averager's part of a handshake; returns whether the other end knows the token."""
    challenge = Challenge(token, channel_of(end))
    end.sendall(challenge.hello)
    proof = challenge.reply(end.recv(ANSWER_BYTES, socket.MSG_WAITALL))
    end.sendall(REFUSAL if proof is None else proof)
    return proof is not None


def both(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=30) for future in [pool.submit(call) for call in calls]]


def pass_on_a_handshake(
    token: str,
    worker: socket.socket,
    left: socket.socket,
    right: socket.socket,
    averager: socket.socket,
) -> tuple[list[bool], bytes]:
    """Who was let in, and what was sent, the worker's last, if somebody stands between two ends."""
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


class TestHandshake:
    def test_ends_with_the_same_token_know_each_other(self) -> None:
        with pair() as (left, right):
            worker = Connection(left, SILENCE_S)
            answers = both(lambda: worker.introduce("t0k3n"), lambda: accept(right, "t0k3n"))
        assert answers == [True, True]

    @every("token", ["", "t0k3", "t0k3n ", "T0K3N"])
    def test_another_token_is_refused_by_both_ends(self, token: str) -> None:
        with pair() as (left, right):
            worker = Connection(left, SILENCE_S)
            answers = both(lambda: worker.introduce(token), lambda: accept(right, "t0k3n"))
        assert answers == [False, False]

    def test_an_end_without_a_word_is_no_refusal(self) -> None:
        """The averager may have had too many strangers; another attempt may do better."""
        with pair() as (left, right):

            def leave() -> None:
                right.sendall(MAGIC + bytes(32))
                right.recv(ANSWER_BYTES, socket.MSG_WAITALL)
                right.close()

            worker = Connection(left, SILENCE_S)
            with pytest.raises(ConnectionLostError, match="closed the connection"):
                both(lambda: worker.introduce("t"), leave)

    def test_an_averager_that_trickles_is_left_at_the_deadline(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "INTRODUCE_S", 0.5)
        with pair() as (left, right):
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
                with pytest.raises(SilenceError):
                    Connection(left, silence_s=60.0).introduce("t")
                given_up.set()
                left.close()

            assert both(introduce, trickle)[1]

    def test_the_token_is_never_on_the_wire(self) -> None:
        """A man in the middle passes everything on and looks for it."""
        token = "a-very-secret-token"
        with pair() as (left, middle), pair() as (center, right):
            answers, seen = pass_on_a_handshake(token, left, middle, center, right)
        assert answers == [True, True]
        assert seen.startswith(MAGIC)
        assert token.encode() not in seen

    def test_a_proof_seen_once_opens_nothing_later(self) -> None:
        with pair() as (left, middle), pair() as (center, right):
            answers, seen = pass_on_a_handshake("t", left, middle, center, right)
        assert answers == [True, True]
        with pair() as (left, right):
            left.sendall(seen[-ANSWER_BYTES:])
            assert not accept(right, "t")

    def test_whoever_is_no_averager_is_recognised(self) -> None:
        with pair() as (left, right):
            right.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
            with pytest.raises(ConnectionLostError, match="not an averager"):
                Connection(left, SILENCE_S).introduce("t")


def test_a_proof_for_one_kind_of_channel_is_none_for_another() -> None:
    """Whoever has been taken for the other end locally cannot pass that on to the TCP port."""
    with contextlib.ExitStack() as stack:
        ends = [*local_sockets(), *tcp_sockets()]
        for end in ends:
            stack.enter_context(end)
        answers, _ = pass_on_a_handshake("t", *ends)
    assert answers == [False, False]


@given(
    fields=st.dictionaries(st.text(), st.integers() | st.text() | st.booleans() | st.floats(0, 1))
)
@settings(deadline=None)
def test_headers_survive_the_wire(fields: dict[str, object]) -> None:
    with connected() as (left, right):
        left.send_header(fields)
        assert right.receive_header() == fields


def test_values_go_from_a_view_into_a_view() -> None:
    source, target = torch.arange(8.0), torch.zeros(8)
    with connected() as (left, right):
        left.send_values(source[2:5])
        assert right.receive_values(target[4:7]) is None
    np.testing.assert_array_equal(target.numpy(), [0, 0, 0, 0, 2, 3, 4, 0])


def test_a_header_where_values_were_due_is_returned() -> None:
    target = torch.zeros(3)
    with connected() as (left, right):
        left.send_header({"failure": "x"})
        assert right.receive_values(target) == {"failure": "x"}
    assert target.tolist() == [0.0] * 3


def test_another_number_of_values_is_refused(subtests: pytest.Subtests) -> None:
    for numel in [0, 3, 5]:
        with subtests.test(numel=numel), connected() as (left, right):
            left.send_values(torch.ones(numel))
            with pytest.raises(
                TrainingError,
                match=rf"{4 * numel} bytes arrived where 4 values of torch.float32 "
                r"\(16 bytes\) were expected",
            ):
                right.receive_values(torch.zeros(4))


def test_values_where_a_header_was_due_are_refused() -> None:
    with connected() as (left, right):
        left.send_values(torch.ones(2))
        with pytest.raises(TrainingError, match="a header was expected"):
            right.receive_header()


def test_an_unreadable_header_is_refused(subtests: pytest.Subtests) -> None:
    for octets in [b"", b"{", b"[1]", b"3", b"null", b"\xff\xfe", b"[" * 100_000]:
        with subtests.test(octets=octets), pair() as (left, right):
            left.sendall(struct.pack("!BI", 1, len(octets)) + octets)
            with pytest.raises(TrainingError, match="readable header"):
                Connection(right, SILENCE_S).receive_header()


def test_a_header_that_says_it_is_huge_is_refused_before_it_is_read() -> None:
    with pair() as (left, right):
        left.sendall(struct.pack("!BI", 1, MAX_HEADER_BYTES + 1))
        with pytest.raises(TrainingError, match=f"a header of {MAX_HEADER_BYTES + 1} bytes"):
            Connection(right, SILENCE_S).receive_header()


def test_a_message_of_unknown_kind_is_refused() -> None:
    with pair() as (left, right):
        left.sendall(struct.pack("!BI", 7, 2) + b"{}")
        with pytest.raises(TrainingError, match="unknown kind 7"):
            Connection(right, SILENCE_S).receive_header()


@given(octets=st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_end_in_a_header_or_an_error_of_ours(octets: bytes) -> None:
    with pair() as (left, right):
        left.sendall(octets)
        left.shutdown(socket.SHUT_WR)
        try:
            header = Connection(right, SILENCE_S).receive_header()
        except (TrainingError, ConnectionLostError):
            return
    assert header == json.loads(octets[5 : 5 + struct.unpack("!BI", octets[:5])[1]])


def test_an_end_that_leaves_in_the_middle_of_values_is_lost() -> None:
    with pair() as (left, right):
        left.sendall(struct.pack("!BI", 2, 16) + b"12345")
        left.close()
        with pytest.raises(ConnectionLostError, match="closed the connection"):
            Connection(right, SILENCE_S).receive_values(torch.zeros(4))
