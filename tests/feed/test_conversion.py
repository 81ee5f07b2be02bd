"""A number that a dtype cannot hold is found, whatever the conversions of numpy make of it."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.feed.conversion import first_lost

SOURCES = ("bool", "int8", "uint8", "int16", "uint16", "int64", "uint64", "float16", "float64")
TARGETS = (*SOURCES, "bfloat16", "float32")


def is_held(number: Any, dtype: str) -> bool:
    """Whether plain Python finds a number in a dtype, rounded to what floats there are."""
    if dtype == "bool":
        return number in (0, 1)
    if "int" in dtype:
        info = torch.iinfo(getattr(torch, dtype))
        return math.isfinite(number) and number == int(number) and info.min <= number <= info.max
    rounded = torch.tensor(float(number), dtype=torch.float64).to(getattr(torch, dtype)).item()
    return not math.isfinite(number) or math.isfinite(rounded)


@pytest.mark.parametrize("source", SOURCES)
@settings(deadline=None)
@given(data=st.data())
def test_the_first_number_that_is_lost_is_the_one_that_python_finds(
    source: str, data: st.DataObject
) -> None:
    if source == "bool":
        value: st.SearchStrategy[Any] = st.booleans()
    elif "int" in source:
        info = np.iinfo(source)
        value = st.integers(info.min, info.max) | st.integers(max(info.min, -2), 2)
    else:
        fractions = st.floats(width=16 if source == "float16" else 64)
        value = fractions | st.integers(-300, 300).map(float)
    numbers = np.array(data.draw(st.lists(value, max_size=8)), source)
    target = data.draw(st.sampled_from(TARGETS))
    lost = [i for i, number in enumerate(numbers.tolist()) if not is_held(number, target)]
    assert first_lost(numbers, getattr(torch, target)) == (lost[0] if lost else None)


@every(
    ("numbers", "dtype", "place"),
    [
        (np.array([[7, 82], [850, 900]], "uint16"), torch.uint8, 2),
        (np.array([7, -24], ">i2"), torch.uint8, 1),
        (np.array([2**63], "uint64"), torch.int64, 0),
        (np.array([2**63], "uint64"), torch.float32, None),
        (np.array([65519.0, 65520.0], "float32"), torch.float16, 1),
        (np.array([np.nan, np.inf, 1e38], "float64"), torch.float32, None),
        (np.array([np.nan, np.inf, 1e39], "float64"), torch.float32, 2),
        (np.array([1.0, np.inf]), torch.int64, 1),
        (np.array([[0.1, 1 / 3]]), torch.bfloat16, None),
        (np.array([1.0, 1e38], ml_dtypes.bfloat16), torch.float16, 1),
        (np.array([1.0, 1e38], ml_dtypes.bfloat16), torch.float32, None),
        (np.array([1, -3], ml_dtypes.int4), torch.uint8, 1),
        (np.array([]), torch.uint8, None),
    ],
)
def test_arrays_of_any_layout_and_dtype_are_looked_at(
    numbers: np.ndarray, dtype: torch.dtype, place: int | None
) -> None:
    assert first_lost(numbers, dtype) == place
