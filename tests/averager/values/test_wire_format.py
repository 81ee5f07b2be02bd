"""How values travel: formats that both ends round alike, and sparse values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_keyword import center_of
from every_row import every, every_row
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparkdl.averager.values.center import Center
from sparkdl.averager.values.center_update import Contributions
from sparkdl.averager.values.sparse import Sparse
from sparkdl.averager.values.wire_format import (
    BFLOAT16_CHANGES,
    BLOCK,
    CHANGES,
    FLOAT8_CHANGES,
    FULL_PRECISION,
    AsDtype,
    Float4,
    Float8,
    Packing,
    WireFormat,
)
from sparkdl.errors import TrainingError
from sparkdl.protocols import Segment

FLOATS = Segment("parameters", torch.float32, 4)
INTEGERS = Segment("buffers", torch.int64, 1)


def test_bfloat16_leaves_integers_alone() -> None:
    wire_format = BFLOAT16_CHANGES
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


@pytest.mark.parametrize("wire_format", [BFLOAT16_CHANGES, CHANGES], ids=lambda c: c.name)
@given(
    start=st.floats(-100, 100, width=32),
    changes=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=20),
)
def test_changes_keep_center_and_replica_bit_identical(
    wire_format: WireFormat, start: float, changes: list[float]
) -> None:
    segment = Segment("parameters", torch.float32, 1)
    base, values = torch.tensor([start]), torch.tensor([start])
    center = center_of((segment,), [base.clone()], 1, wire_format)
    for change in changes:
        values += change
        take_part(center, wire_format, values, base)
        octets = values.numpy().tobytes()
        assert octets == base.numpy().tobytes() == center.values[0].numpy().tobytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every("wire_format", [FULL_PRECISION, BFLOAT16_CHANGES])
def test_replies_arrive_on_the_cpu_also_for_replicas_on_a_gpu(wire_format: WireFormat) -> None:
    base, values = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    reply = torch.full((4,), 2.0).to(wire_format.reply(FLOATS).dtype)
    wire_format.decode(reply, values, base if wire_format.sends_changes(FLOATS) else None, FLOATS)
    assert values.tolist() == [3.0 if wire_format.replies_changes else 2.0] * 4


@every("dtype", [torch.bfloat16, torch.float16])
@every("wire_format", [CHANGES, BFLOAT16_CHANGES, FLOAT8_CHANGES])
def test_what_a_replica_cannot_hold_of_the_center_is_no_change(
    wire_format: WireFormat, dtype: torch.dtype
) -> None:
    segment = Segment("parameters", dtype, 4)
    base = torch.full((4,), 1 + 2.0**-13)
    values = base.to(dtype)
    values[0] += 2.0**-3
    change = wire_format.encode(values, base, segment)
    assert (change.dtype, change.tolist()) == (torch.float32, [2.0**-3, 0, 0, 0])


VALUES = st.lists(
    st.one_of(*(st.floats(-most, most, width=32) for most in (1e3, 2.0**-20, 0.0))),
    min_size=1,
    max_size=3 * BLOCK + 1,
)


def nearest(values: list[float], numbers: np.ndarray) -> np.ndarray:
    """Of each block's numbers the distance of the nearest one to each value."""
    return np.abs(np.asarray(values)[:, None] - numbers[None, :]).min(1)


def of_float8(largest: float) -> np.ndarray:
    """All that a block whose largest value is this can hold, but for signs: e4m3 by its definition.

    The scale is the least power of two with which 448 is not less than the largest.
    """
    tiny = [fraction / 8 * 2.0**-6 for fraction in range(8)]
    normal = [(1 + fraction / 8) * 2.0**power for power in range(-6, 9) for fraction in range(8)]
    numbers = np.asarray([*tiny, *normal[:-1]])
    assert numbers.max() == 448
    scale = -126
    while 448 * 2.0**scale < largest:
        scale += 1
    return numbers * 2.0**scale


def of_float4(largest: float) -> np.ndarray:
    """0 and seven powers of two, the largest of which is the nearest to the largest value.

    Of two that are as near it is the larger.
    """
    powers = 2.0 ** np.arange(126, -127, -1)
    top = powers[np.abs(powers - largest).argmin()] if largest >= powers[-1] else powers[-1]
    return np.asarray([0.0, *(top / 2**n for n in range(7))])


@pytest.mark.parametrize(("packing", "numbers"), [(Float8(), of_float8), (Float4(), of_float4)])
@settings(max_examples=60, deadline=None)
@given(values=VALUES)
def test_each_value_becomes_the_nearest_number_that_its_block_has(
    packing: Packing, numbers: object, values: list[float]
) -> None:
    packed = packing.pack(torch.tensor(values, dtype=torch.float32))
    assert (packed.dtype, len(packed)) == (torch.uint8, packing.numel(len(values)))
    unpacked = packing.unpack(packed, len(values)).double().numpy()
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        held = numbers(max(map(abs, block)))  # type: ignore[operator]
        off = np.abs(unpacked[start : start + BLOCK] - block)
        both = np.concatenate([held, -held])
        np.testing.assert_allclose(off, nearest(block, both), rtol=1e-6, atol=1e-38)
        assert set(np.abs(unpacked[start : start + BLOCK])) <= set(held.astype(np.float32))


@every("packing", [Float8(), Float4()])
@every("value", [0.0, 1e38, -1e38, 1e-45, -1e-38])
def test_the_largest_and_the_smallest_values_stay_finite(packing: Packing, value: float) -> None:
    unpacked = packing.unpack(packing.pack(torch.full((3,), value)), 3)
    assert unpacked.isfinite().all()
    assert (unpacked.double() * np.sign(value) >= 0).all()


@every_row(
    *((AsDtype(torch.float32), n, n) for n in (0, 5)),
    *((Float8(), n, size) for n, size in ((0, 0), (1, 2), (128, 129), (129, 131))),
    *((Float4(), n, size) for n, size in ((0, 0), (1, 2), (128, 65), (129, 67))),
)
def test_so_many_values_take_so_many_elements(packing: Packing, values: int, size: int) -> None:
    assert packing.numel(values) == size == len(packing.pack(torch.zeros(values)))


def test_whatever_arrives_is_taken_for_numbers_or_for_none() -> None:
    """Who sends anything may hold the token and still be wrong."""
    for packing in (Float8(), Float4()):
        for octet in range(256):
            packed = torch.full((packing.numel(3),), octet, dtype=torch.uint8)
            assert packing.unpack(packed, 3).dtype is torch.float32


DTYPES = [torch.float32, torch.float64]
NUMBERS = st.lists(
    st.one_of(
        st.just(0.0),
        st.sampled_from([0.5, -0.5, 3.0, -0.0]),
        st.floats(-(2.0**90), 2.0**90, width=32),
    ),
    max_size=60,
)


def shortest(values: np.ndarray) -> int:
    """By the table in the module's docstring, from the values."""
    n, w = len(values), values.itemsize
    k = sum(value != 0 for value in values)
    lengths = [8 + (4 + w) * k, 8 + w * n]
    if len({abs(float(value)) for value in values if value}) <= 1:
        lengths.append(8 + 4 * k)
    return min(lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=150, deadline=None)
@given(numbers=NUMBERS)
def test_what_was_packed_comes_back_and_took_the_fewest_bytes(
    dtype: torch.dtype, numbers: list[float]
) -> None:
    values = torch.tensor(numbers, dtype=dtype)
    packed = Sparse(dtype).pack(values)
    assert len(packed) == shortest(values.numpy()) <= Sparse(dtype).numel(len(values))
    unpacked = Sparse(dtype).unpack(packed, len(values))
    assert unpacked.dtype is dtype
    assert torch.equal(unpacked, values)


def test_a_number_that_float32_does_not_have_is_not_rounded() -> None:
    values = torch.tensor([0.1, -0.1, 0.0] * 50, dtype=torch.float64)
    assert torch.equal(
        Sparse(torch.float64).unpack(Sparse(torch.float64).pack(values), 150), values
    )


def test_more_values_than_places_can_tell_are_refused() -> None:
    many = torch.zeros(1).expand((1 << 31) + 1)
    with pytest.raises(TrainingError, match="2147483649 values"):
        Sparse(torch.float32).pack(many)


def message(form: int, body: Any, number: float = 1.0) -> torch.Tensor:
    header = np.array([form], "<u4").tobytes() + np.array([number], "<f4").tobytes()
    return torch.frombuffer(bytearray(header + np.asarray(body).tobytes()), dtype=torch.uint8)


@every_row(
    torch.empty(0, dtype=torch.uint8),
    message(0, np.uint8([1])),
    message(0, np.uint32([5])),
    message(0, np.uint32([2, 2])),
    message(0, np.uint32([3, 2])),
    message(0, np.uint32([(1 << 31) | 5])),
    message(1, np.uint32([1, 2, 3])),
    message(1, np.uint32([5, 0])),
    message(2, np.float32([1, 2])),
    message(7, np.float32([1] * 5)),
)
def test_what_is_no_message_of_so_many_values_is_refused(packed: torch.Tensor) -> None:
    with pytest.raises(TrainingError, match="message"):
        Sparse(torch.float32).unpack(packed, 5)


@settings(max_examples=300, deadline=None)
@given(octets=st.binary(max_size=60), values=st.integers(0, 20))
def test_whatever_arrives_is_taken_for_values_or_refused(octets: bytes, values: int) -> None:
    packed = torch.frombuffer(bytearray(octets or b"\0"), dtype=torch.uint8)
    try:
        unpacked = Sparse(torch.float32).unpack(packed, values)
    except TrainingError:
        return
    assert (unpacked.dtype, len(unpacked)) == (torch.float32, values)
