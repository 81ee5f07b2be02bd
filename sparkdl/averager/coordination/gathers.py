"""What all workers exchange through the driver, all equally often."""

from __future__ import annotations

from sparkdl.averager.coordination.decisions import Tell
from sparkdl.averager.coordination.events import Member
from sparkdl.errors import TrainingError


class Gathers:
    """The values given in the gather under way; one gather after another.

    Args:
        world_size: number of ranks.

    Attributes:
        waiting: the workers that have given and wait for the others, by rank.
    """

    def __init__(self, world_size: int) -> None:
        self.waiting: dict[int, Member] = {}
        self._world_size = world_size
        self._given: dict[int, object] = {}

    def give(self, member: Member, value: object, *, commit: bool = False) -> Tell | None:
        """Take what a worker gives; after the last one, returns what all are told.

        Args:
            member: the worker.
            value: what it gives.
            commit: whether to ask the workers for a commit.

        Raises:
            TrainingError: it gave twice before all others had given once.
        """
        if member.rank in self.waiting:
            raise TrainingError(
                f"{member} contributed twice to a gather before all others had contributed once"
            )
        self.waiting[member.rank] = member
        self._given[member.rank] = value
        if len(self._given) < self._world_size:
            return None
        members, self.waiting = tuple(self.waiting.values()), {}
        given, self._given = self._given, {}
        return Tell(members, tuple(given[rank] for rank in range(self._world_size)), commit)

    def withdraw(self, rank: int) -> None:
        """Forget what a lost rank gave without getting the others' values: it will give again."""
        self.waiting.pop(rank, None)
        self._given.pop(rank, None)

    @property
    def present(self) -> frozenset[int] | None:
        """The ranks that have given to the unfinished gather; None if nobody waits."""
        return frozenset(self._given) if self._given else None
