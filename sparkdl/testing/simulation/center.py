"""The averager's center in a simulation: numbers of which an oracle says what they have to be.

A window is a function of the number that it began with and of its rows, which spreads like a hash:
anything added twice, left out, added to another sum or trained from an old center shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdl.averager.values.center import Center as AveragerCenter
from sparkdl.averager.values.center import CenterSpec
from sparkdl.averager.values.center_update import CenterUpdate, Contributions, ReplaceByMean
from sparkdl.averager.values.wire_format import FULL_PRECISION, WireFormat
from sparkdl.protocols import Segment

Oracle = Callable[[float, Contributions, Mapping[int, float], Mapping[int, float]], float]
"""(center before, contributions, what ranks trained, what they began with) -> center after"""

PRIME = (1 << 61) - 1
TOLERANCE = 1e-12 * PRIME
"""Values are up to a few times PRIME, and their rounding errors stay even where they cancel."""


def trained(center: float, rank: int, epoch: int, window: int) -> float:
    """A replica after a window that began with ``center``."""
    return (center * 31 + rank * 1_000_003 + epoch * 10_007 + window * 101 + 7) % PRIME


@dataclass(frozen=True)
class _Mean(ReplaceByMean):
    """The mean of a round's contributions is the center, whoever else is late."""

    @property
    def by_share(self) -> bool:
        """Never."""
        return False


def mean(
    center: float,
    contributions: Contributions,
    values: Mapping[int, float],
    begun: Mapping[int, float],
) -> float:
    """What the center is after a round in which everybody sends values."""
    pairs = zip(contributions.weights, values.values(), strict=True)
    return sum(weight * value for weight, value in pairs) / sum(contributions.weights)


class Center(AveragerCenter):
    """The averager's center, which has a number for each fragment.

    Args:
        chunks: the number of messages that make up a contribution; each holds the same number.
        wire_format: how values travel.
        update: what contributions do to the center.
        fragments: how many parts the rounds exchange in turn.
        oracle: says what it has to be after each commit.
    """

    def __init__(
        self,
        chunks: int,
        wire_format: WireFormat | None = None,
        update: CenterUpdate | None = None,
        fragments: int = 1,
        oracle: Oracle = mean,
    ) -> None:
        self.wire_format = wire_format or FULL_PRECISION
        self.update = update or _Mean()
        self.fragments = fragments
        self._oracle = oracle
        # A segment travels in a message of its own.
        layout = (Segment("parameters", torch.float64, fragments),) * chunks
        ones = [torch.ones(fragments, dtype=torch.float64) for _ in layout]
        self.spec = CenterSpec(
            layout=layout, wire_format=self.wire_format, update=self.update, fragments=fragments
        )
        super().__init__(self.spec, ones, 1)

    def replica(self) -> list[Tensor]:
        """Memory for a worker's copy."""
        return [torch.zeros_like(segment) for segment in self.values]

    @property
    def numbers(self) -> list[float]:
        """The number of each fragment."""
        first, *others = (segment.tolist() for segment in self.values)
        assert all(other == first for other in others), "the chunks of one sum differ"
        return first

    def require(
        self,
        before: float,
        contributions: Contributions,
        values: Mapping[int, float],
        begun: Mapping[int, float],
        fragment: int,
    ) -> None:
        """Check that the center is what the oracle says.

        Args:
            before: the fragment's number before the round.
            contributions: what was committed.
            values: by rank, the values trained by those that have rows.
            begun: by rank, what they began with.
            fragment: which part the round has changed.

        Raises:
            AssertionError: it is something else.
        """
        expected, found = before, self.numbers[fragment]
        if values or self.update.moves_alone(self._rounds):
            told = replace(contributions, round=self._rounds)
            expected = self._oracle(before, told, values, begun)
        assert math.isclose(found, expected, rel_tol=1e-12, abs_tol=TOLERANCE), (
            f"the center is {found!r} after {contributions}, and the oracle's {expected!r}"
        )
