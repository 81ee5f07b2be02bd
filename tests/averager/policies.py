"""Policies that wait for some: as strategies of one's own may bring them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from sparkdl.averager.progress import Position
from sparkdl.averager.round_policy import All, Nobody
from sparkdl.events import WindowReport


class AllButStragglers(All):
    """Backup workers (Chen et al. 2016): a round does without its slowest.

    Args:
        spared: how many are not waited for.
    """

    in_step = False

    def __init__(self, spared: int = 1) -> None:
        self._spared = spared

    def is_enough(self, entered: int, group: int) -> bool:
        return entered >= group - self._spared


class BoundedStaleness(Nobody):
    """Stale synchronous parallel: who is ahead of the slowest by more windows than that waits.

    Args:
        bound: windows of the epoch.
    """

    def __init__(self, bound: int = 1) -> None:
        self._bound = bound

    def begin(self, positions: Sequence[Position]) -> None:
        self._done = [position.step_of_epoch for position in positions]

    def admits(self, rank: int, active: Set[int]) -> bool:
        slowest = min((self._done[other] for other in active), default=0)
        return self._done[rank] - slowest <= self._bound

    def committed(self, windows: Iterable[WindowReport]) -> bool:
        for window in windows:
            self._done[window.rank] = 0 if window.last else window.step_of_epoch
        return True
