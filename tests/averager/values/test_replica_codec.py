"""A worker's end of a wire format: what it sends of its state, and what a reply makes of that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparkdl.averager.values.replica_codec import ReplicaCodec
from sparkdl.averager.values.wire_format import Changes, FullPrecision, WireFormat
from sparkdl.errors import NonFiniteError
from sparkdl.events import WindowReport
from sparkdl.protocols import Segment

LAYOUT = (Segment("parameters", torch.float32, 5), Segment("buffers", torch.int64, 1))
WINDOW = WindowReport(rank=1, epoch=2, step=3, examples=4, loss_sum=8.0, last=False)


def codec_of(wire_format: WireFormat, fragments: int = 1) -> ReplicaCodec:
    codec = ReplicaCodec(wire_format, fragments)
    codec.begin(LAYOUT, chunk_bytes=8)
    return codec


def state() -> list[Tensor]:
    return [torch.arange(5.0), torch.tensor([7])]


def test_chunks_are_views_of_the_state_as_it_is_laid_out() -> None:
    segments = state()
    chunks = codec_of(FullPrecision()).whole(segments)
    assert [chunk.values.tolist() for chunk in chunks] == [[0, 1], [2, 3], [4], [7]]
    chunks[1].values.fill_(9)
    assert segments[0].tolist() == [0, 1, 9, 9, 4]


def test_fragments_are_of_every_segment_and_the_whole_together() -> None:
    codec, segments = codec_of(FullPrecision(), fragments=2), state()
    parts = [
        [number for chunk in codec.fragment(segments, index) for number in chunk.values.tolist()]
        for index in range(2)
    ]
    assert parts == [[0, 1], [2, 3, 4, 7]]


def test_state_behind_the_models_is_the_optimizers() -> None:
    chunks = codec_of(FullPrecision()).whole([*state(), torch.zeros(2)])
    kinds = [chunk.segment.kind for chunk in chunks]
    assert kinds == ["parameters"] * 3 + ["buffers", "optimizer"]


def test_changes_are_from_the_center_that_was_taken_last() -> None:
    codec, segments = codec_of(Changes()), state()
    for chunk in codec.whole(segments):
        chunk.take_center(torch.full_like(chunk.values, 3))
    segments[0] += 2
    sent = [chunk.contribution(WINDOW).tolist() for chunk in codec.whole(segments)]
    assert sent == [[2, 2], [2, 2], [2], [3]]
    for chunk in codec.whole(segments):
        chunk.take_reply(torch.full_like(chunk.values, 4))
    assert segments[0].tolist() == [4] * 5
    assert codec.whole(segments)[0].contribution(WINDOW).tolist() == [0, 0]


def test_a_reply_that_is_merged_later_moves_the_base_and_not_the_values() -> None:
    codec, segments = codec_of(Changes()), state()
    first = codec.whole(segments)[0]
    assert first.center_after(torch.tensor([5.0, 6.0])).tolist() == [5, 6]
    assert segments[0].tolist() == [0, 1, 2, 3, 4]
    assert first.contribution(WINDOW).tolist() == [-5, -5]


def test_what_can_be_received_in_place_is() -> None:
    chunks, codec = codec_of(FullPrecision()).whole(state()), codec_of(FullPrecision())
    assert all(codec.room(chunk, chunk.reply_packing) is chunk.values for chunk in chunks)


def test_what_has_a_base_or_another_dtype_is_received_beside() -> None:
    codec = codec_of(Changes())
    segments = state()
    room = codec.room(codec.whole(segments)[0], codec.whole(segments)[0].center_packing)
    room.fill_(9)
    halves = codec_of(FullPrecision()).whole([torch.zeros(2).half(), torch.tensor([7])])[0]
    codec.room(halves, halves.center_packing).fill_(9)
    assert segments[0].tolist() == [0, 1, 2, 3, 4]
    assert halves.values.tolist() == [0, 0]


def test_what_is_not_finite_is_not_sent_and_its_worker_is_named() -> None:
    segments = state()
    segments[0][4] = torch.nan
    chunks = codec_of(FullPrecision()).whole(segments)
    assert chunks[0].contribution(WINDOW).tolist() == [0, 1]
    with pytest.raises(NonFiniteError, match="rank 1 has 1 NaN"):
        chunks[2].contribution(WINDOW)
