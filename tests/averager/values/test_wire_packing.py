"""In which bits values travel: against what numpy rounds to, one number at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.averager.values.packing import BLOCK, AsDtype, Float4, Float8, Packing

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


@every(("packing", "lost"), [(Float8(), 1 / 16), (Float4(), 1 / 3)])
def test_no_more_than_a_part_of_a_value_is_lost(packing: Packing, lost: float) -> None:
    torch.manual_seed(0)
    values = (1 + torch.rand(10_000, dtype=torch.float64) * 63) * 1e-5
    unpacked = packing.unpack(packing.pack(values), len(values))
    assert float(((unpacked - values) / values).abs().max()) <= lost * (1 + 1e-6)


@every("packing", [Float8(), Float4()])
@every("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_what_was_packed_packs_to_the_same_again(packing: Packing, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    packed = packing.pack(torch.randn(BLOCK + 7).to(dtype))
    again = packing.pack(packing.unpack(packed, BLOCK + 7))
    assert torch.equal(again, packed)


@every("packing", [Float8(), Float4()])
@every("value", [0.0, 1e38, -1e38, 1e-45, -1e-38])
def test_the_largest_and_the_smallest_values_stay_finite(packing: Packing, value: float) -> None:
    unpacked = packing.unpack(packing.pack(torch.full((3,), value)), 3)
    assert unpacked.isfinite().all()
    assert (unpacked.double() * np.sign(value) >= 0).all()


@every(
    ("packing", "values", "size"),
    [
        *((AsDtype(torch.float32), n, n) for n in (0, 5)),
        *((Float8(), n, size) for n, size in ((0, 0), (1, 2), (128, 129), (129, 131))),
        *((Float4(), n, size) for n, size in ((0, 0), (1, 2), (128, 65), (129, 67))),
    ],
)
def test_so_many_values_take_so_many_elements(packing: Packing, values: int, size: int) -> None:
    assert packing.numel(values) == size == len(packing.pack(torch.zeros(values)))


def test_whatever_arrives_is_taken_for_numbers_or_for_none() -> None:
    """Who sends anything may hold the token and still be wrong."""
    for packing in (Float8(), Float4()):
        for octet in range(256):
            packed = torch.full((packing.numel(3),), octet, dtype=torch.uint8)
            assert packing.unpack(packed, 3).dtype is torch.float32
