"""The center, and what a round's contributions do to it."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from by_keyword import center_of
from every_row import every, every_row
from torch import Tensor
from torch.nn.parameter import is_lazy

from sparkdl.averager.values.center import Center
from sparkdl.averager.values.center_update import CenterUpdate, Contributions, ReplaceByMean
from sparkdl.averager.values.wire_format import (
    BFLOAT16_CHANGES,
    CHANGES,
    FULL_PRECISION,
    PARAMETER_CHANGES,
    WireFormat,
)
from sparkdl.protocols import Layout, Segment
from sparkdl.transport.channel import Frames
from sparkdl.transport.framing import PREFIX_BYTES, VALUES_KIND, read_prefix

SIZE = 5
ONE: Layout = (Segment("parameters", torch.float32, SIZE),)
MIXED: Layout = (
    Segment("parameters", torch.float32, 40_000),
    Segment("buffers", torch.int64, 3),
    Segment("optimizer", torch.float32, 2),
)


def make_center(
    layout: Layout = ONE, wire_format: WireFormat | None = None, world_size: int = 2
) -> Center:
    zeros = [torch.zeros(segment.numel, dtype=segment.center_dtype) for segment in layout]
    return center_of(layout, zeros, world_size, wire_format or FULL_PRECISION)


def contribute(center: Center, rank: int, value: float) -> None:
    """Add a contribution whose elements are all the same."""
    total = center.sum
    assert total is not None
    for index, chunk in enumerate(total.chunks):
        dtype = center.contribution(chunk).dtype
        values = torch.full((chunk.stop - chunk.start,), value, dtype=dtype)
        place = total.in_place(rank, index)
        if place is not None:
            place.copy_(values)
        total.add(rank, index, values if place is None else None)


def average(center: Center, contributions: dict[int, tuple[int, float]]) -> None:
    """A whole round: examples and value, by rank."""
    total = center.open_sum(sorted(contributions))
    for rank, (examples, _) in contributions.items():
        total.declare(rank, examples)
    for rank, (examples, value) in sorted(contributions.items()):
        if examples:
            contribute(center, rank, value)
    weights = tuple(examples for examples, _ in contributions.values() if examples)
    center.commit(Contributions(weights, len(contributions)))


def read(frames: Frames, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a worker receives, after a look at the prefixes."""
    octets = b""
    for prefix, values in zip(frames[::2], frames[1::2], strict=True):
        assert len(prefix) == PREFIX_BYTES
        assert read_prefix(bytes(prefix)) == (VALUES_KIND, len(values))
        octets += bytes(values)
    return torch.frombuffer(bytearray(octets), dtype=dtype)


def test_a_sum_that_has_started_over_has_nothing_of_before() -> None:
    center = make_center()
    total = center.open_sum([0, 1])
    total.declare(0, 1)
    contribute(center, 0, 100.0)
    average(center, {1: (1, 3.0)})
    assert center.values[0].tolist() == [3.0] * SIZE


def test_the_reply_has_the_segments_in_order_whatever_is_done_to_each() -> None:
    center = make_center(MIXED, BFLOAT16_CHANGES)
    average(center, {0: (1, 2.0), 1: (1, 4.0)})
    sizes = [len(octets) for octets in center.reply()[1::2]]
    assert sizes == [2 * 40_000, 8 * 3, 2 * 2]


def test_under_bfloat16_the_reply_is_the_rounded_change_and_the_center_moves_by_it() -> None:
    center = make_center(wire_format=BFLOAT16_CHANGES)
    for number in (1, 2):
        average(center, {0: (1, 1.0), 1: (1, 1.0078125)})
        # The mean, 1.00390625, has no bfloat16 of its own; 1 is the nearest with an even end.
        assert read(center.reply(), torch.bfloat16).tolist() == [1.0] * SIZE
        assert center.values[0].tolist() == [float(number)] * SIZE


@every("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_are_kept_in_float32_and_sent_as_they_came(dtype: torch.dtype) -> None:
    center = make_center((Segment("parameters", dtype, SIZE),))
    average(center, {0: (1, 1.0), 1: (2, 2.0)})
    exact = (torch.tensor(5.0) / torch.tensor(3.0)).item()
    assert center.values[0].tolist() == [exact] * SIZE
    rounded = torch.tensor(exact).to(dtype).item()
    assert read(center.reply(), dtype).tolist() == [rounded] * SIZE
    assert read(center.state()).tolist() == [exact] * SIZE


def test_no_message_is_larger_than_what_was_announced() -> None:
    center = make_center(MIXED, world_size=10_000)
    assert max(map(len, center.state())) == center.chunk_bytes == 65_536


def test_the_copy_for_a_checkpoint_stays_while_rounds_go_on_in_the_same_place_each_time() -> None:
    center = make_center()
    average(center, {0: (1, 1.0)})
    copy = center.copy()
    for value in (5.0, 6.0):
        average(center, {0: (1, value)})
    (name,) = copy
    assert copy[name].tolist() == [1.0] * SIZE
    assert center.copy()[name].data_ptr() == copy[name].data_ptr()
    assert copy[name].tolist() == [6.0] * SIZE


class TestMemory:
    """Twice the parameters, however many workers; and the reply, if it travels in another type."""

    NUMEL = 100_003

    def held(self) -> int:
        """Bytes of all tensors of the size of the model, wherever they are."""
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if issubclass(type(each), Tensor) and not is_lazy(each) and each.numel() == self.NUMEL
        }
        return sum(storages.values())

    @every("world_size", [1, 4, 64])
    @every_row(
        (torch.float32, FULL_PRECISION, 8),
        (torch.float32, BFLOAT16_CHANGES, 8 + 2),
        (torch.bfloat16, FULL_PRECISION, 8 + 2),
        (torch.float16, FULL_PRECISION, 8 + 2),
        (torch.float64, FULL_PRECISION, 16),
    )
    def test_it_does_not_grow(
        self, world_size: int, dtype: torch.dtype, wire_format: WireFormat, bytes_each: int
    ) -> None:
        center = make_center((Segment("parameters", dtype, self.NUMEL),), wire_format, world_size)
        for _ in range(3):
            average(center, {rank: (1, float(rank)) for rank in range(world_size)})
            average(center, dict.fromkeys(range(world_size), (0, 0.0)))
            center.reply()
            center.state()
        assert self.held() == bytes_each * self.NUMEL


FORMATS = [FULL_PRECISION, CHANGES, BFLOAT16_CHANGES]
UPDATED = 300_000
"""More than one message of values."""


class Momentum(CenterUpdate):
    """Half of what it was, and the change."""

    keeps = ("velocity",)

    def step(
        self,
        center: Tensor,
        change: Tensor,
        memory: Mapping[str, Tensor],
        contributions: Contributions,
    ) -> None:
        memory["velocity"].mul_(0.5).add_(change)
        change.copy_(memory["velocity"])


def layout_of(*kinds: str) -> Layout:
    return tuple(Segment(kind, torch.float32, UPDATED) for kind in kinds)


def contribute_each(
    center: Center, wire_format: WireFormat, *values: float, share: float = 1.0
) -> None:
    """A round of one worker, which holds the center and then has so many in each segment."""
    total = center.open_sum([0])
    total.declare(0, 1)
    for index, chunk in enumerate(total.chunks):
        base = chunk.of(center.values)
        mine = torch.full_like(base, values[chunk.segment])
        segment = center.layout[chunk.segment]
        packing = wire_format.contribution(segment)
        sent = packing.pack(wire_format.encode(mine, base, segment))
        total.add(0, index, packing.unpack(sent, len(mine)))
    center.commit(Contributions((1,), 4, 2, share=share))


def replied(center: Center, wire_format: WireFormat, before: Tensor) -> Tensor:
    """What the first segment of a worker that held the center becomes by the reply."""
    octets = bytearray(b"".join(map(bytes, center.reply()[1::2])))
    dtype = wire_format.reply(center.layout[0]).dtype
    values, base = before.clone(), before.clone()
    wire_format.decode(
        torch.frombuffer(octets, dtype=dtype)[:UPDATED], values, base, center.layout[0]
    )
    return values


@every("wire_format", FORMATS)
def test_the_center_moves_as_the_update_says_in_every_wire_format(wire_format: WireFormat) -> None:
    center = center_of(layout_of("parameters"), [torch.zeros(UPDATED)], 4, wire_format, Momentum())
    oracle, velocity = np.float32(0), np.float32(0)
    for value in (1.0, 3.0, 2.5):
        before = center.values[0].clone()
        contribute_each(center, wire_format, value)
        velocity = velocity * np.float32(0.5) + (np.float32(value) - oracle)
        oracle = oracle + velocity
        assert set(center.values[0].tolist()) == {float(oracle)}
        assert torch.equal(replied(center, wire_format, before), center.values[0])


class InFull(ReplaceByMean):
    """A round of one counts as much as a round of all."""

    by_share = False


class Doubles(CenterUpdate):
    """Moves twice as far."""

    def step(
        self,
        center: Tensor,
        change: Tensor,
        memory: Mapping[str, Tensor],
        contributions: Contributions,
    ) -> None:
        change.mul_(2)


@every("wire_format", [*FORMATS, PARAMETER_CHANGES])
@every_row((ReplaceByMean(), 3.0, 4.5), (Doubles(), 5.0, 4.5), (InFull(), 9.0, 17.0))
def test_a_round_moves_all_that_is_averaged_by_its_share_of_a_full_one(
    wire_format: WireFormat, update: CenterUpdate, parameters: float, others: float
) -> None:
    """From 1 towards 9, and from 1/3 towards 17; whole numbers are the contributor's."""
    layout = (*layout_of("parameters", "buffers", "optimizer"), Segment("buffers", torch.int64, 5))
    initial = [torch.full((each.numel,), 1.0).to(each.center_dtype) for each in layout]
    for values in initial[1:3]:
        values.fill_(1 / 3)
    center = center_of(layout, initial, 4, wire_format, update)
    contribute_each(center, wire_format, 9.0, 17.0, 17.0, 7.0, share=0.25)
    assert center.values[0].unique().tolist() == [parameters]
    for values in center.values[1:3]:
        assert values.unique().numel() == 1
        assert values[0].item() == pytest.approx(others, rel=1e-2)
    assert center.values[3].unique().tolist() == [7]


@every("wire_format", FORMATS)
def test_an_update_may_move_the_center_in_a_round_without_weight(wire_format: WireFormat) -> None:
    class Coasts(Momentum):
        def moves_alone(self, round: int) -> bool:
            return round == 2

    layout = (*layout_of("parameters", "buffers"), Segment("buffers", torch.int64, 5))
    initial = [torch.zeros(each.numel, dtype=each.center_dtype) for each in layout]
    center = center_of(layout, initial, 4, wire_format, Coasts())
    contribute_each(center, wire_format, 1.0, 3.0, 7.0)
    for expected in (1.5, 1.5):
        before = center.values[0].clone()
        center.open_sum([0]).declare(0, 0)
        center.commit(Contributions((), 4))
        assert [values.unique().item() for values in center.values] == [expected, 3.0, 7]
        assert torch.equal(replied(center, wire_format, before), center.values[0])


def test_a_round_without_weight_leaves_center_and_memory_alone() -> None:
    center = center_of(
        layout_of("parameters"), [torch.zeros(UPDATED)], 4, FULL_PRECISION, Momentum()
    )
    contribute_each(center, FULL_PRECISION, 1.0)
    center.open_sum([0]).declare(0, 0)
    center.commit(Contributions((), 4))
    assert {name: tensor[0].item() for name, tensor in center.named().items()} == {
        "0.parameters": 1.0,
        "0.parameters.velocity": 1.0,
    }
