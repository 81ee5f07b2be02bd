"""Keeps non-finite values from leaving a worker, and from entering a sum if a worker missed them.

A single NaN would make the center NaN for everyone.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import NonFiniteError
from sparkdl.events import WindowReport

ADVICE = (
    "Lower the learning rate, clip gradients (clipNorm) if the strategy can, or look for bad "
    "values in the features"
)

WHOLE = 1 << 20
"""Tensors of at most this many values are checked completely, in a tenth of a millisecond."""
PLACES = 1 << 16
"""Number of elements at which larger ones are checked."""


def count_non_finite(values: Tensor) -> int:
    """How many values are NaN or infinite.

    Args:
        values: of any shape and dtype, on any device.
    """
    if values.is_complex():
        return int((~torch.isfinite(values)).sum())
    # A sum is finite only if every value is (it may also overflow, hence the second check); it
    # costs little while the values are in the cache, on their way from or to a socket.
    if not values.is_floating_point() or math.isfinite(_some_sum(values)):
        return 0
    return int((~torch.isfinite(values)).sum())


def _some_sum(values: Tensor) -> float:
    if values.dtype in (torch.float32, torch.float64) and values.is_cpu and values.dim() == 1:
        # numpy works in this thread; torch would wake its pool for every chunk.
        numbers = values.detach().numpy()
        with np.errstate(over="ignore"):
            return float(np.dot(numbers, numbers))
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    return values.sum(dtype=wide).item()


def looks_finite(values: Tensor) -> bool:
    """Whether a quick check finds no NaN or infinity; in large tensors it samples 65,536 elements.

    A non-finite gradient affects more than a few elements of a model.

    Args:
        values: shape (elements,), on any device.
    """
    step = len(values) // PLACES if len(values) > WHOLE else 1
    return not count_non_finite(values[::step])


def require_finite(values: Tensor, window: WindowReport) -> None:
    """Check what a worker is about to contribute.

    Args:
        values: a part of the worker's state.
        window: what it was trained on.

    Raises:
        NonFiniteError: there are NaN or infinite values.
    """
    bad = count_non_finite(values)
    if bad:
        who = f"rank {window.rank}"
        if (window.group_weight or 0) > max(1, window.divisor):
            who += ", which reports for all workers averaged with it,"
        raise NonFiniteError(
            f"{who} has {bad} NaN or infinite values among its parameters, "
            f"buffers or optimizer state after epoch {window.epoch}, step {window.step} "
            f"(mean loss of the window: {window.loss_sum / (window.divisor or 1):.6g}). {ADVICE}",
            rank=window.rank,
            epoch=window.epoch,
            step=window.step,
        )
