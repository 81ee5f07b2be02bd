"""Every row of the DataFrame is trained on once per epoch, whatever its partitions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from frames import estimator, frame, frame_of_sizes
from models import RowIds, lines
from pyspark.sql import DataFrame, SparkSession

EPOCHS = 2


def recorded(trace: Path) -> dict[int, list[int]]:
    """The row ids that each rank trained on, in order."""
    ids: dict[int, list[int]] = {}
    for line in lines(trace):
        rank, *batch = map(int, line.split())
        ids.setdefault(rank, []).extend(batch)
    return ids


def fit(rows: DataFrame, trace: Path, workers: int = 3) -> dict[int, list[int]]:
    estimator(
        model=RowIds(str(trace)),
        featuresCols=["features", "id"],
        numWorkers=workers,
        epochs=EPOCHS,
        batchSize=8,
    ).fit(rows)
    return recorded(trace)


def assert_each_row_once_an_epoch(ids: dict[int, list[int]], rows: int) -> None:
    for epoch in range(EPOCHS):
        seen: Counter[int] = Counter()
        for of_rank in ids.values():
            part = len(of_rank) // EPOCHS
            seen.update(of_rank[epoch * part : (epoch + 1) * part])
        assert seen == Counter(range(rows))


def test_the_frames_below_have_partitions_of_the_sizes_asked_for(spark: SparkSession) -> None:
    """Guards the tests below, which would pass on any partitions."""
    rows = frame_of_sizes(spark, [3, 0, 5])
    assert [[row.id for row in part] for part in rows.rdd.glom().collect()] == [
        [0, 1, 2],
        [],
        [3, 4, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([50, 3, 1], id="skewed"),
        pytest.param([0, 41, 0, 0], id="mostly-empty"),
        pytest.param([40], id="single"),
        pytest.param([5, 6, 7, 8, 9, 0, 4], id="more-than-workers"),
        pytest.param([1, 1, 1], id="a-row-each"),
    ],
)
def test_each_row_is_trained_on_once_an_epoch(
    spark: SparkSession, tmp_path: Path, sizes: list[int]
) -> None:
    ids = fit(frame_of_sizes(spark, sizes), tmp_path / "ids")
    assert_each_row_once_an_epoch(ids, sum(sizes))


def test_each_row_of_a_cached_frame_is_trained_on_once_an_epoch(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = frame_of_sizes(spark, [30, 2]).cache()
    try:
        assert_each_row_once_an_epoch(fit(rows, tmp_path / "ids"), 32)
    finally:
        rows.unpersist()


def test_each_row_of_a_shuffled_frame_is_trained_on_once_an_epoch(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = frame(spark, rows=50, partitions=4).repartition(6, "label")
    assert_each_row_once_an_epoch(fit(rows, tmp_path / "ids"), 50)


def test_each_row_of_files_is_trained_on_once_an_epoch_in_the_same_random_order_every_time(
    spark: SparkSession, tmp_path: Path
) -> None:
    uri = (tmp_path / "table").as_uri()
    frame(spark, rows=60, partitions=3).write.parquet(uri)
    rows = spark.read.parquet(uri)
    assert rows.rdd.getNumPartitions() == 3  # so that they come without a shuffle
    ids, again = (fit(rows, tmp_path / name) for name in ("ids", "again"))
    assert ids == again
    assert_each_row_once_an_epoch(ids, 60)
    for of_rank in ids.values():
        assert of_rank[:20] != sorted(of_rank[:20])


@pytest.mark.parametrize("sizes", [[54, 3, 3], [0, 60, 0]], ids=["uneven", "all-in-one"])
def test_a_skewed_frame_is_spread_evenly_over_the_workers(
    spark: SparkSession, tmp_path: Path, sizes: list[int]
) -> None:
    ids = fit(frame_of_sizes(spark, sizes), tmp_path / "ids")
    assert_each_row_once_an_epoch(ids, 60)
    assert sorted(len(of_rank) // EPOCHS for of_rank in ids.values()) == [20, 20, 20]


def test_partitions_that_differ_by_a_few_rows_are_left_where_they_are(
    spark: SparkSession, tmp_path: Path
) -> None:
    ids = fit(frame_of_sizes(spark, [19, 22, 19]), tmp_path / "ids")
    assert {rank: len(of_rank) // EPOCHS for rank, of_rank in ids.items()} == {0: 19, 1: 22, 2: 19}


def test_the_largest_partition_decides_whether_the_rows_are_spread(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One row more than a twentieth above the mean, plus one."""
    ids = fit(frame_of_sizes(spark, [18, 23, 19]), tmp_path / "ids")
    assert_each_row_once_an_epoch(ids, 60)
    assert max(len(of_rank) // EPOCHS for of_rank in ids.values()) <= 22


def test_a_balanced_frame_is_left_where_it_is(spark: SparkSession, tmp_path: Path) -> None:
    ids = fit(frame(spark, rows=60, partitions=3), tmp_path / "ids")
    assert {rank: set(of_rank) for rank, of_rank in ids.items()} == {
        0: set(range(20)),
        1: set(range(20, 40)),
        2: set(range(40, 60)),
    }


def test_later_epochs_follow_another_order(spark: SparkSession, tmp_path: Path) -> None:
    ids = fit(frame(spark, rows=60, partitions=3), tmp_path / "ids")
    for of_rank in ids.values():
        first, second = of_rank[:20], of_rank[20:]
        assert sorted(first) == sorted(second)
        assert first != second


def test_duplicate_rows_are_each_trained_on(spark: SparkSession, tmp_path: Path) -> None:
    once = frame(spark, rows=10, partitions=1)
    ids = fit(once.union(once).union(once), tmp_path / "ids")
    seen = Counter(i for of_rank in ids.values() for i in of_rank)
    assert seen == Counter(dict.fromkeys(range(10), 3 * EPOCHS))
