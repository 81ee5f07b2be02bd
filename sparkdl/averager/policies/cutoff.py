"""Rounds with a cutoff: workers that are too slow contribute to the next one instead.

A round is over as soon as enough workers that began with its center have contributed. Latecomers
take part in the next round, with what they trained from an earlier center: no row is left out, and
none counts twice. Late contributions are taken whenever they come, but are not waited for, and do
not stand in for one that is due: most of a round is never stale just because a few were slow
before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import numpy as np

from sparkdl.averager.messages.progress import Position
from sparkdl.averager.policies.round_policy import All
from sparkdl.averager.policies.run_times import Numbers, RunTimes, best_cutoff
from sparkdl.events import WindowReport


class BackupWorkers(All):
    """A fixed number of workers are not waited for, as proposed by Chen et al. 2016.

    No more than that are ever late, so the others are always enough.

    Args:
        spared: how many, >= 1; at least one contribution is waited for in any case.
    """

    in_step = False

    def __init__(self, spared: int) -> None:
        self._spared = spared

    def is_enough(self, entered: int, late: int, group: int) -> bool:
        """Enough is all but ``spared`` of those that began with the round's center."""
        return entered - late >= max(1, group - self._spared)


class PredictedCutoff(BackupWorkers):
    """Waits for as many as maximize the contributions per second, as predicted in each round.

    Once per round, when its first contribution comes, deciding takes time proportional to the
    workers: a few milliseconds for hundreds. Until enough times are known, everyone is waited for.

    Args:
        seed: seed of the random numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(0)
        self._seed = seed

    def begin(self, positions: Sequence[Position]) -> None:
        """Forget everything: the workers may be different ones."""
        workers = len(positions)
        self._times = RunTimes(workers, self._seed)
        self._round = 0
        self._began, self._closed = np.zeros(workers), np.full(workers, np.nan)
        self._now = self._over = np.inf

    def began(self, rank: int, now: float) -> None:
        """Start the rank's clock."""
        self._began[rank], self._closed[rank] = now, np.nan

    def closed(self, window: WindowReport, now: float) -> None:
        """Remember the rank's time; an epoch's last window may have fewer steps."""
        self._now, rank = now, window.rank
        if not np.isnan(self._closed[rank]):
            return  # it is resending what it trained before
        self._closed[rank] = now
        if not window.last:
            self._times.note(rank, self._round, now - self._began[rank])

    def opened(self, group: Set[int], late: Set[int]) -> None:
        """Decide how many to wait for."""
        due = sorted(group - late)
        self._spared = len(group) - self._cutoff(due, sorted(group & late)) if due else 0

    def _cutoff(self, due: list[int], late: list[int]) -> int:
        self._times.fit()
        if not self._times.knows(due):
            return len(due)
        # One that has been late for longer than is remembered is not expected in this round.
        late = [rank for rank in late if self._times.knows([rank])]
        begins = self._began[due].min()
        times = self._draw(due + late) - begins
        between_s = max(begins - self._over, 0.0)
        return best_cutoff(times[:, : len(due)], times[:, len(due) :], between_s)

    def _draw(self, ranks: list[int]) -> Numbers:
        """Draw when contributions will come, or take when they came."""
        began, closed = self._began[ranks], self._closed[ranks]
        drawn = began + self._times.draw(ranks, self._now - began)
        return np.where(np.isnan(closed), drawn, closed)

    def committed(self, windows: Iterable[WindowReport], active: Set[int]) -> Iterable[int]:
        """The round was over when the last of these had come."""
        self._round += 1
        self._over = max((self._closed[window.rank] for window in windows), default=np.inf)
        return ()
