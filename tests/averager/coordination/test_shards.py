"""What the ranks find in their rows, and when the driver is told of it."""

from __future__ import annotations

import pytest

from sparkdl.averager.coordination.reports import Shards
from sparkdl.errors import DataError, TrainingError
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.feed.statistics.shards import ShardStatistics


def shard(rows: int, *, complete: bool = True, columns: int = 1) -> ShardStatistics:
    return ShardStatistics(
        rows, tuple(ColumnStatistics() for _ in range(columns)), complete=complete
    )


def test_the_driver_is_told_when_something_is_known_of_every_rank_and_when_everything_is() -> None:
    shards = Shards(2)
    assert shards.note(0, shard(3, complete=False)) is None
    first = shards.note(1, shard(5))
    assert first is not None
    assert (first.shard_rows, first.pending) == ((3, 5), (0,))

    assert shards.note(0, shard(4, complete=False)) is None
    last = shards.note(0, shard(7))
    assert last is not None
    assert (last.shard_rows, last.pending) == ((7, 5), ())


def test_who_comes_back_tells_the_driver_nothing_new() -> None:
    shards = Shards(1)
    assert shards.note(0, shard(7)) is not None
    assert shards.note(0, shard(2, complete=False)) is None
    assert shards.note(0, shard(7)) is None
    assert shards.statistics.shard_rows == (7,)
    assert shards.statistics.complete


def test_rows_with_nan_are_the_same_when_they_are_read_again() -> None:
    shards = Shards(1)
    for _ in range(2):
        nan = float("nan")  # another object each time, as from another process
        shards.note(0, ShardStatistics(1, (ColumnStatistics(not_finite=1, smallest=nan),)))
    assert shards.statistics.shard_rows == (1,)


def test_other_rows_than_before_are_refused() -> None:
    shards = Shards(1)
    shards.note(0, shard(7))
    with pytest.raises(DataError, match=r"rank 0 .* different rows \(6 rows now, 7 then\)"):
        shards.note(0, shard(6))


def test_other_columns_than_the_others_have_are_refused() -> None:
    shards = Shards(2)
    shards.note(0, shard(7))
    with pytest.raises(TrainingError, match="rank 1 has 2 columns, unlike the others"):
        shards.note(1, shard(7, columns=2))
