"""Which worker gets which rows; pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sparkdl.feed.order import stream_seed

DRAWABLE = 999_999_999
"""The most items that numpy draws from without replacement."""


def exchange_plan(rows: Sequence[int], *, seed: int, epoch: int) -> np.ndarray:
    """How many rows each worker gives to each, so that all have the same number afterwards.

    The counts are those of a redistribution in which every assignment of rows to workers is equally
    likely: rank by rank, the multivariate hypergeometric distribution of its rows over the places
    that are still free. Of more than ``DRAWABLE`` rows, several are drawn together.

    Args:
        rows: the workers' rows, by rank.
        seed: the job's seed.
        epoch: the epoch that follows, or ``HELD_OUT``.

    Returns:
        Shape (workers, workers), int64: element (i, j) is what rank i gives to rank j. Row sums are
        ``rows``; column sums differ by one at most.
    """
    workers, total = len(rows), sum(rows)
    share, left_over = divmod(total, workers)
    free = np.full(workers, share)
    free[:left_over] += 1
    drawn = np.random.Generator(np.random.PCG64(stream_seed(seed, epoch, 0, 1)))
    plan = np.zeros((workers, workers), dtype=np.int64)
    for size in sorted({max(1, math.ceil(total / DRAWABLE)), 1}, reverse=True):
        places = (free - plan.sum(axis=0)) // size
        for rank, count in enumerate((np.array(rows) - plan.sum(axis=1)) // size):
            # "marginals" draws in O(workers), whatever the number of rows.
            drawn_rows = drawn.multivariate_hypergeometric(
                places, min(count, places.sum()), method="marginals"
            )
            places -= drawn_rows
            plan[rank] += size * drawn_rows
    return plan


def shares(counts: Sequence[int], *, key: tuple[int, int, int]) -> list[np.ndarray]:
    """Which of its rows a worker gives to each worker: every choice is equally likely.

    Args:
        counts: how many go to each rank, by rank.
        key: (seed, epoch, rank); the rank is that of the worker whose rows they are.

    Returns:
        For each rank the rows that it gets, shape (count,), int64, ascending.
    """
    target = np.repeat(np.arange(len(counts), dtype=np.min_scalar_type(len(counts))), counts)
    np.random.Generator(np.random.PCG64(stream_seed(*key, 2))).shuffle(target)
    # A stable sort of such short integers is a radix sort.
    return np.split(np.argsort(target, kind="stable"), np.cumsum(counts)[:-1])
