"""What a round's contributions do to the center, however they travel.

An update sees how the workers have moved on average since the last center, and says how the center
moves. It computes elementwise, a stretch of the state at a time, so it costs one pass through
memory. What it remembers is kept with the center: it is part of every checkpoint, and of what is
passed on when all workers restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdl.protocols import Layout, Segment

Kept = Mapping[str, Tensor]
"""What an update remembers of a segment, by name."""
Memory = list[dict[str, Tensor]]
"""What an update keeps: for each segment of the layout, tensors of its size by name."""


@dataclass(frozen=True, slots=True)
class Contributions:
    """What a round's mean was formed from.

    Attributes:
        weights: rows of each contribution that has any, in rank order; 1 each where all count
            equally.
        world_size: number of workers in the run.
        staleness: how often the center has been updated since a contributor received it; the
            largest over the contributors.
        round: the round's number in the training, counted from 1; filled in by the center.
        share: what part of a full round's weight they have, in (0, 1]; 1 where everyone takes part
            in every round.
    """

    weights: tuple[float, ...]
    world_size: int
    staleness: int = 0
    round: int = 0
    share: float = 1.0


class CenterUpdate(ABC):
    """What contributions do to the center; stateless, as its memory is passed to it."""

    @property
    def keeps(self) -> tuple[str, ...]:
        """Names of what is kept for each updated element; all zero at first."""
        return ()

    def updates(self, segment: Segment) -> bool:
        """Whether ``step`` is asked how a segment moves; others become the workers' mean.

        Never asked for integers and booleans, which become the first contributor's.
        """
        return segment.kind == "parameters"

    @property
    def by_share(self) -> bool:
        """Whether a round moves the center by its ``share``, by which changes are then multiplied.

        Otherwise a round of one worker moves it as far as a round of all. Unlike ``step``, this
        also concerns the segments that become the mean: they move that part of the way.
        """
        return True

    def scale(self, staleness: int) -> float:
        """The factor on a change, > 0, before it is averaged with others.

        The weights of that mean are unchanged. Not asked if workers send any segment as values, not
        changes.

        Args:
            staleness: how often the center has been updated since the worker received it.
        """
        return 1.0

    def moves_alone(self, round: int) -> bool:
        """Whether the center also moves in a round without contributions, as by momentum.

        ``step`` is then called with a change of zero.

        Args:
            round: the round's number in the training, counted from 1.
        """
        return False

    @abstractmethod
    def step(
        self, center: Tensor, change: Tensor, memory: Kept, contributions: Contributions
    ) -> None:
        """Turn the workers' mean change into the center's.

        Args:
            center: a stretch of the last center, of ``center_dtype``; not to be written to.
            change: how the workers have moved away from it, times ``share`` if it goes by that; to
                be overwritten with how it moves.
            memory: the same stretch of each tensor in ``keeps``, to be updated.
            contributions: what the change was formed from.
        """


@dataclass(frozen=True)
class ReplaceByMean(CenterUpdate):
    """The mean of the contributions is the new center."""

    def updates(self, segment: Segment) -> bool:
        """Every segment becomes the mean."""
        return False

    def step(
        self, center: Tensor, change: Tensor, memory: Kept, contributions: Contributions
    ) -> None:
        """The center moves like the workers."""


def new_memory(update: CenterUpdate, layout: Layout) -> Memory:
    """What an update remembers before the first round."""
    return [
        {
            name: torch.zeros(segment.numel, dtype=segment.center_dtype)
            for name in (update.keeps if segment.averaged and update.updates(segment) else ())
        }
        for segment in layout
    ]
