"""What the ranks report of their rows, and what they exchange through the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdl.averager.coordination.actions import Actions
from sparkdl.averager.coordination.membership import Member
from sparkdl.errors import DataError, TrainingError
from sparkdl.feed.statistics.shards import DataStatistics, ShardStatistics


class Shards:
    """Every rank's rows, as far as they are known.

    Attributes:
        row_servers: where others fetch each rank's rows, as it reported; None if they do not.
        loss_use: what the driver has made of the rows for the loss, for workers to interpret.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.row_servers: list[object] = [None] * world_size
        self.loss_use: Mapping[str, Any] = {}
        self._found: dict[int, ShardStatistics] = {}
        self._columns: int | None = None
        self._statistics: DataStatistics | None = None

    def __contains__(self, rank: int) -> bool:
        """Whether a rank has reported its rows."""
        return rank in self._found

    @property
    def known(self) -> bool:
        """Whether every rank has reported its rows."""
        return len(self._found) == self._world_size

    @property
    def statistics(self) -> DataStatistics:
        """What all found together; available once every rank has reported something."""
        if self._statistics is None:
            self._statistics = DataStatistics.of(
                [self._found[rank] for rank in range(self._world_size)]
            )
        return self._statistics

    def note(self, rank: int, shard: ShardStatistics) -> DataStatistics | None:
        """Take note of what a rank found.

        Args:
            rank: the rank whose rows they are.
            shard: what it found in its rows.

        Returns:
            The statistics of all ranks' rows with the last rank's; else None.

        Raises:
            DataError: the rank has come back, and its rows differ.
            TrainingError: the rank has other columns than the rest.
        """
        if self._columns is None:
            self._columns = len(shard.columns)
        if self._columns != len(shard.columns):
            raise TrainingError(f"rank {rank} has {len(shard.columns)} columns, unlike the others")
        before = self._found.get(rank)
        if before is not None:  # it has come back
            _require_same(rank, before, shard)
            return None
        self._found[rank] = shard
        return self.statistics if len(self._found) == self._world_size else None


def _require_same(rank: int, before: ShardStatistics, now: ShardStatistics) -> None:
    # As text, because NaN differs from itself.
    if repr(before) != repr(now):
        raise DataError(
            f"rank {rank} was restarted and read different rows ({now.rows} rows now, "
            f"{before.rows} then): the DataFrame is not the same each time it is computed (rand() "
            "without a seed, a limit, a changing source?). Persist or write it first"
        )


class Gathers:
    """The values given in the gather under way; one gather after another.

    Attributes:
        waiting: the workers that have given and wait for the others, by rank.
    """

    def __init__(self, world_size: int) -> None:
        self.waiting: dict[int, Member] = {}
        self._world_size = world_size
        self._given: dict[int, object] = {}

    def give(self, do: Actions, member: Member, value: object, *, commit: bool) -> bool:
        """Take what a worker gives; after the last one, tell all; returns whether it was the last.

        Args:
            do: sends it.
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
            return False
        members, self.waiting = tuple(self.waiting.values()), {}
        given, self._given = self._given, {}
        gathered = tuple(given[rank] for rank in range(self._world_size))
        do.send_gathered(members, gathered, commit=commit)
        return True

    def withdraw(self, rank: int) -> None:
        """Forget what a lost rank gave without getting the others' values: it will give again."""
        self.waiting.pop(rank, None)
        self._given.pop(rank, None)

    @property
    def present(self) -> frozenset[int] | None:
        """The ranks that have given to the unfinished gather; None if nobody waits."""
        return frozenset(self._given) if self._given else None
