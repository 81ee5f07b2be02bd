"""A policy that does without some: as strategies of one's own may bring them."""

from __future__ import annotations

from sparkdl.averager.policies.round_policy import All


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
