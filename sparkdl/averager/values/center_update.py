"""What a round's contributions do to the center, independent of how they travel.

An update sees how the workers have moved on average since the last center, and says how the center
moves. It computes element by element, a stretch of the state at a time, so that it costs one pass
through memory. What it remembers is kept with the center: it is part of every checkpoint, and of
what is passed on when all workers restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdl.protocols import Layout, Segment

Memory = list[dict[str, Tensor]]
"""What an update keeps: for each segment of the layout, some tensors of its size, by name."""


@dataclass(frozen=True, slots=True)
class Contributions:
    """What a round's mean consists of.

    Attributes:
        weights: rows of each contribution that has any, by rank; 1 each where all count equally.
        world_size: workers of the run.
        staleness: how often the center has been updated since a contributor received it; the
            largest of several contributors'.
        round: its number in the training, counted from 1; set by the center.
    """

    weights: tuple[int, ...]
    world_size: int
    staleness: int = 0
    round: int = 0


class CenterUpdate(ABC):
    """What contributions do to the center; a value, which is passed what it remembers."""

    @property
    def keeps(self) -> tuple[str, ...]:
        """Names of what is kept for each element that is updated; all zero at first."""
        return ()

    def updates(self, segment: Segment) -> bool:
        """Whether ``step`` is asked how a segment moves; others become the workers' mean.

        Never asked of integers and booleans, which become the first contributor's.
        """
        return segment.kind == "parameters"

    def scale(self, staleness: int) -> float:
        """The factor for a change, > 0, before the mean with others is formed.

        It does not affect that mean's weights. Not asked where workers send values of any segment,
        not changes.

        Args:
            staleness: how often the center has been updated since the worker received it.
        """
        return 1.0

    @abstractmethod
    def step(
        self,
        center: Tensor,
        change: Tensor,
        memory: Mapping[str, Tensor],
        contributions: Contributions,
    ) -> None:
        """Turn the workers' mean change into the center's.

        Args:
            center: a stretch of the last center, of ``center_dtype``; must not be written to.
            change: how the workers have moved from it; to be overwritten with how it moves.
            memory: the same stretch of each tensor in ``keeps``, to be updated.
            contributions: what the change is the mean of.
        """


@dataclass(frozen=True)
class ReplaceByMean(CenterUpdate):
    """The mean of the contributions is the new center."""

    def updates(self, segment: Segment) -> bool:
        """Every segment becomes the mean."""
        return False

    def step(
        self,
        center: Tensor,
        change: Tensor,
        memory: Mapping[str, Tensor],
        contributions: Contributions,
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
