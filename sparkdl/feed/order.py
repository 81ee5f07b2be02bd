"""In which order a worker sees its rows, and how many each minibatch has; pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Rows = TypeVar("Rows", int, np.ndarray)
GROUP_DRAWS = 1 << 40
"""The key of the random numbers by which minibatches of similar lengths are put in order; larger
than any minibatch's number, by which an epoch's other draws are keyed."""
POOL = 50
"""Minibatches whose rows are sorted together: Hugging Face's number."""
HELD_OUT = 0
"""Names the exchange of the rows to validate with, where others are named by an epoch."""


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


def full_sizes(rows: int, batch_size: int) -> Iterator[int]:
    """Full minibatches, the last one with what is left."""
    return (min(batch_size, rows - start) for start in range(0, rows, batch_size))


def epoch_order(
    seed: int,
    epoch: int,
    rank: int,
    rows: int,
    used: int,
    sizes: Sequence[int],
    lengths: Tensor | None,
) -> Tensor:
    """Draw the order in which a worker sees its rows in one epoch.

    Args:
        seed: the job's seed.
        epoch: counted from 1.
        rank: the worker's rank.
        rows: how many it has.
        used: how many of them are trained on.
        sizes: rows of each minibatch.
        lengths: of the rows as they lie, shape (rows,), if rows of about equal length are to
            share a minibatch.

    Returns:
        The places of the rows that are trained on, shape (used,), int64.
    """
    order = torch.randperm(rows, generator=generator(seed, epoch, rank))[:used]
    if lengths is None:
        return order
    draws = generator(seed, epoch, rank, GROUP_DRAWS)
    return grouped_by_length(order, lengths[order], sizes, draws)


def grouped_by_length(
    order: Tensor, lengths: Tensor, sizes: Sequence[int], draws: torch.Generator
) -> Tensor:
    """Put rows of about equal length into the same minibatches, and shuffle those.

    The rows of every ``POOL`` minibatches are sorted by length and cut, the pieces put in a random
    order, as Hugging Face's ``LengthGroupedSampler`` and torchtext's ``BucketIterator`` do. So a
    minibatch's rows are still drawn from many, and every row is there once.

    Args:
        order: the order of the rows without groups, random, shape (n,), int64.
        lengths: of the rows in that order, shape (n,).
        sizes: rows of each minibatch; they add up to n. A short last one stays the last.
        draws: for the order of the minibatches.

    Returns:
        The same rows in another order, shape (n,).
    """
    pieces, start = [], 0
    for first in range(0, len(sizes), POOL):
        pool = sizes[first : first + POOL]
        stop = start + sum(pool)
        sort = torch.argsort(lengths[start:stop], stable=True) + start
        places = torch.randperm(len(pool), generator=draws).tolist()
        parts = torch.split(order[sort], [pool[place] for place in places])
        by_place = dict(zip(places, parts, strict=True))
        pieces += [by_place[place] for place in range(len(pool))]
        start = stop
    return torch.cat(pieces) if pieces else order
