"""What follows from the lengths of rows: how many bytes they take, and which share a minibatch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdl.feed.columns.ragged import Column, Ragged
from sparkdl.protocols import ColumnSpec

POOL = 50
"""Minibatches whose rows are sorted together: Hugging Face's number."""


def bytes_of_rows(specs: Sequence[ColumnSpec], lengths: Sequence[Tensor]) -> int | Tensor:
    """Bytes that each row takes: a number, or shape (rows,) if rows are of unequal length.

    Args:
        specs: of all columns.
        lengths: items of the rows in each column that is to be padded, in the order of the specs.
    """
    fixed = sum(s.dtype.itemsize * (s.elements or 0) for s in specs if s.padding is None)
    padded = [s for s in specs if s.padding is not None]
    if not padded:
        return fixed
    of_items = (
        count * (s.dtype.itemsize * math.prod(s.item_shape))
        for s, count in zip(padded, lengths, strict=True)
    )
    return sum(of_items, torch.tensor(fixed))


def lengths_in(columns: Sequence[Column]) -> list[Tensor]:
    """Items of the rows in each column of unequal lengths, in the order of the columns."""
    return [column.lengths for column in columns if isinstance(column, Ragged)]


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


def order_by_length(columns: Sequence[Column]) -> Tensor | None:
    """The rows sorted by length, so that little is padded; None if none are of unequal length.

    Args:
        columns: of some rows.

    Returns:
        Shape (rows,), int64.
    """
    lengths = lengths_in(columns)
    return torch.argsort(torch.stack(lengths).sum(0), stable=True) if lengths else None
