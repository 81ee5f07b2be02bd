"""Who asks and does not read the answers is not listened to; the driver's memory stays bounded."""

from __future__ import annotations

from typing import Any

from every_row import every
from wire import channel_over, receive_all

from sparkdl.transport.channel import (
    HEADER,
    UNREAD_BYTES,
    UNREAD_HEADERS,
    Channel,
    Conversation,
)
from sparkdl.transport.framing import header_message

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


@every("staging", [7, 1 << 16])
def test_all_are_answered_in_order_as_soon_as_answers_are_taken(staging: int) -> None:
    asked: list[int] = []
    questions = b"".join(header_message({"ask": number}) for number in range(ASKED))
    channel, wire = channel_over(questions, staging=staging)
    channel.begin(answers(channel, {"answer": 1}, asked))
    iterations = 0
    while len(asked) < ASKED and iterations < ASKED:
        receive_all(channel)
        channel.flush()
        iterations += 1
    assert asked == list(range(ASKED))
    assert wire.sent == header_message({"answer": 1}) * ASKED


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
