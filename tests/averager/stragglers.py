"""Policies in many schedules, one that does without some, and what it costs to decide by them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from support.simulation.plan import random_plan
from support.simulation.run import Outcome, simulate

from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.policies.round_policy import All, RoundPolicy


class AllButStragglers(All):
    """Backup workers (Chen et al. 2016): a round does without its slowest.

    Args:
        spared: how many are not waited for.
    """

    in_step = False

    def __init__(self, spared: int = 1) -> None:
        self._spared = spared

    def is_enough(self, entered: int, late: int, group: int) -> bool:
        return entered >= group - self._spared


def outcomes(
    policy: Callable[[], RoundPolicy],
    seeds: Iterable[int],
    times: int = 1,
    kind: type[Coordinator] = Coordinator,
) -> list[Outcome]:
    """How simulated runs end whose epochs have so many times as many windows as usual."""
    return [simulate(random_plan(seed, times=times), kind, policy=policy) for seed in seeds]


class Calls:
    """Counts the calls of functions while it is entered."""

    counted = 0

    def __enter__(self) -> None:
        sys.setprofile(self._count)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: object, event: str, argument: object) -> None:
        self.counted += event in ("call", "c_call")
