"""What no worker sends is refused, in words, wherever on a channel it arrives."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import channel_over, receive_all, values

from sparkdl.averager.messages.headers import failure_header, raise_reported_failure
from sparkdl.errors import CollectiveError, TrainingError, WorkerError
from sparkdl.transport.channel import HEADER, Conversation, LeftError
from sparkdl.transport.framing import MAX_HEADER_BYTES, header_message, values_prefix


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

    def test_where_a_header_is_due(self, subtests: pytest.Subtests) -> None:
        for octets, words in [
            (b"\x03\x00\x00\x00\x00", "a message of unknown kind 3 arrived"),
            (b"GET / HTTP/1.1", "a message of unknown kind 71 arrived"),
            (
                b"\x01" + (MAX_HEADER_BYTES + 1).to_bytes(4, "big"),
                f"a header of {MAX_HEADER_BYTES + 1} bytes arrived, more than {MAX_HEADER_BYTES}",
            ),
            (values(b"abc"), "values arrived where a header was expected"),
            (values(b""), "values arrived where a header was expected"),
            (b"\x01\x00\x00\x00\x00", "without a readable header"),
            (b"\x01\x00\x00\x00\x02[]", "without a readable header"),
            (b"\x01\x00\x00\x00\x03{}}", "without a readable header"),
            (b"\x01\x00\x01\x86\xa0" + b"[" * 100_000, "without a readable header"),
        ]:
            refused = pytest.raises(TrainingError, match=words)
            with subtests.test(octets=octets, words=words), refused:
                self.send(octets)

    def test_values_of_another_length(self, subtests: pytest.Subtests) -> None:
        for size in [0, 19, 21, 2**32 - 1]:
            with (
                subtests.test(size=size),
                pytest.raises(
                    TrainingError, match=f"^{size} bytes of values arrived, expected 20; "
                ),
            ):
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
