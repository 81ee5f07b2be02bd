"""Which numbers a tensor's dtype can hold."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch


@functools.cache
def limits(dtype: torch.dtype) -> tuple[float, float]:
    """The smallest and the largest number of a dtype; infinite for booleans, which any can become.

    Args:
        dtype: of real numbers.
    """
    if dtype == torch.bool:
        return -math.inf, math.inf
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max


def holds_all(dtype: torch.dtype, source: np.dtype[Any]) -> bool:
    """Whether a dtype's range contains that of a floating-point type."""
    return dtype == torch.bool or limits(dtype)[1] >= float(np.finfo(source).max)


def all_within(smallest: float, largest: float, dtype: torch.dtype) -> bool:
    """Whether numbers with these extremes are surely held; not if there is NaN among them."""
    low, high = limits(dtype)
    return smallest >= low and largest <= high


def beyond(numbers: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Which numbers are finite but become infinite, or wrap around, in a tensor of ``dtype``.

    Args:
        numbers: shape (n,).
        dtype: what they are to become.

    Returns:
        Shape (n,), bool.
    """
    outside: np.ndarray
    if dtype.is_floating_point:
        # Numbers a little above the largest are rounded down to it.
        outside = ~torch.tensor(numbers).to(dtype).isfinite().numpy()
    else:
        low, high = limits(dtype)
        # One more than the largest integer is a power of two, which floats have exactly.
        outside = (numbers < low) | (numbers >= high + 1)
    outside &= np.isfinite(numbers)
    return outside
