"""What a worker's rows look like: found while they arrive, told to the driver before step one.

A null, arrays of two lengths or a label out of range are known to the driver, with their counts
over all workers, before anybody trains; the rows are read once for that and for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.feed.statistics.fingerprint import MODULUS


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """What was found in the rows of one worker.

    Attributes:
        rows: how many there are to train on.
        columns: statistics of each column, in the order of the feed's schema.
        held_out: how many more there are to validate with.
        weight: the sum of the weights of those to train on; 0 without weights.
        complete: whether those are all its rows.
        fingerprint: of the rows to train on; see ``fingerprint``.
        held_out_fingerprint: of those to validate with.
        opening: of the first block, if rows are trained on while others arrive.
    """

    rows: int
    columns: tuple[ColumnStatistics, ...]
    held_out: int = 0
    weight: float = 0.0
    complete: bool = True
    fingerprint: int = 0
    held_out_fingerprint: int = 0
    opening: int | None = None


@dataclass(frozen=True, slots=True)
class DataStatistics:
    """What all workers found together.

    Attributes:
        shard_rows: rows of each worker to train on, by rank.
        columns: statistics of each column, in the order of the feed's schema.
        held_out: rows of all workers to validate with.
        weight: the sum of the weights of all rows to train on; 0 without weights.
        pending: the ranks that have more rows, of which nothing is known yet.
        fingerprint: of the rows of all workers to train on; see ``fingerprint``.
        held_out_fingerprint: of those to validate with.
        openings: of the first block of each worker's rows, by rank; none if all rows were read
            before the first was trained on.
    """

    shard_rows: tuple[int, ...]
    columns: tuple[ColumnStatistics, ...]
    held_out: int = 0
    weight: float = 0.0
    pending: tuple[int, ...] = ()
    fingerprint: int = 0
    held_out_fingerprint: int = 0
    openings: tuple[int | None, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether those are all rows."""
        return not self.pending

    @property
    def mean_weight(self) -> float:
        """The mean weight of all rows to train on; 1 without weights."""
        return self.weight / self.rows if self.weight else 1.0

    def lasting(self) -> dict[str, Any]:
        """What is the same when the rows are read again, as JSON: all but the places.

        A shuffle delivers rows in any order. Where some have not arrived, it is how they begin.
        """
        if not self.complete:
            return {"openings": list(self.openings)}
        fields = asdict(self)
        del fields["pending"]
        for column in fields["columns"]:
            del column["places"], column["reason"]
        return fields

    @property
    def rows(self) -> int:
        """Rows of all workers to train on."""
        return sum(self.shard_rows)

    @classmethod
    def of(cls, shards: Sequence[ShardStatistics]) -> DataStatistics:
        """Put the workers' findings together.

        Args:
            shards: one per worker, by rank.
        """
        columns = zip(*(shard.columns for shard in shards), strict=True)
        openings = tuple(shard.opening for shard in shards)
        return cls(
            tuple(shard.rows for shard in shards),
            tuple(sum(statistics, ColumnStatistics()) for statistics in columns),
            sum(shard.held_out for shard in shards),
            sum(shard.weight for shard in shards),
            tuple(rank for rank, shard in enumerate(shards) if not shard.complete),
            sum(shard.fingerprint for shard in shards) % MODULUS,
            sum(shard.held_out_fingerprint for shard in shards) % MODULUS,
            openings if any(each is not None for each in openings) else (),
        )
