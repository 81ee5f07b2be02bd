"""In which order a worker sees its rows, and how many each minibatch has; pure arithmetic."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Rows = TypeVar("Rows", int, np.ndarray)
HELD_OUT = 0
"""Names the exchange of the rows to validate with, where others are named by an epoch."""


def permutation(rows: int, *, seed: int, epoch: int, rank: int) -> Tensor:
    """The order in which a worker sees its rows in one epoch.

    Args:
        rows: how many there are.
        seed: the job's seed.
        epoch: counted from 1.
        rank: the worker's rank.

    Returns:
        Shape (rows,), int64, a permutation of 0 to rows - 1.
    """
    return torch.randperm(rows, generator=generator(seed, epoch, rank))


def generator(*key: int) -> torch.Generator:
    """A stream of random numbers of its own for each key.

    Args:
        *key: up to four numbers, for example (seed, epoch, rank).
    """
    result = torch.Generator()
    result.manual_seed(stream_seed(*key))
    return result


def stream_seed(*key: int) -> int:
    """The seed of the stream of random numbers of a key; see ``generator``."""
    # Multiplying by odd constants keeps neighbours apart.
    factors = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
    mixed = sum(part * factor for part, factor in zip(key, factors, strict=False))
    return mixed % (1 << 63)


def even_sizes(rows: Rows, step: int, steps: int) -> Rows:
    """Rows of one of ``steps`` minibatches that share ``rows`` among them, give or take one.

    Args:
        rows: of all minibatches together, of one worker or, shape (workers,), of several.
        step: which minibatch, counted from 0.
        steps: how many there are.
    """
    before, after = rows * step // steps, rows * (step + 1) // steps
    size: Rows = after - before
    return size
