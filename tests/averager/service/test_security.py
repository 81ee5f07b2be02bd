"""Nobody uninvited: what the averager's port answers to calls with and without the job's token."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
import torch
from by_keyword import open_averager
from every_row import every, every_row
from torch import Tensor
from toys import drive
from virtual_time import VirtualClock

from sparkdl.averager import Averager, AveragerClient, ServiceAddress
from sparkdl.averager.headers import window_header
from sparkdl.averager.values.wire_format import FULL_PRECISION
from sparkdl.errors import DisconnectedError, SparkDLError, TrainingError
from sparkdl.events import WindowReport
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.shards import DataStatistics, ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.transport.connection import Connection
from sparkdl.transport.framing import header_message
from sparkdl.transport.handshake import HELLO_BYTES, REFUSAL

LAYOUT = (Segment("parameters", torch.float32, 5),)
SILENCE_S = 60.0
JOIN = {"join": 0, "host": "here"}
SHARD = asdict(ShardStatistics(3, (ColumnStatistics(smallest=0.5, largest=2),)))
WINDOW = WindowReport(rank=0, epoch=1, step=1, examples=2, loss_sum=0.5, last=False)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def averager(clock: VirtualClock) -> Iterator[Averager]:
    """One for which no time passes: no run ends because a deadline has passed."""
    with opened(clock) as averager:
        yield averager


def opened(clock: VirtualClock | None = None) -> Averager:
    """The averager of one worker, for which no time passes."""
    now = clock or VirtualClock()
    return open_averager(LAYOUT, [torch.ones(5)], 1, FULL_PRECISION, now=now)


def dial(averager: Averager) -> Connection:
    address = averager.address.host_and_port
    return Connection(socket.create_connection(address, timeout=SILENCE_S), SILENCE_S)


def train_alone(averager: Averager) -> list[float]:
    """What a worker receives that does nothing wrong."""
    segments = [torch.zeros(5)]
    with (
        ThreadPoolExecutor(1) as pool,
        AveragerClient(averager.address, 0, FULL_PRECISION, deadline_s=SILENCE_S) as client,
    ):
        driver = pool.submit(drive, averager)
        client.start(ShardStatistics(2, ()), segments, LAYOUT)
        client.finish()
        assert driver.result(timeout=SILENCE_S) == [
            DataStatistics((2,), (), parts=(((0, 2, 0, 0.0),),))
        ]
    received: list[float] = segments[0].tolist()
    return received


@pytest.mark.parametrize(
    "octets",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(63), bytes(64), b"\xff" * 5_000],
    ids=["nothing", "http", "too-short", "zeros", "noise"],
)
def test_a_stranger_is_sent_a_challenge_and_at_most_a_refusal(
    averager: Averager, octets: bytes
) -> None:
    with socket.create_connection(averager.address.host_and_port, timeout=SILENCE_S) as stranger:
        answer = bytearray()
        with contextlib.suppress(OSError):  # it may have hung up on noise by now
            stranger.sendall(octets)
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # by the noise that nobody read
            while piece := stranger.recv(4096):
                answer.extend(piece)
    assert len(answer) in (0, HELLO_BYTES, HELLO_BYTES + len(REFUSAL))
    assert answer[HELLO_BYTES:] in (b"", REFUSAL)
    assert train_alone(averager) == [1.0] * 5


def test_tokens_differ_from_run_to_run_and_are_not_shown() -> None:
    tokens = set()
    for _ in range(3):
        with open_averager(LAYOUT, [torch.ones(5)], 1, FULL_PRECISION) as averager:
            tokens.add(averager.address.token)
            assert averager.address.token not in repr(averager.address)
    assert len(tokens) == 3
    assert all(len(token) >= 40 for token in tokens)


def test_the_port_is_bound_to_the_host_asked_for() -> None:
    with open_averager(LAYOUT, [torch.ones(5)], 1, FULL_PRECISION, host="127.0.0.1") as averager:
        _, port = averager.address.host_and_port
        assert averager.address.uri == f"tcp://127.0.0.1:{port}"
        # The whole of 127/8 is this machine: another address of it must not answer.
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=SILENCE_S)


def test_the_advertised_host_is_the_one_in_the_address() -> None:
    with open_averager(
        LAYOUT, [torch.ones(5)], 1, FULL_PRECISION, advertised_host="localhost"
    ) as averager:
        assert averager.address.uri.startswith("tcp://localhost:")


def test_an_ipv6_address_stands_in_brackets_before_its_port() -> None:
    assert ServiceAddress("::1", 5000, "t").uri == "tcp://[::1]:5000"


def test_closing_the_port_ends_connections_of_every_kind() -> None:
    with open_averager(LAYOUT, [torch.ones(5)], 1, FULL_PRECISION, deadline_s=60) as averager:
        stranger = dial(averager)
        worker = dial(averager)
        assert worker.introduce(averager.address.token)
        worker.send_header(JOIN)
        address = averager.address.host_and_port
    for connection in (stranger, worker):
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=SILENCE_S)
    assert [t for t in threading.enumerate() if t.name.startswith("sparkdl-port")] == []


class Raw(bytes):
    """A header as it is to be on the wire, right or wrong."""


Message = Raw | Tensor | None
"""None ends the connection."""


class Intruder:
    """Someone with the token who speaks the protocol badly."""

    def __init__(self, averager: Averager, hello: bytes | None = None) -> None:
        self.averager = averager
        self.events = averager.events()
        self.socket = socket.create_connection(averager.address.host_and_port, timeout=SILENCE_S)
        self.connection = Connection(self.socket, SILENCE_S)
        assert self.connection.introduce(averager.address.token)
        self.send(Raw(json.dumps(JOIN).encode() if hello is None else hello))

    def __enter__(self) -> Intruder:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def train(self, *messages: Message) -> None:
        """Start as a worker does, take the center, then send these."""
        self.send(Raw(json.dumps({"shard": SHARD}).encode()))
        assert isinstance(next(self.events), DataStatistics)
        self.averager.start()
        while "chunk_bytes" not in self.connection.receive_header():
            pass
        self.connection.receive_values(torch.empty(5))
        self.send(*messages)

    def send(self, *messages: Message) -> None:
        # The averager may end the connection at the first message already.
        with contextlib.suppress(DisconnectedError, OSError):
            for message in messages:
                if isinstance(message, Raw):
                    self.socket.sendall(b"\x01" + len(message).to_bytes(4, "big") + message)
                elif message is None:
                    self.socket.shutdown(socket.SHUT_WR)
                else:
                    self.connection.send_values(message)


def header(**changes: Any) -> Raw:
    return Raw(json.dumps(window_header(WINDOW) | changes).encode())


def window(**changes: Any) -> Raw:
    return header(window={**asdict(WINDOW), **changes})


WRONG_MESSAGES: dict[str, tuple[Message, ...]] = {
    "no-json": (Raw(b"\x00\xff{"),),
    "json-but-no-object": (Raw(b"[1, 2]"),),
    "unknown-header": (Raw(b'{"hello": 1}'),),
    "window-without-fields": (Raw(b'{"window": {}}'),),
    "another-rank": (window(rank=1),),
    "examples-is-negative": (window(examples=-4), torch.ones(5)),
    "stands-for-infinity": (window(group_weight=float("inf")), torch.ones(5)),
    "failure-without-fields": (Raw(b'{"failure": {}}'),),
    "kept-bytes-are-text": (header(worker_state="many"),),
    "kept-bytes-are-less-than-nothing": (header(worker_state=-1),),
    "kept-bytes-are-more-than-memory": (header(worker_state=1 << 60),),
    "kept-bytes-are-fewer-than-said": (header(worker_state=4096), torch.ones(5)),
    "header-instead-of-values": (header(), header()),
    "values-without-header": (torch.ones(5),),
    "too-few-values": (header(), torch.ones(4)),
    "too-many-values": (header(), torch.ones(6)),
    "other-dtype": (header(), torch.ones(5, dtype=torch.float64)),
    "stream-ends-early": (header(), None),
}


@every("name", WRONG_MESSAGES)
def test_wrong_messages_from_a_token_holder_end_the_run_at_once(name: str) -> None:
    with opened() as averager, Intruder(averager) as intruder:
        intruder.train(*WRONG_MESSAGES[name])
        with pytest.raises(SparkDLError):
            list(intruder.events)


@every_row(
    b"",
    b"junk",
    b"{}",
    b'{"join": "0", "host": "h"}',
    b'{"join": 0}',
    b'{"join": 5, "host": "h"}',
    b'{"failure": {}}',
    b'{"failure": 3}',
)
def test_a_wrong_first_message_is_answered_with_an_error(hello: bytes) -> None:
    with opened() as averager, Intruder(averager, hello) as intruder:
        assert "stopped" in intruder.connection.receive_header()


def test_messages_beyond_the_plan_never_reach_the_center(averager: Averager) -> None:
    with Intruder(averager) as intruder:
        intruder.train(header(), torch.full((5,), 2.0))
        intruder.connection.receive_values(torch.empty(5))
        intruder.send(torch.full((5,), 9.0))
        with pytest.raises(TrainingError):
            list(intruder.events)
    assert averager.center.values[0].tolist() == [2.0] * 5


@pytest.mark.parametrize("early", [True, False], ids=["before the end", "after it"])
def test_a_first_header_that_never_becomes_whole_is_told_that_the_run_has_ended(
    averager: Averager, clock: VirtualClock, *, early: bool
) -> None:
    connection = dial(averager)
    for step in ("call", "end") if early else ("end", "call"):
        if step == "end":
            averager.fail(TrainingError("over"))
            with pytest.raises(TrainingError, match="over"):
                drive(averager)
        else:
            assert connection.introduce(averager.address.token)
            connection._send(header_message(JOIN)[:12])
    clock.run(averager, 2.0)
    assert connection.receive_header() == {"stopped": "the run ended: over"}
    connection.close()


def test_half_a_contribution_never_reaches_the_center(averager: Averager) -> None:
    with Intruder(averager) as intruder:
        intruder.train(header(), torch.full((4,), 2.0))
        with pytest.raises(TrainingError):
            list(intruder.events)
    assert averager.center.values[0].tolist() == [1.0] * 5
