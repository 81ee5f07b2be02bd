"""Messages that a channel sends, however little its stream takes at a time."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from wire import Wire, channel_over

from sparkdl.transport.channel import FRAMES_AT_ONCE, Channel


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
        flushes = 0
        while channel.sends:
            channel.flush()
            flushes += 1
            assert flushes <= len(takes) + 1
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
