"""Wire formats: both ends of the wire end with the same bits, and small changes are not lost."""

from __future__ import annotations

import pytest
import torch
from every_row import every
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparkdl.averager.values.center import Center
from sparkdl.averager.values.center_update import Contributions
from sparkdl.averager.values.packing import AsDtype
from sparkdl.averager.values.wire_format import (
    WIRE_FORMATS,
    BFloat16Changes,
    Changes,
    Float8Changes,
    FullPrecision,
    WireFormat,
)
from sparkdl.protocols import Segment

FLOATS = Segment("parameters", torch.float32, 4)
INTEGERS = Segment("buffers", torch.int64, 1)


def test_formats_are_found_by_the_name_of_the_wire_dtype() -> None:
    assert {name: wire_format.name for name, wire_format in WIRE_FORMATS.items()} == {
        "float32": "float32",
        "bfloat16": "bfloat16",
    }


@every("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
def test_full_precision_sends_the_replicas_own_type(dtype: torch.dtype) -> None:
    assert FullPrecision().contribution(Segment("parameters", dtype, 1)) == AsDtype(dtype)


@every("dtype", [torch.float64, torch.float32, torch.float16])
def test_bfloat16_takes_two_bytes_a_value(dtype: torch.dtype) -> None:
    segment = Segment("parameters", dtype, 1)
    assert BFloat16Changes().contribution(segment).dtype.itemsize == 2


def test_bfloat16_leaves_integers_alone() -> None:
    wire_format = BFloat16Changes()
    counters = torch.tensor([1_000_001])
    assert wire_format.contribution(INTEGERS) == AsDtype(torch.int64)
    assert wire_format.encode(counters, torch.tensor([5]), INTEGERS) is counters
    target = torch.tensor([0])
    wire_format.decode(torch.tensor([7]), target, torch.tensor([5]), INTEGERS)
    assert target.item() == 7


def take_part(center: Center, wire_format: WireFormat, values: Tensor, base: Tensor) -> None:
    """A round of a worker that is alone."""
    total = center.open_sum([0])
    total.declare(0, 1)
    packing, size = wire_format.contribution(center.layout[0]), len(values)
    packed = packing.pack(wire_format.encode(values, base, center.layout[0]))
    total.add(0, 0, packing.unpack(packed, size))
    center.commit(Contributions((1,), 1))
    octets = bytearray(center.reply()[1])
    packing = wire_format.reply(center.layout[0])
    reply = packing.unpack(torch.frombuffer(octets, dtype=packing.dtype), size)
    wire_format.decode(reply, values, base, center.layout[0])


@pytest.mark.parametrize("wire_format", [BFloat16Changes(), Changes()], ids=lambda c: c.name)
@given(
    start=st.floats(-100, 100, width=32),
    changes=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=20),
)
def test_changes_keep_center_and_replica_bit_identical(
    wire_format: WireFormat, start: float, changes: list[float]
) -> None:
    segment = Segment("parameters", torch.float32, 1)
    base, values = torch.tensor([start]), torch.tensor([start])
    center = Center((segment,), [base.clone()], 1, wire_format)
    for change in changes:
        values += change
        take_part(center, wire_format, values, base)
        octets = values.numpy().tobytes()
        assert octets == base.numpy().tobytes() == center.values[0].numpy().tobytes()


def test_bfloat16_does_not_lose_small_changes_of_large_values() -> None:
    """1 + 1e-4 is 1 in bfloat16; a hundred such changes must arrive as a hundred."""
    wire_format = BFloat16Changes()
    base, values = torch.ones(1), torch.ones(1)
    center = Center((Segment("parameters", torch.float32, 1),), [torch.ones(1)], 1, wire_format)
    for _ in range(100):
        values += 1e-4
        take_part(center, wire_format, values, base)
    assert center.values[0].item() == pytest.approx(1.01, abs=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every("wire_format", [FullPrecision(), BFloat16Changes()])
def test_replies_arrive_on_the_cpu_also_for_replicas_on_a_gpu(wire_format: WireFormat) -> None:
    base, values = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    reply = torch.full((4,), 2.0).to(wire_format.reply(FLOATS).dtype)
    wire_format.decode(reply, values, base if wire_format.sends_changes(FLOATS) else None, FLOATS)
    assert values.tolist() == [3.0 if wire_format.replies_changes else 2.0] * 4


@every("dtype", [torch.bfloat16, torch.float16])
@every("wire_format", [Changes(), BFloat16Changes(), Float8Changes()])
def test_what_a_replica_cannot_hold_of_the_center_is_no_change(
    wire_format: WireFormat, dtype: torch.dtype
) -> None:
    segment = Segment("parameters", dtype, 4)
    base = torch.full((4,), 1 + 2.0**-13)
    values = base.to(dtype)
    values[0] += 2.0**-3
    change = wire_format.encode(values, base, segment)
    assert (change.dtype, change.tolist()) == (torch.float32, [2.0**-3, 0, 0, 0])
