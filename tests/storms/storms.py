"""What all storms share: which there are, and when a training under faults has ended right.

Where a window depends only on the center, one process trains the committed windows again and has
to arrive at the same parameters. Where the workers need each other, all go on from a commit, and
the parameters have to be those of a job without faults.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from support.chaos import Storm
from support.replay import relative_difference
from torch import nn

from sparkdl.events import EpochSummary

SAME = 1e-4
"""The largest difference of equal parameters, relative to the largest value of each tensor: float32
sums are formed in another order or precision. One window more or less makes it 1e-2."""


def seeds(how_many: int) -> list[int]:
    """The seeds of a part's jobs, from 1 on; that in ``STORM_SEED`` alone if there is one."""
    only = os.environ.get("STORM_SEED")
    return [int(only)] if only else list(range(1, how_many + 1))


def require_every_row(history: Sequence[EpochSummary], rows: int, epochs: int) -> None:
    examples = [epoch.examples for epoch in history]
    assert examples == [rows] * epochs, f"rows were lost or doubled: {examples}"


def require_same(module: nn.Module, expected: nn.Module, same: float = SAME) -> float:
    """How far the parameters are from what they have to be."""
    difference = relative_difference(module, expected)
    assert difference < same, f"parameters differ by {difference:.2g} from what they should be"
    return difference


def show(part: str, seed: int, strategy: object, storm: Storm) -> None:
    """Print what happened to a job."""
    print(f"  {', '.join(storm.injected)}")
    seen = f"{storm.hits} faults, {len(storm.losses)} losses seen"
    print(f"{part}, STORM_SEED={seed}, {strategy}: {seen}", flush=True)
