"""Numbers that a tensor's dtype cannot hold are found, against what torch's conversion makes."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparkdl.feed.conversion import beyond
from sparkdl.feed.statistics.column import places_from, scan
from sparkdl.protocols import UNKNOWN, ColumnSpec

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(deadline=None)
@given(rows=st.lists(st.floats() | st.floats(-1e5, 1e5), max_size=12))
@example(rows=[65504.0, 65519.9, 65520.0, -65520.0, math.inf, math.nan])
def test_a_number_is_beyond_a_float_if_it_becomes_infinite(
    dtype: torch.dtype, rows: list[float]
) -> None:
    became_infinite = [
        math.isfinite(row) and math.isinf(torch.tensor(row, dtype=torch.float64).to(dtype).item())
        for row in rows
    ]
    assert beyond(np.array(rows), dtype).tolist() == became_infinite


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@settings(deadline=None)
@given(rows=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300), max_size=12))
def test_an_integer_is_beyond_another_if_it_comes_back_changed(
    dtype: torch.dtype, rows: list[int]
) -> None:
    changed = [torch.tensor(row, dtype=torch.int64).to(dtype).item() != row for row in rows]
    assert beyond(np.array(rows, dtype=np.int64), dtype).tolist() == changed


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@settings(deadline=None)
@given(rows=st.lists(st.floats() | st.floats(-300, 300).map(float), max_size=12))
@example(rows=[2.0**63, -(2.0**63), 127.0, 128.0, 127.5, math.inf, math.nan])
def test_a_fraction_is_beyond_an_integer_if_python_says_so(
    dtype: torch.dtype, rows: list[float]
) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    outside = [math.isfinite(row) and not low <= row < high + 1 for row in rows]
    assert beyond(np.array(rows), dtype).tolist() == outside


def test_what_is_out_of_range_is_counted_by_rows_with_its_place() -> None:
    numbers = pa.array([1.0, -1e6, 7e4, math.inf])
    found = scan(numbers, ColumnSpec("x", torch.float16), places_from(2, 100, 20))
    assert (found.out_of_range, found.where("out_of_range")) == (2, "row 101 of partition 2")
    arrays = pa.array([[1.0, 2.0], None, [1e39, 1e300], [math.nan, 3.0]])
    found = scan(arrays, ColumnSpec("x", torch.float32, (UNKNOWN,)), places_from(0, 5, 20))
    assert (found.out_of_range, found.where("out_of_range")) == (1, "row 7 of partition 0")
    assert (found.not_finite, found.where("not_finite")) == (1, "row 8 of partition 0")
    whole = pa.array([[1, 2], [3, 300]])
    found = scan(whole, ColumnSpec("x", torch.uint8, (UNKNOWN,)))
    assert (found.out_of_range, found.where("out_of_range")) == (1, "row 1 of partition 0")


def test_only_zero_and_one_can_become_booleans_and_only_whole_numbers_integers() -> None:
    numbers = pa.array([[0.0, 1.0], [0.5, 1.0], [math.nan, -3.0], [1e300, 1.5]])
    for dtype, out_of_range in ((torch.bool, 2), (torch.int64, 1)):
        found = scan(numbers, ColumnSpec("x", dtype, (UNKNOWN,)), places_from(0, 5, 20))
        assert (found.out_of_range, found.not_finite, found.fractions) == (out_of_range, 1, 3)
        assert found.where("fractions") == "row 6 of partition 0"
    assert scan(pa.array([0, 700]), ColumnSpec("x", torch.bool)).out_of_range == 1
