"""Rounds that are cut off: workers that are too slow contribute to the next one instead.

A round is over as soon as enough workers that began with its center have contributed. Later ones
join the next round with what they trained from an earlier center: no row is left out, and none
counts twice. Late contributions are taken whenever they come, but none is waited for, and they do
not replace one that is due: a round is never mostly stale because a few were slow before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import numpy as np

from sparkdl.averager.messages.progress import Position
from sparkdl.averager.policies.round_policy import All
from sparkdl.averager.policies.run_times import Numbers, RunTimes, best_cutoff
from sparkdl.events import WindowReport


class BackupWorkers(All):
    """A fixed number of workers are not waited for, as Chen et al. 2016 propose.

    At most that many are late, so that the others are always enough.

    Args:
        spared: how many, >= 1; one contribution is waited for in any case.
    """

    in_step = False

    def __init__(self, spared: int) -> None:
        self._spared = spared

    def is_enough(self, entered: int, late: int, group: int) -> bool:
        """With all but ``spared`` of those that began with the round's center."""
        return entered - late >= max(1, group - self._spared)


class PredictedCutoff(BackupWorkers):
    """Waits for as many as give the most contributions per second, as predicted each round.

    Once per round, when its first contribution comes, this takes time linear in the number of
    workers: a few milliseconds for hundreds. Until enough times are known, everyone is waited for.

    Args:
        seed: for the draws.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(0)
        self._seed = seed

    def begin(self, positions: Sequence[Position]) -> None:
        """Forget everything: the workers may differ from those before."""
        workers = len(positions)
        self._times = RunTimes(workers, self._seed)
        self._round = 0
        self._began, self._closed = np.zeros(workers), np.full(workers, np.nan)
        self._now = self._over = np.inf

    def began(self, rank: int, now: float) -> None:
        """Start counting the rank's time."""
        self._began[rank], self._closed[rank] = now, np.nan

    def closed(self, window: WindowReport, now: float) -> None:
        """Remember its time; the last of an epoch may have fewer steps."""
        self._now, rank = now, window.rank
        if not np.isnan(self._closed[rank]):
            return  # it resends what it has trained before
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
        # One that has been late for more rounds than are remembered is not expected in this one.
        late = [rank for rank in late if self._times.knows([rank])]
        begins = self._began[due].min()
        times = self._draw(due + late) - begins
        between_s = max(begins - self._over, 0.0)
        return best_cutoff(times[:, : len(due)], times[:, len(due) :], between_s)

    def _draw(self, ranks: list[int]) -> Numbers:
        """Draw when contributions come, or came."""
        began, closed = self._began[ranks], self._closed[ranks]
        drawn = began + self._times.draw(ranks, self._now - began)
        return np.where(np.isnan(closed), drawn, closed)

    def committed(self, windows: Iterable[WindowReport], active: Set[int]) -> Iterable[int]:
        """Note that the round was over when the last of them came."""
        self._round += 1
        self._over = max((self._closed[window.rank] for window in windows), default=np.inf)
        return ()
