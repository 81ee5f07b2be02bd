"""Parameters that are whole numbers, so that a replay of the commits has to match them exactly.

A window is a function of the center that it began with and of its rows. A round's outcome is the
weighted sum of the contributions, modulo a prime: anything added twice, left out, added to another
sum or trained from an old center shows.
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
        ranks: the ranks that take part, in ascending order.
        chunks: the number of chunks.
    """

    def __init__(self, ranks: Sequence[int], chunks: int) -> None:
        self._order = RankOrder(ranks, chunks)
        self._chunks = [0] * chunks
        self._weights: dict[int, int] = {}

    def declare(self, rank: int, weight: float, staleness: int = 0) -> None:
        """Say how stale a contribution is, and what it weighs: 0 if there will be none."""
        self._weights[rank] = int(weight)  # of a simulation, whole numbers
        if not weight:
            self._order.skip(rank)

    def turn(self, index: int) -> int | None:
        """The rank whose turn it is to add a chunk."""
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
    """The center and its sum, as ``averager.Center`` has them; subclasses behave alike.

    Args:
        chunks: the number of messages that make up a contribution.

    Attributes:
        value: the parameters.
        sum: the sum being formed; None between two rounds.
    """

    def __init__(self, chunks: int) -> None:
        self.value: float = 1
        self.sum: Sum | None = None
        self._chunks = chunks

    def send_to(self, rank: int) -> float:
        """The value that a worker is sent, and goes on from."""
        return self.value

    def open_sum(self, ranks: Sequence[int]) -> None:
        """Start a sum."""
        self.sum = Sum(ranks, self._chunks)

    def commit(self, contributions: Contributions) -> None:
        """Make the sum the new center."""
        assert self.sum is not None
        self.value = self.sum.finish() if contributions.weights else self.value
        self.sum = None

    def start_epoch(self) -> None:
        """Handle the end of an epoch."""

    def require(
        self, before: float, contributions: Contributions, values: Mapping[int, float]
    ) -> None:
        """Check that the center is what the committed windows give.

        Args:
            before: the center before them.
            contributions: what was committed.
            values: by rank, the values trained by those that have rows.

        Raises:
            AssertionError: it is something else.
        """
        pairs = zip(contributions.weights, values.values(), strict=True)
        total = sum(weight * value for weight, value in pairs) % PRIME
        expected = total if values else before
        assert self.value == expected, "the center is not what was committed"
