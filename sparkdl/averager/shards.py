"""What the ranks have found in their rows. No locks; ``Attendance`` holds one."""

from __future__ import annotations

from sparkdl.errors import DataError, TrainingError
from sparkdl.feed.facts import DataFacts, ShardFacts


class Shards:
    """The rows of every rank, as far as they are known.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._found: dict[int, ShardFacts] = {}
        self._told: DataFacts | None = None
        self._facts: DataFacts | None = None

    @property
    def ranks(self) -> set[int]:
        """Those that have found something."""
        return set(self._found)

    @property
    def facts(self) -> DataFacts:
        """What all found together; once every rank has found something."""
        if (
            self._facts is None
        ):  # each worker asks for it, and it takes as long as there are of them
            self._facts = DataFacts.of([self._found[rank] for rank in range(self._world_size)])
        return self._facts

    def note(self, rank: int, shard: ShardFacts) -> DataFacts | None:
        """Take note of what a rank has found.

        Args:
            rank: whose rows they are.
            shard: what it found in all its rows, or in the first.

        Returns:
            What the driver has not been told of all ranks' rows: when something is known of each,
            and when everything is; else None.

        Raises:
            DataError: the rank has come back, and its rows are not what they were.
            TrainingError: the rank has other columns than the rest.
        """
        if any(len(s.columns) != len(shard.columns) for s in self._found.values()):
            raise TrainingError(f"rank {rank} has {len(shard.columns)} columns, others do not")
        before = self._found.get(rank)
        if before is not None and before.complete:
            if not shard.complete:
                return None  # it has come back, and reads again what is known
            _require_same(rank, before, shard)
        self._found[rank] = shard
        self._facts = None
        if len(self._found) < self._world_size:
            return None
        facts = self.facts
        if self._told is not None and (self._told.complete or not facts.complete):
            return None
        self._told = facts
        return facts


def _require_same(rank: int, before: ShardFacts, now: ShardFacts) -> None:
    # As text, because NaN differs from itself.
    if repr(before) != repr(now):
        raise DataError(
            f"rank {rank} was started again and read other rows than before ({now.rows} rows "
            f"now, {before.rows} then): the DataFrame is not the same each time it is computed "
            "(rand() without a seed, a limit, a changing source?). Persist or write it first"
        )
