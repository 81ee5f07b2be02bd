"""Parameters that are whole numbers, so that a replay of the commits has to give them exactly.

A window is a function of the center that it began with and of the rows that it is of. A round's
outcome is the sum of the contributions by weight, modulo a prime: whatever is added twice, left
out, added to another sum or trained from an old center shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkdl.averager.accumulator import RankOrder
from sparkdl.events import WindowReport

PRIME = (1 << 61) - 1


def trained(center: int, rank: int, epoch: int, window: int) -> int:
    """A replica after a window that began with ``center``."""
    return (center * 31 + rank * 1_000_003 + epoch * 10_007 + window * 101 + 7) % PRIME


def replayed(center: int, windows: Sequence[WindowReport], begun: Mapping[int, int]) -> int:
    """The center after a round.

    Args:
        center: before it.
        windows: of the round.
        begun: with which center each rank has begun its window.
    """
    weighted = [window for window in windows if window.weight]
    if not weighted:
        return center
    total = sum(
        window.weight * trained(begun[window.rank], window.rank, window.epoch, window.step_of_epoch)
        for window in weighted
    )
    return total % PRIME


class Sum:
    """One round's sum; each of its chunks has to become the same number.

    Args:
        ranks: who takes part, in ascending order.
        chunks: how many there are.
    """

    def __init__(self, ranks: Sequence[int], chunks: int) -> None:
        self._order = RankOrder(ranks, chunks)
        self._chunks = [0] * chunks
        self._weights: dict[int, int] = {}

    def declare(self, rank: int, weight: int) -> None:
        """Say what a contribution weighs; nothing if there will be none."""
        self._weights[rank] = weight
        if not weight:
            self._order.skip(rank)

    def turn(self, index: int) -> int | None:
        """Whose turn it is to add a chunk."""
        return self._order.turn(index)

    def add(self, rank: int, index: int, value: int) -> None:
        """Add a chunk."""
        self._chunks[index] = (self._chunks[index] + self._weights[rank] * value) % PRIME
        self._order.advance(index)

    def finish(self) -> int:
        """The outcome."""
        if len(set(self._chunks)) != 1:
            raise AssertionError(f"the chunks of one sum differ: {self._chunks}")
        return self._chunks[0]
