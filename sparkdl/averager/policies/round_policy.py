"""Who is waited for, in a round and before one; apart from who is there.

The coordinator asks, and does the rest: a policy decides nothing about losses, epochs or
checkpoints, so that these hold whatever it answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence, Set

from sparkdl.averager.messages.progress import Position
from sparkdl.events import WindowReport


class RoundPolicy(ABC):
    """Who is waited for; an object a run, asked as things happen.

    What it answers must not cost more with more workers, but for ``group``, ``opened`` and
    ``committed``, once a round.
    """

    in_step: bool = False
    """Whether every round has everyone who is there, so that all have been sent the same center."""
    holds_windows: bool = False
    """Whether any window may have to wait until its rank contributes it: see ``may_contribute``."""

    def begin(self, positions: Sequence[Position]) -> None:  # noqa: B027 - not all have to know
        """Take note of where the ranks stand when the run begins, or begins again."""

    def began(self, rank: int, now: float) -> None:  # noqa: B027 - as above
        """Take note that a rank is sent what it needs to train.

        Args:
            rank: whose window begins.
            now: when, in seconds.
        """

    def closed(self, window: WindowReport, now: float) -> None:  # noqa: B027 - as above
        """Take note that a rank has trained a window; once more, if its round starts over.

        Args:
            window: its report.
            now: when the averager was told, in seconds.
        """

    @abstractmethod
    def group(self, rank: int, active: Set[int]) -> Collection[int]:
        """Whose contributions are the round that a rank's begins; the others wait for the next.

        Args:
            rank: who contributes.
            active: who is there and has not ended its epoch.
        """

    def opened(self, group: Set[int], late: Set[int]) -> None:  # noqa: B027 - as above
        """Take note of a round that begins; again, if it starts over.

        Args:
            group: whose contributions it is of.
            late: who was left out of a round since it was sent a center; they may be of the group.
        """

    def is_enough(self, entered: int, late: int, group: int) -> bool:
        """Whether the round does without those of its group who have not begun to contribute.

        They contribute to the next, what they have trained from the center before. Not asked where
        every round has everyone.

        Args:
            entered: how many have begun.
            late: how many of these were left out of a round before.
            group: how many could.
        """
        return entered == group

    def goes_on(self, rank: int, active: Set[int]) -> bool:
        """Whether a rank that has contributed may go on; it waits for the center otherwise.

        Never asked after a last window of an epoch. One that has just come in trains at once: then
        it is asked whether it may contribute what it has trained. About one that waits it is asked
        once more when ``committed`` names it, and when another leaves ``active`` or comes to it.
        """
        return True

    def may_contribute(self, rank: int, active: Set[int]) -> bool:
        """Whether a rank that has trained a window may contribute it; it waits otherwise.

        Has an effect only with ``holds_windows``: workers then send nothing before they may. It
        is asked once more when ``committed`` names the rank, and when another leaves ``active`` or
        comes to it.
        """
        return True

    def committed(self, windows: Iterable[WindowReport], active: Set[int]) -> Iterable[int]:
        """Take note of a commit; returns whom to ask about again, of those who wait."""
        return ()


class All(RoundPolicy):
    """Everyone in every round: the same bits each time."""

    in_step = True

    def group(self, rank: int, active: Set[int]) -> Collection[int]:
        """All who are there."""
        return active


class Nobody(RoundPolicy):
    """Each worker with the center by itself, one after another: nobody waits for the slow ones."""

    def group(self, rank: int, active: Set[int]) -> Collection[int]:
        """The rank alone."""
        return (rank,)


class RoundRobin(Nobody):
    """Each worker with the center by itself, in the order of ranks: the same bits each time.

    After a rank comes the next one that is there and has not ended its epoch; after the last, the
    first. An epoch begins with the first.

    Args:
        period: steps in a window, but for the last of an epoch.
    """

    holds_windows = True

    def __init__(self, period: int) -> None:
        self._period = period
        self._world_size = 0
        self._next_rank = 0

    def begin(self, positions: Sequence[Position]) -> None:
        """Go on with who has had the fewest windows of the epoch."""
        self._world_size = len(positions)
        windows = [-(-each.step_of_epoch // self._period) for each in positions]
        self._next_rank = windows.index(min(windows))

    def may_contribute(self, rank: int, active: Set[int]) -> bool:
        """Whether nobody is there who comes before."""
        return rank == self._next(active)

    def committed(self, windows: Iterable[WindowReport], active: Set[int]) -> Iterable[int]:
        """Go on with the next rank."""
        for window in windows:
            self._next_rank = (window.rank + 1) % self._world_size if active else 0
        return [self._next(active)] if active else ()

    def _next(self, active: Set[int]) -> int:
        """Found after as many looks as ranks are away that come before."""
        ranks = range(self._next_rank, self._next_rank + self._world_size)
        return next(rank % self._world_size for rank in ranks if rank % self._world_size in active)
