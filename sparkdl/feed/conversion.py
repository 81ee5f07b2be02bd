"""Which numbers a dtype cannot hold: one rule, wherever numbers change their type.

Conversions of numpy and torch wrap, cut off and make infinities without a word. Here a conversion
may round to the nearest number of a floating-point dtype, and nothing else: integers and booleans
hold no fractions, no NaN and no infinity, and nothing becomes infinite that was not.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch


def first_lost(numbers: np.ndarray, dtype: torch.dtype) -> int | None:
    """Return the position of the first number that a dtype cannot hold; None if it holds all.

    Takes no look where the types alone tell, and one pass over numbers that are held.

    Args:
        numbers: real ones, of any shape; the position is that in the flattened array.
        dtype: what they are to become.
    """
    if numbers.dtype.isbuiltin == 2:  # another package's, such as bfloat16, of at most 16 bits
        numbers = numbers.astype(np.float32)
    if holds_all(dtype, numbers.dtype) or not numbers.size:
        return None
    flat = numbers.reshape(-1)
    becomes_whole = numbers.dtype.kind == "f" and _is_whole(dtype)
    # A floating-point dtype holds NaN, which fmin and fmax pass over.
    extremes = np.fmin.reduce(flat).item(), np.fmax.reduce(flat).item()
    if all_within(*extremes, dtype) and not (becomes_whole and fractions(flat).any()):
        return None
    lost = beyond(flat, dtype)
    if becomes_whole:
        lost |= fractions(flat) | np.isinf(flat)
    return int(lost.argmax()) if lost.any() else None


def holds_all(dtype: torch.dtype, source: np.dtype[Any]) -> bool:
    """Return whether a dtype holds whatever numbers a type of numpy has, as far as types tell."""
    if source.kind == "b":
        return True
    if source.kind == "f":
        return not _is_whole(dtype) and limits(dtype)[1] >= float(np.finfo(source).max)
    info = np.iinfo(source)
    return all_within(info.min, info.max, dtype)


@functools.cache
def limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest number of a dtype; 0 and 1 are those of booleans."""
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype) if _is_whole(dtype) else torch.finfo(dtype)
    return info.min, info.max


def all_within(smallest: float, largest: float, dtype: torch.dtype) -> bool:
    """Return whether numbers with these extremes are within a dtype's limits; not if one is NaN."""
    low, high = limits(dtype)
    return bool(smallest >= low and largest <= high)


def beyond(numbers: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return which numbers are finite but become infinite, or wrap around, in a dtype."""
    outside: np.ndarray
    if _is_whole(dtype):
        low, high = limits(dtype)
        # One more than the largest integer is a power of two, which floats have exactly.
        with np.errstate(over="ignore"):  # float16 has no limits of integers
            outside = (numbers < low) | (numbers >= high + 1)
    else:
        # Numbers a little above the largest are rounded down to it.
        wide = torch.from_numpy(numbers.astype(np.float64))
        outside = ~wide.to(dtype).isfinite().numpy()
    outside &= np.isfinite(numbers)
    return outside


def fractions(numbers: np.ndarray) -> np.ndarray:
    """Return which numbers are not whole, which NaN is not either."""
    found: np.ndarray = numbers != np.floor(numbers)
    return found


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)
