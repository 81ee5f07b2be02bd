"""Updates of the center: what they are told, what they remember, how what comes out travels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from by_keyword import center_of
from every_row import every
from torch import Tensor

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

FORMATS = [FULL_PRECISION, CHANGES, BFLOAT16_CHANGES]
SIZE = 300_000
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


class Told(CenterUpdate):
    """Moves by what it is told of the contributions."""

    def step(
        self,
        center: Tensor,
        change: Tensor,
        memory: Mapping[str, Tensor],
        contributions: Contributions,
    ) -> None:
        told = contributions
        change.fill_(100 * sum(told.weights) + 10 * told.world_size + told.staleness)


def layout_of(*kinds: str) -> Layout:
    return tuple(Segment(kind, torch.float32, SIZE) for kind in kinds)


def contribute(center: Center, wire_format: WireFormat, *values: float, share: float = 1.0) -> None:
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
    wire_format.decode(torch.frombuffer(octets, dtype=dtype)[:SIZE], values, base, center.layout[0])
    return values


@every("wire_format", FORMATS)
def test_the_center_moves_as_the_update_says_in_every_wire_format(wire_format: WireFormat) -> None:
    center = center_of(layout_of("parameters"), [torch.zeros(SIZE)], 4, wire_format, Momentum())
    oracle, velocity = np.float32(0), np.float32(0)
    for value in (1.0, 3.0, 2.5):
        before = center.values[0].clone()
        contribute(center, wire_format, value)
        velocity = velocity * np.float32(0.5) + (np.float32(value) - oracle)
        oracle = oracle + velocity
        assert set(center.values[0].tolist()) == {float(oracle)}
        assert torch.equal(replied(center, wire_format, before), center.values[0])


@every("wire_format", FORMATS)
def test_what_is_no_parameter_becomes_the_mean(wire_format: WireFormat) -> None:
    layout = layout_of("parameters", "buffers", "optimizer")
    center = center_of(layout, [torch.zeros(SIZE) for _ in layout], 4, wire_format, Told())
    contribute(center, wire_format, 1.0, 3.0, 5.0)
    assert [values[-1].item() for values in center.values] == [142.0, 3.0, 5.0]


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
@every(
    ("update", "parameters", "others"),
    [(ReplaceByMean(), 3.0, 4.5), (Doubles(), 5.0, 4.5), (InFull(), 9.0, 17.0)],
)
def test_a_round_moves_all_that_is_averaged_by_its_share_of_a_full_one(
    wire_format: WireFormat, update: CenterUpdate, parameters: float, others: float
) -> None:
    """From 1 towards 9, and from 1/3 towards 17; whole numbers are the contributor's."""
    layout = (*layout_of("parameters", "buffers", "optimizer"), Segment("buffers", torch.int64, 5))
    initial = [torch.full((each.numel,), 1.0).to(each.center_dtype) for each in layout]
    for values in initial[1:3]:
        values.fill_(1 / 3)
    center = center_of(layout, initial, 4, wire_format, update)
    contribute(center, wire_format, 9.0, 17.0, 17.0, 7.0, share=0.25)
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
    contribute(center, wire_format, 1.0, 3.0, 7.0)
    for expected in (1.5, 1.5):
        before = center.values[0].clone()
        center.open_sum([0]).declare(0, 0)
        center.commit(Contributions((), 4))
        assert [values.unique().item() for values in center.values] == [expected, 3.0, 7]
        assert torch.equal(replied(center, wire_format, before), center.values[0])


class Halves(Told):
    """What is stale counts half."""

    def scale(self, staleness: int) -> float:
        return 0.5 if staleness else 1.0


@every(("wire_format", "scale"), [(CHANGES, 0.5), (BFLOAT16_CHANGES, 0.5), (FULL_PRECISION, 1.0)])
def test_changes_are_scaled_by_their_staleness_and_values_never(
    wire_format: WireFormat, scale: float
) -> None:
    center = center_of(layout_of("parameters"), [torch.zeros(SIZE)], 4, wire_format, Halves())
    assert (center.scale(0), center.scale(3)) == (1.0, scale)


def test_a_round_without_weight_leaves_center_and_memory_alone() -> None:
    center = center_of(layout_of("parameters"), [torch.zeros(SIZE)], 4, FULL_PRECISION, Momentum())
    contribute(center, FULL_PRECISION, 1.0)
    center.open_sum([0]).declare(0, 0)
    center.commit(Contributions((), 4))
    assert {name: tensor[0].item() for name, tensor in center.named().items()} == {
        "0.parameters": 1.0,
        "0.parameters.velocity": 1.0,
    }


def test_what_it_remembers_goes_on_in_another_center() -> None:
    whole, first = (
        center_of(layout_of("parameters"), [torch.zeros(SIZE)], 4, FULL_PRECISION, Momentum())
        for _ in range(2)
    )
    for value in (1.0, 3.0):
        contribute(whole, FULL_PRECISION, value)
    contribute(first, FULL_PRECISION, 1.0)
    second = center_of(first.layout, first.values, 4, FULL_PRECISION, Momentum(), first.memory)
    contribute(second, FULL_PRECISION, 3.0)
    assert torch.equal(second.values[0], whole.values[0])
