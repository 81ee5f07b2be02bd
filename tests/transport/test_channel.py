"""Channels of messages, over a stream that a test writes."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import pytest
from every_row import every, every_row
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparkdl.averager.headers import failure_header, raise_reported_failure
from sparkdl.errors import CollectiveError, TrainingError, WorkerError
from sparkdl.transport import channel as channel_module
from sparkdl.transport.channel import (
    HEADER,
    PAUSE,
    UNREAD_BYTES,
    UNREAD_HEADERS,
    Channel,
    Conversation,
    LeftError,
)
from sparkdl.transport.framing import MAX_HEADER_BYTES, header_message, values_prefix


class Wire:
    """A socket that delivers what arrives in given pieces, and takes a given number of bytes."""

    def __init__(self, pieces: Iterable[bytes] = (), takes: Iterable[int | None] = ()) -> None:
        self.arriving = deque(pieces)
        self.sent = b""
        self.offers: list[int] = []
        self.closed = self.ended = False
        self.broken = False
        self._takes = deque(takes)

    def fileno(self) -> int:
        return -1

    def recv_into(self, buffer: memoryview) -> int:
        """One piece at most, as much as there is room for; an empty one is the end."""
        if self.broken:
            raise ConnectionResetError("reset")
        if not self.arriving:
            raise BlockingIOError
        piece = self.arriving.popleft()
        count = min(len(buffer), len(piece))
        buffer[:count] = piece[:count]
        if left := piece[count:]:
            self.arriving.appendleft(left)
        return count

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """As much as it is to take next; everything in the end."""
        if self.broken:
            raise BrokenPipeError("broken")
        octets = b"".join(buffers)
        self.offers.append(len(buffers))
        takes = self._takes.popleft() if self._takes else len(octets)
        if takes is None:
            raise BlockingIOError
        self.sent += octets[:takes]
        return min(takes, len(octets))

    def shutdown(self, how: int) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True


def values(octets: bytes) -> bytes:
    return bytes(values_prefix(len(octets))) + octets


def channel_over(
    *pieces: bytes, takes: Iterable[int | None] = (), staging: int = 64
) -> tuple[Channel, Wire]:
    wire = Wire(pieces, takes)
    return Channel(cast(Any, wire), memoryview(bytearray(staging)), lambda channel: None), wire


def receive_all(channel: Channel) -> None:
    """Receive until nothing is left that is wanted."""
    wire: Any = channel.connected
    while channel.receive() or (channel.listens and wire.arriving):
        pass


def cut(octets: bytes, places: Iterable[int]) -> list[bytes]:
    """The same bytes in pieces."""
    bounds = [0, *sorted(set(places)), len(octets)]
    return [octets[a:b] for a, b in itertools.pairwise(bounds) if a < b]


# A header, values in two messages, a pause, and a header once more, twice over.
MESSAGES = (
    header_message({"window": 1})
    + values(bytes(range(20)))
    + values(bytes(range(100, 130)))
    + header_message({})
) * 2


def listen(received: list[Any]) -> Conversation:
    """Take note of everything that ``MESSAGES`` has."""
    for _ in range(2):
        received.append((yield HEADER))
        for size in (20, 30):
            place = bytearray(size)
            assert (yield memoryview(place)) is None
            received.append(bytes(place))
        received.append((yield PAUSE))
        received.append((yield HEADER))


EXPECTED = [{"window": 1}, bytes(range(20)), bytes(range(100, 130)), "woken", {}] * 2


def converse(pieces: Iterable[bytes], staging: int = 64) -> list[Any]:
    """What a conversation receives of some pieces; it is woken as it pauses."""
    received: list[Any] = []
    channel, _ = channel_over(*pieces, staging=staging)
    channel.begin(listen(received))
    for _ in range(2):
        receive_all(channel)
        assert not channel.listens
        channel.wake("woken")
    receive_all(channel)
    return received


@settings(max_examples=200)
@given(st.sets(st.integers(1, len(MESSAGES) - 1)), st.integers(1, 2 * len(MESSAGES)))
@example(places=set(range(len(MESSAGES))), staging=64)
def test_wherever_the_bytes_are_cut_the_conversation_is_the_same(
    places: set[int], staging: int
) -> None:
    assert converse(cut(MESSAGES, places), staging) == EXPECTED


class TestPausing:
    """Nothing is received meanwhile, and no wake is lost."""

    def test_what_arrives_meanwhile_is_left_at_the_other_end(self) -> None:
        received: list[Any] = []
        channel, wire = channel_over(MESSAGES[:80], MESSAGES[80:], staging=1000)
        channel.begin(listen(received))
        receive_all(channel)
        assert not channel.listens
        assert not channel.has_leftover
        assert wire.arriving
        channel.wake("woken")
        assert channel.has_leftover

    def test_a_wake_from_within_the_conversation_is_not_lost(self) -> None:
        received: list[Any] = []

        def conversation() -> Conversation:
            received.append((yield HEADER))
            channel.wake("at once")
            received.append((yield PAUSE))

        channel, _ = channel_over(header_message({}))
        channel.begin(conversation())
        receive_all(channel)
        assert received == [{}, "at once"]


class TestRedirecting:
    """Values whose place is needed are received elsewhere, from any moment on."""

    @every("before", range(len(values(b"x" * 20)) + 1))
    def test_nothing_of_what_comes_later_is_in_the_first_place(self, before: int) -> None:
        octets = values(b"x" * 20)
        place, elsewhere = bytearray(20), bytearray(64)
        received: list[Any] = []

        def conversation() -> Conversation:
            yield memoryview(place)
            received.append((yield HEADER))

        channel, wire = channel_over(*cut(octets[:before], []))
        channel.begin(conversation())
        receive_all(channel)
        came = bytes(place)
        channel.redirect(lambda size: memoryview(elsewhere)[:size])
        wire.arriving.extend(cut(octets[before:] + header_message({"and": "on"}), []))
        receive_all(channel)
        assert bytes(place) == came
        assert came.count(b"x") == max(0, before - (len(octets) - 20))
        assert received == [{"and": "on"}]


class TestTheEnd:
    """When the other end is gone, or has nothing more to say."""

    @every("act", [Channel.receive, Channel.flush])
    def test_so_is_a_connection_that_breaks(self, act: Callable[[Channel], bool]) -> None:
        channel, wire = channel_over()
        channel.begin(listen([]))
        channel.send_header({})
        wire.broken = True
        with pytest.raises(LeftError, match=r"the connection broke: (reset|broken)"):
            act(channel)

    @every("kind", ["header", "values"])
    @every("staging", [4, 64])
    def test_the_rest_of_a_message_is_thrown_away_once_the_conversation_has_ended(
        self, kind: str, staging: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(channel_module, "IN_PLACE_BYTES", 8)
        octets = header_message({"n": 1}) if kind == "header" else values(b"x" * 20)
        for came in range(1, len(octets)):
            place = bytearray(20)

            def conversation(place: bytearray = place) -> Conversation:
                yield HEADER if kind == "header" else memoryview(place)
                raise AssertionError("it has ended")

            channel, wire = channel_over(octets[:came], staging=staging)
            channel.begin(conversation())
            receive_all(channel)
            channel.end_conversation()
            before = bytes(place)
            wire.arriving.extend([octets[came:], octets])
            receive_all(channel)
            assert bytes(place) == before
            assert not wire.arriving


class TestBudget:
    """Nobody keeps the others waiting."""

    def test_who_sends_much_is_received_from_in_portions(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(channel_module, "BUDGET_BYTES", 100)

        def conversation() -> Conversation:
            while True:
                yield HEADER

        messages = header_message({"a": 1}) * 50
        channel, wire = channel_over(messages, staging=10)
        channel.begin(conversation())
        left = [len(messages)]
        while channel.receive():
            left.append(sum(map(len, wire.arriving)))
        # It stops with the first piece, of ten bytes at most, that is beyond the budget.
        assert all(100 <= a - b < 110 for a, b in itertools.pairwise(left))
        assert 0 < left[-1] <= 100
        assert not wire.arriving


class TestWhatNoWorkerSends:
    """Messages that do not belong where they arrive are refused in words."""

    @staticmethod
    def send(octets: bytes, need: Any = HEADER, staging: int = 64) -> None:
        def conversation() -> Conversation:
            yield need

        channel, _ = channel_over(octets, staging=staging)
        channel.check = raise_reported_failure
        channel.begin(conversation())
        receive_all(channel)

    @every_row(
        (b"\x03\x00\x00\x00\x00", "a message of unknown kind 3 arrived"),
        (b"GET / HTTP/1.1", "a message of unknown kind 71 arrived"),
        (
            b"\x01" + (MAX_HEADER_BYTES + 1).to_bytes(4, "big"),
            f"a header of {MAX_HEADER_BYTES + 1} bytes arrived, more than {MAX_HEADER_BYTES}",
        ),
        (values(b"abc"), "values arrived where a header was expected"),
        (values(b""), "values arrived where a header was expected"),
        *(
            (b"\x01" + len(said).to_bytes(4, "big") + said, "without a readable header")
            for said in (b"", b"[]", b"3", b"null", b"{}}", b"\xff\xfe", b"[" * 100_000)
        ),
    )
    def test_where_a_header_is_due(self, octets: bytes, words: str) -> None:
        with pytest.raises(TrainingError, match=words):
            self.send(octets)

    @every_row(
        *(
            (bytes(values_prefix(size)), f"^{size} bytes of values arrived, expected 20; ")
            for size in (0, 19, 21, 2**32 - 1)
        ),
        (header_message({"window": 1}), r"in the middle of values: .'window': 1"),
    )
    def test_where_values_are_due(self, octets: bytes, words: str) -> None:
        with pytest.raises(TrainingError, match=words):
            self.send(octets, memoryview(bytearray(20)))

    def test_a_failure_that_a_worker_reports_is_raised_even_where_values_are_due(self) -> None:
        failure = WorkerError("its loss is gone", rank=3, epoch=1, step=7, worker_traceback="there")
        place = memoryview(bytearray(20))
        with pytest.raises(WorkerError, match="its loss is gone"):
            self.send(header_message(failure_header(failure)), place)
        with pytest.raises(CollectiveError, match="the ring is broken"):
            self.send(header_message({"broken": "the ring is broken"}), place)

    @settings(max_examples=300)
    @given(st.binary(max_size=200))
    def test_whatever_arrives_is_understood_or_refused(self, octets: bytes) -> None:
        with contextlib.suppress(TrainingError, LeftError):
            self.send(octets)


class TestSending:
    """Messages go out whole and in order, however little is taken at a time."""

    @given(
        messages=st.lists(st.lists(st.binary(max_size=30), max_size=5), max_size=6),
        takes=st.lists(st.none() | st.integers(1, 20)),
    )
    def test_whatever_is_taken(self, messages: list[list[bytes]], takes: list[int | None]) -> None:
        channel, wire = channel_over(takes=takes)
        told: list[tuple[int, int]] = []
        for number, frames in enumerate(messages):
            view = [memoryview(frame) for frame in frames]
            channel.send(view, lambda number=number: told.append((number, len(wire.sent))))
        flushes = 0
        while channel.sends:
            channel.flush()
            flushes += 1
            assert flushes <= len(takes) + 1
        assert wire.sent == b"".join(b"".join(frames) for frames in messages)
        ends = itertools.accumulate(len(b"".join(frames)) for frames in messages)
        assert told == list(enumerate(ends))

    def test_a_header_on_its_way_is_no_sign_that_the_other_end_takes_it(self) -> None:
        channel, wire = channel_over()
        channel.send_header({"waiting": True})
        assert not channel.flush()
        assert wire.sent


ASKED = 40 * UNREAD_HEADERS


def answers(channel: Channel, answer: dict[str, Any], asked: list[int]) -> Conversation:
    while True:
        said = yield HEADER
        asked.append(said["ask"])
        channel.send_header(answer)


@every("size", [1, UNREAD_BYTES // 4])
def test_answers_that_nobody_takes_are_bounded_in_number_and_in_bytes(size: int) -> None:
    asked: list[int] = []
    questions = b"".join(header_message({"ask": number}) for number in range(ASKED))
    channel, _ = channel_over(questions, takes=[None] * ASKED, staging=1 << 16)
    channel.begin(answers(channel, {"answer": "x" * size}, asked))
    receive_all(channel)
    assert not channel.listens
    assert len(asked) <= UNREAD_HEADERS
    assert (len(asked) - 1) * size <= UNREAD_BYTES


def test_values_on_their_way_do_not_keep_headers_from_being_received() -> None:
    asked: list[int] = []
    channel, _ = channel_over(header_message({"ask": 1}), takes=[None])
    channel.begin(answers(channel, {"answer": 1}, asked))
    channel.send([memoryview(b"prefix"), memoryview(bytes(2 * UNREAD_BYTES))])
    receive_all(channel)
    assert asked == [1]


def test_one_that_leaves_is_drained_whatever_it_has_not_read() -> None:
    channel, _ = channel_over(takes=[None] * ASKED)
    channel.begin(answers(channel, {}, []))
    for _ in range(UNREAD_HEADERS + 1):
        channel.send_header({})
    assert not channel.listens
    channel.end_conversation()
    assert channel.listens
