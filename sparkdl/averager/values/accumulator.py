"""The sum of a round's contributions, formed as they arrive.

Contributions are added chunk by chunk in rank order, so a run gives the same bits whatever the
order of arrival. Weights are relative to the first contribution's, so that equal weights need only
additions; the last rank divides each chunk while it is in the cache. Callers ask whose turn a chunk
is; there are no locks, because a single thread adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sparkdl.averager.values.wire_format import AsDtype, Chunk, Packing
from sparkdl.protocols import Layout


@dataclass(eq=False)
class Accumulator:
    """One round's weighted mean.

    A rank's turn at a chunk comes when every lower rank has added its own.

    Attributes:
        layout: kinds and sizes of the segments.
        packings: the packing in which each segment's values arrive.
        chunks: the chunks of the part of the state that is summed.
        total: where the sum is formed, a tensor of ``center_dtype`` per segment; overwritten.
        ranks: who takes part, in ascending order.
    """

    layout: Layout
    packings: Sequence[Packing]
    chunks: Sequence[Chunk]
    total: list[Tensor]
    ranks: Sequence[int]

    def __post_init__(self) -> None:
        # For each chunk, the position in ``ranks`` of the rank whose turn it is.
        self._at = [0] * len(self.chunks)
        self._skipped: set[int] = set()
        self._examples: dict[int, float] = {}
        self._scaled: dict[int, float] = {}
        self._first: int | None = None
        self._weights: float | None = None

    def declare(self, rank: int, examples: float, scale: float = 1.0) -> None:
        """Say what a contribution weighs, before its first chunk.

        Args:
            rank: whose.
            examples: the window's weight; with none the rank has no chunks.
            scale: factor on its values, > 0, which leaves the weights unchanged.
        """
        if examples:
            self._examples[rank] = examples
            self._scaled[rank] = scale * examples
        else:
            self._skipped.add(rank)

    def turn(self, index: int) -> int | None:
        """Whose turn it is to add chunk ``index``; None once all have."""
        at, ranks = self._at[index], self.ranks
        while at < len(ranks) and ranks[at] in self._skipped:
            at += 1
        self._at[index] = at
        return ranks[at] if at < len(ranks) else None

    def in_place(self, rank: int, index: int) -> Tensor | None:
        """Where the first rank may put its chunk right away; None if it has to be added."""
        chunk = self.chunks[index]
        total = chunk.of(self.total)
        as_it_is = self.packings[chunk.segment] == AsDtype(total.dtype)
        if not as_it_is or not self._is_first(rank, index):
            return None
        return total

    def add(self, rank: int, index: int, values: Tensor | None) -> None:
        """Add a chunk of a contribution; it has to be the rank's turn.

        Args:
            rank: the contributing rank.
            index: position among the chunks.
            values: the chunk, unpacked; None if it has been put in place.
        """
        chunk = self.chunks[index]
        total = chunk.of(self.total)
        averaged = self.layout[chunk.segment].averaged
        if self._is_first(rank, index):
            self._first = rank
            if values is not None:
                total.copy_(values)
        elif averaged and values is not None:
            _add(total, values, self._scaled[rank] / self._unit)
        if averaged and rank == self.ranks[-1]:
            self._normalize(total)
        self._at[index] += 1

    def finish(self) -> None:
        """Complete the mean; somebody must have contributed."""
        if self.ranks[-1] not in self._examples:
            # The last rank divides each chunk while it is cached, unless it has nothing to add.
            for chunk in self.chunks:
                if self.layout[chunk.segment].averaged:
                    self._normalize(chunk.of(self.total))

    def _is_first(self, rank: int, index: int) -> bool:
        """Whether nobody has contributed before this rank, whose turn it is."""
        if self._first is not None:
            return rank == self._first
        return self.turn(index) == rank

    @property
    def _unit(self) -> float:
        """The weight of the first contribution, relative to which others are added."""
        assert self._first is not None
        return self._scaled[self._first]

    def _normalize(self, total: Tensor) -> None:
        if self._weights is None:
            weights = (self._examples[rank] / self._unit for rank in sorted(self._examples))
            self._weights = sum(weights)
        if self._weights != 1.0:
            np.divide(total.numpy(), self._weights, out=total.numpy())


def _add(total: Tensor, values: Tensor, weight: float) -> None:
    # numpy works in this thread; torch would wake its thread pool for every chunk.
    if weight == 1.0 and values.dtype == total.dtype:
        np.add(total.numpy(), values.numpy(), out=total.numpy())
    else:
        total.add_(values, alpha=weight)
