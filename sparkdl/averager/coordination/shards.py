"""What the ranks have found in their rows."""

from __future__ import annotations

from sparkdl.errors import DataError, TrainingError
from sparkdl.feed.statistics import DataStatistics, ShardStatistics


class Shards:
    """The rows of every rank, as far as they are known.

    Args:
        world_size: number of ranks.

    Attributes:
        row_servers: where others fetch each rank's rows, as it reported; None if they do not.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.row_servers: list[object] = [None] * world_size
        self._found: dict[int, ShardStatistics] = {}
        self._unread = set(range(world_size))
        self._columns: int | None = None
        self._statistics: DataStatistics | None = None
        self._told: DataStatistics | None = None

    def __contains__(self, rank: int) -> bool:
        """Whether a rank has found something."""
        return rank in self._found

    @property
    def known(self) -> bool:
        """Whether every rank has found something."""
        return len(self._found) == self._world_size

    @property
    def statistics(self) -> DataStatistics:
        """What all have found together; available once every rank has found something."""
        if self._statistics is None:
            self._statistics = DataStatistics.of(
                [self._found[rank] for rank in range(self._world_size)]
            )
        return self._statistics

    @property
    def held_out_rows(self) -> list[int]:
        """Each rank's validation rows; available once every rank has found something."""
        return [self._found[rank].held_out for rank in range(self._world_size)]

    def note(self, rank: int, shard: ShardStatistics) -> DataStatistics | None:
        """Note what a rank has found.

        Args:
            rank: the rank that has the rows.
            shard: what it found in all its rows, or in the first.

        Returns:
            The statistics of all ranks' rows if the driver should now be told: when something is
            known about each, and again when everything is; else None.

        Raises:
            DataError: the rank has come back, and its rows are not what they were.
            TrainingError: the rank's columns differ from the others'.
        """
        if self._columns is None:
            self._columns = len(shard.columns)
        if self._columns != len(shard.columns):
            raise TrainingError(f"rank {rank} has {len(shard.columns)} columns, others do not")
        before = self._found.get(rank)
        if before is not None and before.complete:
            if not shard.complete:
                return None  # it has come back, and rereads what is known
            _require_same(rank, before, shard)
        self._found[rank] = shard
        self._statistics = None
        if shard.complete:
            self._unread.discard(rank)
        is_news = self._told is None or (not self._unread and not self._told.complete)
        if len(self._found) < self._world_size or not is_news:
            return None
        self._told = self.statistics
        return self._told


def _require_same(rank: int, before: ShardStatistics, now: ShardStatistics) -> None:
    # As text, because NaN differs from itself.
    if repr(before) != repr(now):
        raise DataError(
            f"rank {rank} was started again and read other rows than before ({now.rows} rows "
            f"now, {before.rows} then): the DataFrame is not the same each time it is computed "
            "(rand() without a seed, a limit, a changing source?). Persist or write it first"
        )
