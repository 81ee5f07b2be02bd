"""Rounds that are cut off: who is too slow contributes to the next one, and is waited for no more.

A round is over as soon as enough have contributed who began with its center. Who comes later takes
part in the next round, with what it has trained from a center before: no row is left out, and none
counts twice. Late contributions are taken whenever they come, but none is waited for, and they do
not stand for one that is due: most of a round is never stale because a few were slow before.
"""

from __future__ import annotations

from sparkdl.averager.round_policy import All


class BackupWorkers(All):
    """A fixed number are not waited for, as Chen et al. 2016 propose.

    As many are late at most, so that the others are always enough.

    Args:
        spared: how many, >= 1; one contribution is waited for in any case.
    """

    in_step = False

    def __init__(self, spared: int) -> None:
        self._spared = spared

    def is_enough(self, entered: int, late: int, group: int) -> bool:
        """With all but so many, of those who began with the round's center."""
        return entered - late >= max(1, group - self._spared)
