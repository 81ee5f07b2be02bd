"""What all workers tell each other through the driver, all equally often."""

from __future__ import annotations

from sparkdl.averager.coordination.decisions import Tell
from sparkdl.averager.coordination.events import Member
from sparkdl.errors import TrainingError


class Gathers:
    """The values given in an incomplete gather; one gather after another.

    Args:
        world_size: number of ranks.

    Attributes:
        waiting: workers that have given and wait for what the others give, by rank.
    """

    def __init__(self, world_size: int) -> None:
        self.waiting: dict[int, Member] = {}
        self._world_size = world_size
        self._given: dict[int, object] = {}

    def give(self, member: Member, value: object, *, commit: bool = False) -> Tell | None:
        """Take what a worker gives; for the last one, returns what all are told.

        Args:
            member: the worker.
            value: what it gives.
            commit: whether they are asked for a commit.

        Raises:
            TrainingError: it has already given, and others have not.
        """
        if member.rank in self.waiting:
            raise TrainingError(f"{member} gave twice before all others had given once")
        self.waiting[member.rank] = member
        self._given[member.rank] = value
        if len(self._given) < self._world_size:
            return None
        members, self.waiting = tuple(self.waiting.values()), {}
        given, self._given = self._given, {}
        return Tell(members, tuple(given[rank] for rank in range(self._world_size)), commit)

    def withdraw(self, rank: int) -> None:
        """Forget what a lost rank gave to an incomplete gather: it gives again."""
        self.waiting.pop(rank, None)
        self._given.pop(rank, None)

    @property
    def present(self) -> frozenset[int] | None:
        """The ranks that have given to an incomplete gather; None if nobody waits."""
        return frozenset(self._given) if self._given else None
