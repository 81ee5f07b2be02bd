"""What a feed tells of its rows while it reads them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
from every_row import every
from feeds import (
    open_feed,
    record_batch,
    record_batches,
)

from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.feed.statistics.shards import ShardStatistics

GOOD = ([[1.0, 2.0]] * 3, [1.0, 2.0, 3.0])
BAD: dict[str, tuple[tuple[list[Any], list[Any]], list[tuple[int, ColumnStatistics]]]] = {
    "a null label": (
        ([[1.0, 2.0]] * 3, [4.0, None, None]),
        [(1, ColumnStatistics(nulls=2, smallest=1, largest=4))],
    ),
    "a null array": (
        ([[1.0, 2.0], None, [3.0, 4.0]], [1.0] * 3),
        [(0, ColumnStatistics(nulls=1, shortest=2, longest=2))],
    ),
    "a null element": (
        ([[1.0, None], [None, None], [3.0, 4.0]], [1.0] * 3),
        [(0, ColumnStatistics(null_elements=2, shortest=2, longest=2))],
    ),
    "a short array": (
        ([[1.0, 2.0], [1.0], [3.0, 4.0]], [1.0] * 3),
        [(0, ColumnStatistics(shortest=1, longest=2))],
    ),
    "arrays of another length than those before": (
        ([[1.0, 2.0, 3.0]] * 3, [1.0] * 3),
        [(0, ColumnStatistics(shortest=2, longest=3))],
    ),
    "a fraction": (
        ([[1.0, 2.0]] * 3, [1.0, 2.5, 0.5]),
        [(1, ColumnStatistics(fractions=2, smallest=0.5, largest=3))],
    ),
    "several things": (
        ([[1.0], None, [3.0, None]], [None, 2.0, 3.5]),
        [
            (0, ColumnStatistics(nulls=1, null_elements=1, shortest=1, longest=2)),
            (1, ColumnStatistics(nulls=1, fractions=1, smallest=1, largest=3.5)),
        ],
    ),
}


def rows_of(wide: list[Any], label: list[Any]) -> pa.RecordBatch:
    arrays = [pa.array(wide, pa.list_(pa.float64())), pa.array(label, pa.float64())]
    return pa.record_batch(arrays, names=["wide", "id"])


@every("name", BAD)
@every("times", [1, 3])
def test_bad_rows_are_counted_to_the_last_one(tmp_path: Path, name: str, times: int) -> None:
    bad, expected = BAD[name]
    source = [rows_of(*GOOD), *[rows_of(*bad)] * times, rows_of(*GOOD)]
    with open_feed(tmp_path) as feed:
        statistics = feed.fill(source)
    assert statistics.rows == 3 * (2 + times)
    counted = ("nulls", "null_elements", "fractions")
    for column, found in expected:
        scaled = {field: times * getattr(found, field) for field in counted}
        assert statistics.columns[column] == dataclasses.replace(found, **scaled)


def test_good_rows_are_told_with_their_number_length_and_range(tmp_path: Path) -> None:
    with open_feed(tmp_path) as feed:
        statistics = feed.fill(record_batches([3, 0, 4]))
    assert dataclasses.replace(statistics, fingerprint=0) == ShardStatistics(
        7, (ColumnStatistics(shortest=2, longest=2), ColumnStatistics(smallest=0, largest=6))
    )


def test_the_order_is_not_among_the_statistics(tmp_path: Path) -> None:
    with open_feed(tmp_path) as feed:
        statistics = feed.fill([record_batch([4, 5], [1, 0])])
    assert len(statistics.columns) == 2


def test_a_feed_without_rows_has_epochs_without_minibatches(tmp_path: Path) -> None:
    with open_feed(tmp_path) as feed:
        assert feed.fill([]) == ShardStatistics(0, (ColumnStatistics(), ColumnStatistics()))
        assert [list(feed.epoch(epoch)) for epoch in (1, 2)] == [[], []]
