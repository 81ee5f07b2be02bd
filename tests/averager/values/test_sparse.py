"""Sparse values as they travel: nothing is lost, and a message is as long as its form says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.averager.values.sparse import Sparse
from sparkdl.errors import TrainingError

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


@every("part", [0, 1e-4, 1 / 17, 1 / 15, 0.6, 1])
@every("same", [True, False])
@every("dtype", DTYPES)
def test_many_values_too(part: float, same: bool, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(0)
    values = np.zeros(100_003)
    chosen = generator.permutation(len(values))[: round(part * len(values))]
    values[chosen] = 2**-10 if same else generator.normal(size=len(chosen))
    values *= generator.choice([-1, 1], size=len(values))
    tensor = torch.from_numpy(values).to(dtype)
    packed = Sparse(dtype).pack(tensor)
    assert len(packed) == shortest(tensor.numpy())
    assert torch.equal(Sparse(dtype).unpack(packed, len(values)), tensor)
    into = np.ones(len(values), tensor.numpy().dtype)
    Sparse(dtype).add(packed, into, 0.25)
    np.testing.assert_array_equal(into, 1 + 0.25 * tensor.numpy())


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


@every(
    "packed",
    [
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
    ],
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
