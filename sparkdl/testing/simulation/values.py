"""Parameters that are whole numbers, so that a replay of the commits has to give them exactly.

A window is a function of the center that it began with and of the rows that it is of. A round's
outcome is the sum of the contributions by weight, modulo a prime: whatever is added twice, left
out, added to another sum or trained from an old center shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from sparkdl.averager.values.accumulator import RankOrder
from sparkdl.averager.values.center_update import Contributions

PRIME = (1 << 61) - 1
T = TypeVar("T", int, float)


def trained(center: T, rank: int, epoch: int, window: int) -> T:
    """A replica after a window that began with ``center``."""
    return (center * 31 + rank * 1_000_003 + epoch * 10_007 + window * 101 + 7) % PRIME


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

    def declare(self, rank: int, weight: int, staleness: int = 0) -> None:
        """Say what a contribution weighs, nothing if there will be none; and how stale it is."""
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


class Center:
    """The center and its sum, as ``averager.Center`` has them; others than this one behave alike.

    Args:
        chunks: into how many messages a contribution is cut.

    Attributes:
        value: the parameters.
        sum: what is being added; None between two rounds.
    """

    def __init__(self, chunks: int) -> None:
        self.value: float = 1
        self.sum: Sum | None = None
        self._chunks = chunks

    def send_to(self, rank: int) -> float:
        """What a worker is sent, from which it goes on."""
        return self.value

    def open_sum(self, ranks: Sequence[int]) -> None:
        """Begin a sum."""
        self.sum = Sum(ranks, self._chunks)

    def commit(self, contributions: Contributions) -> None:
        """Make the sum the new center."""
        assert self.sum is not None
        self.value = self.sum.finish() if contributions.weights else self.value
        self.sum = None

    def start_epoch(self) -> None:
        """An epoch has ended."""

    def require(
        self, before: float, contributions: Contributions, values: Mapping[int, float]
    ) -> None:
        """Check that the center is what the committed windows give.

        Args:
            before: the center before them.
            contributions: what was committed.
            values: what those who have rows have trained, by rank.

        Raises:
            AssertionError: it is not.
        """
        pairs = zip(contributions.weights, values.values(), strict=True)
        total = sum(weight * value for weight, value in pairs) % PRIME
        expected = total if values else before
        assert self.value == expected, "the center is not what was committed"
