"""Who is waited for, in a round and before one, independent of who is present.

The coordinator asks, and does the rest: a policy decides nothing about losses, epochs or
checkpoints, which therefore work whatever it answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence, Set

from sparkdl.averager.run_events import Position
from sparkdl.events import WindowReport


class RoundPolicy(ABC):
    """Who is waited for; one object per run, asked as things happen.

    The cost of an answer must not grow with the number of workers, except for ``group``, ``opened``
    and ``committed``, which are called once per round.
    """

    in_step: bool = False
    """Whether everyone present takes part in every round, so that all were sent the same center."""
    holds_windows: bool = False
    """Whether any window may have to wait until its rank contributes it: see ``may_contribute``."""

    def begin(self, positions: Sequence[Position]) -> None:  # noqa: B027 - not all have to know
        """Take note of the ranks' positions when the run begins, or restarts."""

    def began(self, rank: int, now: float) -> None:  # noqa: B027 - as above
        """Take note that a rank is being sent what it needs to train.

        Args:
            rank: the rank whose window begins.
            now: when, in seconds.
        """

    def closed(self, window: WindowReport, now: float) -> None:  # noqa: B027 - as above
        """Take note that a rank has trained a window; called again if its round starts over.

        Args:
            window: the window's report.
            now: when the averager was told, in seconds.
        """

    @abstractmethod
    def group(self, rank: int, active: Set[int]) -> Collection[int]:
        """Whose contributions form the round that a rank begins; the others wait for the next.

        Args:
            rank: the rank that contributes.
            active: the ranks that are present and have not ended their epoch.
        """

    def opened(self, group: Set[int], late: Set[int]) -> None:  # noqa: B027 - as above
        """Take note that a round begins; called again if it starts over.

        Args:
            group: the ranks whose contributions form it.
            late: ranks left out of a round since they were sent a center; they may be in the group.
        """

    def is_enough(self, entered: int, late: int, group: int) -> bool:
        """Whether the round does without those of its group that have not begun to contribute.

        These contribute what they trained from the earlier center to the next round. Not asked
        where everyone takes part in every round.

        Args:
            entered: how many have begun.
            late: how many of these were left out of an earlier round.
            group: how many are in the group.
        """
        return entered == group

    def goes_on(self, rank: int, active: Set[int]) -> bool:
        """Whether a rank that has contributed may go on; otherwise it waits for the center.

        Never asked after an epoch's last window. A rank that has just been let in trains at once;
        the question is then whether it may contribute what it trained. The question is repeated for
        a waiting rank when ``committed`` names it, and when another leaves or enters ``active``.
        """
        return True

    def may_contribute(self, rank: int, active: Set[int]) -> bool:
        """Whether a rank that has trained a window may contribute it; otherwise it waits.

        Has an effect only with ``holds_windows``: workers then send nothing until they may. The
        question is repeated when ``committed`` names the rank, and when another leaves or enters
        ``active``.
        """
        return True

    def committed(self, windows: Iterable[WindowReport], active: Set[int]) -> Iterable[int]:
        """Take note of a commit; returns the waiting ranks to ask about again."""
        return ()


class All(RoundPolicy):
    """Everyone takes part in every round: the same bits in every run."""

    in_step = True

    def group(self, rank: int, active: Set[int]) -> Collection[int]:
        """All that are present."""
        return active


class Nobody(RoundPolicy):
    """Each worker exchanges with the center by itself, so nobody waits for slow workers."""

    def group(self, rank: int, active: Set[int]) -> Collection[int]:
        """The rank alone."""
        return (rank,)


class RoundRobin(Nobody):
    """Each worker exchanges with the center by itself, in rank order: the same bits in every run.

    Each rank is followed by the next one that is present and has not ended its epoch, the last by
    the first. An epoch begins with the first.

    Args:
        period: steps in each window, except the last of an epoch.
    """

    holds_windows = True

    def __init__(self, period: int) -> None:
        self._period = period
        self._world_size = 0
        self._next_rank = 0

    def begin(self, positions: Sequence[Position]) -> None:
        """Go on with the rank that has had the fewest windows in the epoch."""
        self._world_size = len(positions)
        windows = [-(-each.step_of_epoch // self._period) for each in positions]
        self._next_rank = windows.index(min(windows))

    def may_contribute(self, rank: int, active: Set[int]) -> bool:
        """Whether nobody present comes before this rank."""
        return rank == self._next(active)

    def committed(self, windows: Iterable[WindowReport], active: Set[int]) -> Iterable[int]:
        """Go on with the next rank."""
        for window in windows:
            self._next_rank = (window.rank + 1) % self._world_size if active else 0
        return [self._next(active)] if active else ()

    def _next(self, active: Set[int]) -> int:
        """The next rank; takes as many steps as there are absent ranks before it."""
        ranks = range(self._next_rank, self._next_rank + self._world_size)
        return next(rank % self._world_size for rank in ranks if rank % self._world_size in active)
