"""Nobody uninvited: what the averager's port answers to calls with and without the job's token."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest
import torch
from toys import drive

from sparkdl.averager import Averager, AveragerAddress, AveragerClient
from sparkdl.averager.codec import FullPrecision
from sparkdl.averager.wire import SCHEMA, pack_header, to_message, unpack_header
from sparkdl.errors import SparkDLError, StoppedError, TrainingError
from sparkdl.feed.facts import DataFacts, ShardFacts
from sparkdl.protocols import Segment

LAYOUT = (Segment("parameters", torch.float32, 5),)
DEADLINE_S = 6.0
JOIN = {"join": 0, "host": "here"}
COLUMN = {
    "nulls": 0,
    "null_elements": 0,
    "fractions": 0,
    "shortest": None,
    "longest": None,
    "smallest": 0.5,
    "largest": 2,
}
SHARD = {"rows": 3, "columns": [COLUMN]}
WINDOW = {"rank": 0, "epoch": 1, "step": 1, "examples": 2, "loss_sum": 0.5, "last": False}


@pytest.fixture
def averager() -> Iterator[Averager]:
    with Averager(LAYOUT, [torch.ones(5)], 1, FullPrecision(), deadline_s=DEADLINE_S) as averager:
        yield averager


def options(token: str | None) -> flight.FlightCallOptions:
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    return flight.FlightCallOptions(headers=headers, timeout=5)


def exchange(averager: Averager, call: flight.FlightCallOptions) -> object:
    with flight.FlightClient(averager.address.uri) as client:
        descriptor = flight.FlightDescriptor.for_command(pack_header(JOIN).to_pybytes())
        writer, reader = client.do_exchange(descriptor, call)
        with contextlib.suppress(pa.ArrowException):
            writer.begin(SCHEMA)
        return reader.read_chunk()


CALLS: dict[str, Any] = {
    "do_get": lambda client, call: client.do_get(flight.Ticket(b"x"), call).read_all(),
    "do_put": lambda client, call: put(client, call),
    "list_flights": lambda client, call: list(client.list_flights(b"", call)),
    "do_action": lambda client, call: list(client.do_action(flight.Action("x", b""), call)),
    "list_actions": lambda client, call: list(client.list_actions(call)),
    "get_flight_info": lambda client, call: client.get_flight_info(
        flight.FlightDescriptor.for_path("x"), call
    ),
    "get_schema": lambda client, call: client.get_schema(
        flight.FlightDescriptor.for_path("x"), call
    ),
}


def put(client: flight.FlightClient, call: flight.FlightCallOptions) -> None:
    writer, reader = client.do_put(flight.FlightDescriptor.for_path("x"), SCHEMA, call)
    writer.done_writing()
    reader.read()
    writer.close()


WRONG_TOKENS = [None, "", "wrong", "Bearer"]


@pytest.mark.parametrize("token", WRONG_TOKENS)
def test_an_exchange_without_the_jobs_token_is_refused(
    averager: Averager, token: str | None
) -> None:
    with pytest.raises(flight.FlightUnauthenticatedError):
        exchange(averager, options(token))


def test_a_token_that_is_right_but_for_its_end_is_refused(averager: Averager) -> None:
    for token in (averager.address.token[:-1], averager.address.token + "x"):
        with pytest.raises(flight.FlightUnauthenticatedError):
            exchange(averager, options(token))


@pytest.mark.parametrize("name", CALLS)
def test_other_flight_methods_without_the_token_are_refused(averager: Averager, name: str) -> None:
    with (
        flight.FlightClient(averager.address.uri) as client,
        # get_schema passes the refusal on as an OSError with the same text
        pytest.raises((flight.FlightUnauthenticatedError, OSError), match="this job's token"),
    ):
        CALLS[name](client, options("wrong"))


@pytest.mark.parametrize("name", CALLS)
def test_other_flight_methods_do_nothing_with_the_token_either(
    averager: Averager, name: str
) -> None:
    with flight.FlightClient(averager.address.uri) as client:
        try:
            answer = CALLS[name](client, options(averager.address.token))
        except (pa.ArrowException, NotImplementedError):
            return
    assert not answer


def test_a_handshake_gives_no_token_away(averager: Averager) -> None:
    with (
        flight.FlightClient(averager.address.uri) as client,
        pytest.raises(pa.ArrowException),
    ):
        client.authenticate_basic_token(b"user", b"password", flight.FlightCallOptions(timeout=5))


def test_a_refused_call_does_not_end_the_run(averager: Averager) -> None:
    with pytest.raises(flight.FlightUnauthenticatedError):
        exchange(averager, options("wrong"))
    segments = [torch.zeros(5)]
    with (
        ThreadPoolExecutor(1) as pool,
        AveragerClient(averager.address, 0, FullPrecision(), deadline_s=5) as client,
    ):
        driver = pool.submit(drive, averager)
        client.start(ShardFacts(2, ()), segments, LAYOUT)
        client.finish()
        assert driver.result(timeout=10) == [DataFacts((2,), ())]
    assert segments[0].tolist() == [1.0] * 5


def test_a_worker_with_a_wrong_token_is_stopped(averager: Averager) -> None:
    address = AveragerAddress(averager.address.uri, "wrong")
    with (
        pytest.raises(StoppedError, match="does not carry this job's token"),
        AveragerClient(address, 0, FullPrecision(), deadline_s=5) as client,
    ):
        client.start(ShardFacts(2, ()), [torch.zeros(5)], LAYOUT)


def test_tokens_differ_from_run_to_run_and_are_not_shown() -> None:
    tokens = set()
    for _ in range(3):
        with Averager(LAYOUT, [torch.ones(5)], 1, FullPrecision()) as averager:
            tokens.add(averager.address.token)
            assert averager.address.token not in repr(averager.address)
    assert len(tokens) == 3
    assert all(len(token) >= 40 for token in tokens)


def test_the_port_is_bound_to_the_host_asked_for() -> None:
    with Averager(LAYOUT, [torch.ones(5)], 1, FullPrecision(), host="127.0.0.1") as averager:
        port = int(averager.address.uri.rsplit(":", 1)[1])
        assert averager.address.uri == f"grpc://127.0.0.1:{port}"
        # The whole of 127/8 is this machine: another address of it must not answer.
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=2)


def test_the_advertised_host_is_the_one_in_the_address() -> None:
    with Averager(
        LAYOUT, [torch.ones(5)], 1, FullPrecision(), advertised_host="localhost"
    ) as averager:
        assert averager.address.uri.startswith("grpc://localhost:")


Message = bytes | pa.RecordBatch | None
"""Bytes are a header, None ends the stream."""


class Intruder:
    """Someone with the token who speaks the protocol badly."""

    def __init__(self, averager: Averager, hello: bytes = pack_header(JOIN).to_pybytes()) -> None:
        self.averager = averager
        self.events = averager.events()
        self.client = flight.FlightClient(averager.address.uri)
        call = flight.FlightCallOptions(
            headers=[(b"authorization", f"Bearer {averager.address.token}".encode())],
            timeout=DEADLINE_S,
        )
        descriptor = flight.FlightDescriptor.for_command(hello)
        self.writer, self.reader = self.client.do_exchange(descriptor, call)

    def __enter__(self) -> Intruder:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.cancel()
        with contextlib.suppress(pa.ArrowException):
            self.writer.close()
        self.client.close()

    def train(self, *messages: Message) -> None:
        """Start as a worker does, take the center, then send these."""
        self._begin(messages)
        self._send(pack_header({"shard": SHARD}).to_pybytes())
        assert isinstance(next(self.events), DataFacts)
        self.averager.start()
        while "credit" not in unpack_header(self.reader.read_chunk().app_metadata):
            pass
        assert self.reader.read_chunk().data is not None
        self._send(*messages)

    def send(self, *messages: Message) -> None:
        """Join, then send these."""
        self._begin(messages)
        self._send(*messages)

    def _begin(self, messages: tuple[Message, ...]) -> None:
        schema = next((m.schema for m in messages if isinstance(m, pa.RecordBatch)), SCHEMA)
        self.writer.begin(schema)

    def _send(self, *messages: Message) -> None:
        # The averager may end the exchange at the first message already.
        with contextlib.suppress(pa.ArrowException):
            for message in messages:
                if isinstance(message, bytes):
                    self.writer.write_metadata(pa.py_buffer(message))
                elif message is None:
                    self.writer.done_writing()
                else:
                    self.writer.write_batch(message)


def header(**changes: Any) -> bytes:
    octets: bytes = pack_header({"window": {**WINDOW, **changes}}).to_pybytes()
    return octets


def shard(**changes: Any) -> bytes:
    octets: bytes = pack_header({"shard": {**SHARD, **changes}}).to_pybytes()
    return octets


def column(**changes: Any) -> bytes:
    return shard(columns=[COLUMN, {**COLUMN, **changes}])


WRONG_SHARDS: dict[str, tuple[Message, ...]] = {
    "no-json": (b"\x00\xff{",),
    "json-but-no-object": (b"[1, 2]",),
    "unknown-header": (b'{"hello": 1}',),
    "window-first": (header(), to_message(torch.ones(5))),
    "finish-first": (b'{"finish": true}',),
    "wrong-after-reading": (b'{"reading": 5}', b'{"reading": 9}', b'{"hello": 1}'),
    "shard-no-object": (b'{"shard": 7}',),
    "shard-is-null": (b'{"shard": null}',),
    "shard-without-fields": (b'{"shard": {}}',),
    "shard-with-extra-field": (shard(extra=1),),
    "rows-is-text": (shard(rows="many"),),
    "rows-is-a-fraction": (shard(rows=2.5),),
    "rows-is-a-boolean": (shard(rows=True),),
    "columns-is-an-object": (shard(columns={}),),
    "column-no-object": (shard(columns=[COLUMN, 3]),),
    "column-without-fields": (shard(columns=[{}]),),
    "column-with-extra-field": (column(extra=1),),
    "nulls-is-null": (column(nulls=None),),
    "fractions-is-text": (column(fractions="some"),),
    "longest-is-a-fraction": (column(longest=1.5),),
    "largest-is-text": (column(largest="big"),),
    "failure-without-fields": (b'{"failure": {}}',),
    "values-instead-of-header": (to_message(torch.ones(5)),),
    "stream-ends-early": (None,),
    "stream-ends-while-reading": (b'{"reading": 5}', None),
}


@pytest.mark.parametrize("name", WRONG_SHARDS)
def test_a_wrong_message_before_training_ends_the_run_at_once(
    averager: Averager, name: str
) -> None:
    started = time.monotonic()
    with Intruder(averager) as intruder:
        intruder.send(*WRONG_SHARDS[name])
        with pytest.raises(TrainingError, match=r"rank 0|header|a worker sent"):
            list(intruder.events)
    assert time.monotonic() - started < DEADLINE_S - 2


def test_a_second_shard_where_a_window_is_due_ends_the_run(averager: Averager) -> None:
    with Intruder(averager) as intruder:
        intruder.train(shard())
        with pytest.raises(TrainingError, match="rank 0 sent a header that no worker sends"):
            list(intruder.events)


WRONG_MESSAGES: dict[str, tuple[Message, ...]] = {
    "no-json": (b"\x00\xff{",),
    "json-but-no-object": (b"[1, 2]",),
    "unknown-header": (b'{"hello": 1}',),
    "window-without-fields": (b'{"window": {}}',),
    "window-with-extra-field": (header(extra=1),),
    "window-no-object": (b'{"window": 7}',),
    "another-rank": (header(rank=1),),
    "examples-is-text": (header(examples="many"), to_message(torch.ones(5))),
    "examples-is-negative": (header(examples=-4), to_message(torch.ones(5))),
    "loss-is-text": (header(loss_sum="low", last=True), to_message(torch.ones(5))),
    "failure-without-fields": (b'{"failure": {}}',),
    "failure-no-object": (b'{"failure": 3}',),
    "failure-with-extra-field": (b'{"failure": {"non_finite": false, "message": "", "x": 1}}',),
    "header-instead-of-values": (header(), header()),
    "values-without-header": (to_message(torch.ones(5)),),
    "too-few-values": (header(), to_message(torch.ones(4))),
    "too-many-values": (header(), to_message(torch.ones(6))),
    "other-schema": (header(), pa.record_batch({"bytes": pa.array([0.5] * 20)})),
    "stream-ends-early": (header(), None),
}


@pytest.mark.parametrize("name", WRONG_MESSAGES)
def test_wrong_messages_from_a_token_holder_end_the_run_at_once(
    averager: Averager, name: str
) -> None:
    started = time.monotonic()
    with Intruder(averager) as intruder:
        intruder.train(*WRONG_MESSAGES[name])
        with pytest.raises(SparkDLError):
            list(intruder.events)
    assert time.monotonic() - started < DEADLINE_S - 2


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"junk",
        b"{}",
        b'{"join": "0", "host": "h"}',
        b'{"join": 0}',
        b'{"join": 5, "host": "h"}',
        b'{"failure": {}}',
        b'{"failure": 3}',
    ],
)
def test_a_wrong_first_message_is_answered_with_an_error(averager: Averager, hello: bytes) -> None:
    started = time.monotonic()
    with Intruder(averager, hello) as intruder:
        with contextlib.suppress(pa.ArrowException):
            intruder.writer.begin(SCHEMA)
        with pytest.raises(pa.ArrowException):
            intruder.reader.read_chunk()
    assert time.monotonic() - started < DEADLINE_S - 2


def test_messages_beyond_the_plan_never_reach_the_center(averager: Averager) -> None:
    with Intruder(averager) as intruder:
        intruder.train(header(), to_message(torch.full((5,), 2.0)))
        intruder.reader.read_chunk()
        intruder.writer.write_batch(to_message(torch.full((5,), 9.0)))
        with pytest.raises(TrainingError):
            list(intruder.events)
    assert averager.center[0].tolist() == [2.0] * 5


def test_half_a_contribution_never_reaches_the_center(averager: Averager) -> None:
    with Intruder(averager) as intruder:
        intruder.train(header(), to_message(torch.full((4,), 2.0)))
        with pytest.raises(TrainingError):
            list(intruder.events)
    assert averager.center[0].tolist() == [1.0] * 5
