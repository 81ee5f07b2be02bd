"""One worker's messages, however they are cut: what a conversation gets, and what it never does."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.averager import channel as channel_module
from sparkdl.averager.channel import (
    FRAMES_AT_ONCE,
    HEADER,
    PAUSE,
    Channel,
    Conversation,
    LeftError,
)
from sparkdl.averager.headers import failure_header
from sparkdl.errors import CollectiveError, TrainingError, WorkerError
from sparkdl.transport.framing import MAX_HEADER_BYTES, header_message, values_prefix


class Wire:
    """A stream that delivers what arrives in given pieces, and takes a given number of bytes."""

    short_is_all = False

    def __init__(self, pieces: Iterable[bytes] = (), takes: Iterable[int | None] = ()) -> None:
        self.arriving = deque(pieces)
        self.sent = b""
        self.offers: list[int] = []
        self.closed = self.ended = False
        self.broken = False
        self._takes = deque(takes)

    def fileno(self) -> int:
        return -1

    def receive(self, into: Sequence[memoryview]) -> int | None:
        """One piece at most, as much as there is room for; an empty one is the end."""
        if self.broken:
            raise ConnectionResetError("reset")
        if not self.arriving:
            return None
        piece = self.arriving.popleft()
        count, left = 0, piece
        for buffer in into:
            size = min(len(buffer), len(left))
            buffer[:size] = left[:size]
            count, left = count + size, left[size:]
        if left:
            self.arriving.appendleft(left)
        return count

    def send(self, buffers: Sequence[memoryview]) -> int | None:
        """As much as it is to take next; everything in the end."""
        if self.broken:
            raise BrokenPipeError("broken")
        octets = b"".join(buffers)
        self.offers.append(len(buffers))
        takes = self._takes.popleft() if self._takes else len(octets)
        if takes is None:
            return None
        self.sent += octets[:takes]
        return min(takes, len(octets))

    def end_sending(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True


def values(octets: bytes) -> bytes:
    return bytes(values_prefix(len(octets))) + octets


def channel_over(
    *pieces: bytes, takes: Iterable[int | None] = (), staging: int = 64
) -> tuple[Channel, Wire]:
    wire = Wire(pieces, takes)
    return Channel(wire, memoryview(bytearray(staging)), lambda channel: None), wire


def receive_all(channel: Channel) -> None:
    """Receive until nothing is left that is wanted."""
    while channel.receive():
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


def listen(heard: list[Any]) -> Conversation:
    """Take note of everything that ``MESSAGES`` has."""
    for _ in range(2):
        heard.append((yield HEADER))
        for size in (20, 30):
            place = bytearray(size)
            assert (yield memoryview(place)) is None
            heard.append(bytes(place))
        heard.append((yield PAUSE))
        heard.append((yield HEADER))


EXPECTED = [{"window": 1}, bytes(range(20)), bytes(range(100, 130)), "woken", {}] * 2


def converse(pieces: Iterable[bytes], staging: int = 64) -> list[Any]:
    """What a conversation hears of some pieces, and is woken as it pauses."""
    heard: list[Any] = []
    channel, _ = channel_over(*pieces, staging=staging)
    channel.begin(listen(heard))
    for _ in range(2):
        receive_all(channel)
        assert not channel.listens
        channel.wake("woken")
    receive_all(channel)
    return heard


class TestCutting:
    """The same bytes give the same conversation wherever they are cut."""

    @pytest.mark.parametrize("place", range(1, len(MESSAGES)))
    def test_at_every_place(self, place: int) -> None:
        assert converse(cut(MESSAGES, [place])) == EXPECTED

    @settings(deadline=None, max_examples=200)
    @given(
        places=st.sets(st.integers(1, len(MESSAGES) - 1)),
        staging=st.integers(1, 2 * len(MESSAGES)),
    )
    def test_at_any_places_whatever_there_is_room_for(self, places: set[int], staging: int) -> None:
        assert converse(cut(MESSAGES, places), staging) == EXPECTED

    def test_byte_by_byte(self) -> None:
        assert converse(cut(MESSAGES, range(len(MESSAGES)))) == EXPECTED


class TestPausing:
    """Nothing is received meanwhile, and no wake is lost."""

    def test_what_arrives_meanwhile_is_left_at_the_other_end(self) -> None:
        heard: list[Any] = []
        channel, wire = channel_over(MESSAGES[:80], MESSAGES[80:], staging=1000)
        channel.begin(listen(heard))
        receive_all(channel)
        assert not channel.listens
        assert not channel.has_left
        assert wire.arriving
        channel.wake("woken")
        assert channel.has_left

    def test_what_has_arrived_with_it_is_heard_afterwards(self) -> None:
        heard: list[Any] = []
        channel, wire = channel_over(MESSAGES, staging=1000)
        channel.begin(listen(heard))
        receive_all(channel)
        assert not wire.arriving
        channel.wake("woken")
        receive_all(channel)
        assert heard == EXPECTED[:-2]

    def test_a_wake_before_the_pause_is_not_lost(self) -> None:
        heard: list[Any] = []
        channel, wire = channel_over(MESSAGES)
        channel.begin(listen(heard))
        channel.wake("woken")
        channel.wake("woken")
        receive_all(channel)
        assert heard == EXPECTED
        assert not wire.arriving

    def test_a_wake_from_within_the_conversation_is_not_lost(self) -> None:
        heard: list[Any] = []

        def conversation() -> Conversation:
            heard.append((yield HEADER))
            channel.wake("at once")
            heard.append((yield PAUSE))

        channel, _ = channel_over(header_message({}))
        channel.begin(conversation())
        receive_all(channel)
        assert heard == [{}, "at once"]

    def test_wakes_are_in_order_and_one_a_pause(self) -> None:
        heard: list[Any] = []

        def conversation() -> Conversation:
            while True:
                heard.append((yield PAUSE))
                heard.append((yield HEADER))

        channel, _ = channel_over(header_message({"n": 1}), header_message({"n": 2}))
        channel.begin(conversation())
        for number in range(3):
            channel.wake(number)
        receive_all(channel)
        assert heard == [0, {"n": 1}, 1, {"n": 2}, 2]

    def test_nobody_is_woken_who_has_ended(self) -> None:
        channel, _ = channel_over()
        channel.begin(listen([]))
        channel.end_conversation()
        channel.wake("late")
        assert channel.listens


class TestRedirecting:
    """Values whose place is needed are received elsewhere, from any moment on."""

    @pytest.mark.parametrize("before", range(len(values(b"x" * 20)) + 1))
    def test_nothing_of_what_comes_later_is_in_the_first_place(self, before: int) -> None:
        octets = values(b"x" * 20)
        place, elsewhere = bytearray(20), bytearray(64)
        heard: list[Any] = []

        def conversation() -> Conversation:
            yield memoryview(place)
            heard.append((yield HEADER))

        channel, wire = channel_over(*cut(octets[:before], []))
        channel.begin(conversation())
        receive_all(channel)
        came = bytes(place)
        channel.redirect(memoryview(elsewhere))
        wire.arriving.extend(cut(octets[before:] + header_message({"and": "on"}), []))
        receive_all(channel)
        assert bytes(place) == came
        assert came.count(b"x") == max(0, before - (len(octets) - 20))
        assert heard == [{"and": "on"}]

    @pytest.mark.parametrize("need", [HEADER, PAUSE], ids=["a header", "a pause"])
    def test_who_waits_for_something_else_goes_on_waiting_for_it(self, need: Any) -> None:
        heard: list[Any] = []

        def conversation() -> Conversation:
            heard.append((yield need))

        octets = header_message({"a": 1})
        channel, wire = channel_over(octets[:9])
        channel.begin(conversation())
        receive_all(channel)
        channel.redirect(memoryview(bytearray(64)))
        wire.arriving.append(octets[9:])
        channel.wake({"a": 1}) if need is PAUSE else receive_all(channel)
        assert heard == [{"a": 1}]

    def test_a_header_on_its_way_is_received_all_the_same(self) -> None:
        octets = header_message({"failure": 1})

        def conversation() -> Conversation:
            yield memoryview(bytearray(20))

        channel, wire = channel_over(octets[:9])
        channel.begin(conversation())
        receive_all(channel)
        channel.redirect(memoryview(bytearray(20)))
        wire.arriving.append(octets[9:])
        with pytest.raises(TrainingError):
            receive_all(channel)


class TestWhatNoWorkerSends:
    """Messages that do not belong where they arrive are refused in words."""

    @staticmethod
    def send(octets: bytes, need: Any = HEADER, staging: int = 64) -> None:
        def conversation() -> Conversation:
            yield need

        channel, _ = channel_over(octets, staging=staging)
        channel.begin(conversation())
        receive_all(channel)

    @pytest.mark.parametrize(
        ("octets", "words"),
        [
            (b"\x03\x00\x00\x00\x00", "a message of unknown kind 3 arrived"),
            (b"GET / HTTP/1.1", "a message of unknown kind 71 arrived"),
            (
                b"\x01" + (MAX_HEADER_BYTES + 1).to_bytes(4, "big"),
                f"a header of {MAX_HEADER_BYTES + 1} bytes arrived, over {MAX_HEADER_BYTES}",
            ),
            (values(b"abc"), "values arrived where a header was due"),
            (values(b""), "values arrived where a header was due"),
            (b"\x01\x00\x00\x00\x00", "without a readable header"),
            (b"\x01\x00\x00\x00\x02[]", "without a readable header"),
            (b"\x01\x00\x00\x00\x03{}}", "without a readable header"),
            (b"\x01\x00\x01\x86\xa0" + b"[" * 100_000, "without a readable header"),
        ],
    )
    def test_where_a_header_is_due(self, octets: bytes, words: str) -> None:
        with pytest.raises(TrainingError, match=words):
            self.send(octets)

    @pytest.mark.parametrize("size", [0, 19, 21, 2**32 - 1])
    def test_values_of_another_length(self, size: int) -> None:
        with pytest.raises(TrainingError, match=f"^{size} bytes of values .* where 20 belong; .*"):
            self.send(bytes(values_prefix(size)), memoryview(bytearray(20)))

    def test_a_header_where_values_are_due(self) -> None:
        with pytest.raises(TrainingError, match=r"in the middle of values: .'window': 1"):
            self.send(header_message({"window": 1}), memoryview(bytearray(20)))

    def test_a_failure_that_a_worker_reports_is_raised_even_where_values_are_due(self) -> None:
        failure = WorkerError("its loss is gone", rank=3, epoch=1, step=7, worker_traceback="there")
        place = memoryview(bytearray(20))
        with pytest.raises(WorkerError, match="its loss is gone"):
            self.send(header_message(failure_header(failure)), place)
        with pytest.raises(CollectiveError, match="the ring is broken"):
            self.send(header_message({"broken": "the ring is broken"}), place)

    @settings(deadline=None, max_examples=300)
    @given(st.binary(max_size=200))
    def test_whatever_arrives_is_understood_or_refused(self, octets: bytes) -> None:
        with contextlib.suppress(TrainingError, LeftError):
            self.send(octets)

    def test_nothing_is_allocated_before_a_length_was_looked_at(self) -> None:
        """A header's length is bounded, and values arrive in what their receiver has ready."""
        with pytest.raises(TrainingError):
            self.send(b"\x01\xff\xff\xff\xff")


class TestTheEnd:
    """When the other end is gone, or has nothing more to say."""

    def test_an_end_of_the_stream_is_the_others_leaving(self) -> None:
        channel, _ = channel_over(MESSAGES[:30], b"")
        channel.begin(listen([]))
        with pytest.raises(LeftError, match="the other end closed the connection"):
            receive_all(channel)

    @pytest.mark.parametrize("act", [Channel.receive, Channel.flush], ids=["receiving", "sending"])
    def test_so_is_a_connection_that_breaks(self, act: Callable[[Channel], bool]) -> None:
        channel, wire = channel_over()
        channel.begin(listen([]))
        channel.send_header({})
        wire.broken = True
        with pytest.raises(LeftError, match=r"the connection broke: (reset|broken)"):
            act(channel)

    def test_after_a_conversation_whatever_arrives_is_thrown_away(self) -> None:
        heard: list[Any] = []
        octets = b"nonsense" * 100
        channel, wire = channel_over(MESSAGES + MESSAGES, octets)
        channel.begin(listen(heard))
        channel.wake("woken")
        channel.wake("woken")
        receive_all(channel)
        assert heard == EXPECTED
        assert not wire.arriving
        assert not channel.has_left

    def test_a_conversation_that_is_ended_cleans_up_and_hears_nothing(self) -> None:
        heard: list[Any] = []

        def conversation() -> Conversation:
            try:
                heard.append((yield HEADER))
            finally:
                heard.append("cleaned up")

        channel, _ = channel_over(header_message({}))
        channel.begin(conversation())
        channel.end_conversation()
        receive_all(channel)
        assert heard == ["cleaned up"]

    @pytest.mark.parametrize("kind", ["header", "values"])
    @pytest.mark.parametrize("staging", [4, 64])
    def test_the_rest_of_a_message_is_thrown_away_once_the_conversation_has_ended(
        self, kind: str, staging: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(channel_module, "IN_PLACE_BYTES", 8)
        octets = header_message({"n": 1}) if kind == "header" else values(b"x" * 20)
        for cut in range(1, len(octets)):
            place = bytearray(20)

            def conversation(place: bytearray = place) -> Conversation:
                yield HEADER if kind == "header" else memoryview(place)
                raise AssertionError("it has ended")

            channel, wire = channel_over(octets[:cut], staging=staging)
            channel.begin(conversation())
            receive_all(channel)
            channel.end_conversation()
            before = bytes(place)
            wire.arriving.extend([octets[cut:], octets])
            receive_all(channel)
            assert bytes(place) == before
            assert not wire.arriving

    def test_closing_forgets_what_was_to_be_sent(self) -> None:
        channel, wire = channel_over()
        channel.send_header({})
        channel.close()
        assert wire.closed
        assert not channel.sends
        assert not channel.flush()


def test_a_stream_that_says_so_is_not_asked_again_for_what_it_does_not_have() -> None:
    wire = Wire([b"x", b"y"], takes=[3, None])
    wire.short_is_all = True
    channel = Channel(wire, memoryview(bytearray(64)), lambda channel: None)
    assert not channel.receive()
    assert len(wire.arriving) == 1
    channel.send([memoryview(b"frame"), memoryview(b"s")])
    assert channel.flush()
    assert len(wire.offers) == 1


class TestBudget:
    """Nobody keeps the others waiting."""

    def test_who_sends_much_is_received_from_in_turns(
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


class TestSending:
    """Messages go out whole and in order, however little is taken at a time."""

    @settings(deadline=None)
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
        turns = 0
        while channel.sends:
            channel.flush()
            turns += 1
            assert turns <= len(takes) + 1
        assert wire.sent == b"".join(b"".join(frames) for frames in messages)
        ends = itertools.accumulate(len(b"".join(frames)) for frames in messages)
        assert told == list(enumerate(ends))

    def test_it_says_whether_values_were_taken(self) -> None:
        channel, _ = channel_over(takes=[None, 3, None])
        channel.send([memoryview(b"prefix"), memoryview(b"values")])
        assert [channel.flush(), channel.flush(), channel.flush()] == [False, True, True]
        assert not channel.sends

    def test_a_header_on_its_way_is_no_sign_that_the_other_end_takes_it(self) -> None:
        channel, wire = channel_over()
        channel.send_header({"waiting": True})
        assert not channel.flush()
        assert wire.sent

    def test_many_small_frames_are_offered_together_but_not_all_at_once(self) -> None:
        channel, wire = channel_over()
        channel.send([memoryview(b"x")] * (2 * FRAMES_AT_ONCE + 1))
        channel.flush()
        assert wire.offers == [FRAMES_AT_ONCE, FRAMES_AT_ONCE, 1]

    def test_what_is_sent_as_something_was_is_sent_too(self) -> None:
        channel, wire = channel_over()
        channel.send([memoryview(b"first")], lambda: channel.send([memoryview(b" second")]))
        channel.flush()
        assert wire.sent == b"first second"

    def test_whoever_serves_the_channel_is_told_that_there_is_something_to_send(self) -> None:
        touched: list[Channel] = []
        channel = Channel(Wire(), memoryview(bytearray(8)), touched.append)
        channel.send_header({})
        assert touched == [channel]

    def test_a_header_is_a_json_object_behind_its_length(self) -> None:
        channel, wire = channel_over()
        channel.send_header({"waiting": True})
        channel.flush()
        assert wire.sent[:5] == b"\x01\x00\x00\x00\x11"
        assert json.loads(wire.sent[5:]) == {"waiting": True}

    def test_an_end_that_is_gone_already_need_not_see_the_end(self) -> None:
        channel, wire = channel_over()
        channel.end_sending()
        assert wire.ended
