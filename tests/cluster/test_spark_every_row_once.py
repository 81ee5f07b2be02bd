"""Every row of the DataFrame is trained on once per epoch, whatever its partitions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frames import estimator, frame, frame_of_sizes, in_files
from missing_names import lacking
from models import RowIds, row_ids
from pyspark.sql import DataFrame, SparkSession

from sparkdl.errors import ConfigError

EPOCHS = 2


def fit(rows: DataFrame, trace: Path, workers: int = 3, **changes: Any) -> dict[int, list[int]]:
    estimator(
        model=RowIds(str(trace)),
        featuresCols=["features", "id"],
        numWorkers=workers,
        epochs=EPOCHS,
        batchSize=8,
        **changes,
    ).fit(rows)
    return row_ids(trace)


def assert_each_row_once_an_epoch(ids: dict[int, list[int]], rows: int) -> None:
    for epoch in range(EPOCHS):
        seen: Counter[int] = Counter()
        for of_rank in ids.values():
            part = len(of_rank) // EPOCHS
            seen.update(of_rank[epoch * part : (epoch + 1) * part])
        assert seen == Counter(range(rows))


def shards(ids: dict[int, list[int]]) -> dict[int, set[int]]:
    """The rows that each rank trained on."""
    return {rank: set(of_rank) for rank, of_rank in ids.items()}


def in_many_files(spark: SparkSession, path: Path) -> DataFrame:
    """Each a partition."""
    return in_files(frame(spark, rows=300, partitions=300), path)


def after_a_join(spark: SparkSession, path: Path) -> DataFrame:
    ids = spark.range(0, 300, 1, 5).hint("shuffle_hash")
    return frame(spark, rows=400, partitions=4).join(ids, "id")


def united(spark: SparkSession, path: Path) -> DataFrame:
    rows = frame(spark, rows=300, partitions=4)
    return rows.where("id < 200").union(rows.where("id >= 200"))


UPSTREAMS: dict[str, Callable[[SparkSession, Path], DataFrame]] = {
    "skewed": lambda spark, _: frame_of_sizes(spark, [0, 285, 15]),
    "join": after_a_join,
    "union": united,
    "cache": lambda spark, _: frame(spark, rows=300, partitions=7).cache(),
    "fewer": lambda spark, _: frame(spark, rows=300, partitions=2),
    "a-thousand-empty": lambda spark, _: frame(spark, rows=1300, partitions=1300).where("id < 300"),
    "many-files": in_many_files,
}


@pytest.mark.nightly_variants(daily=2)
@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_workers_have_random_shards_of_the_same_size_whatever_they_have_read(
    spark: SparkSession, tmp_path: Path, upstream: str
) -> None:
    rows = UPSTREAMS[upstream](spark, tmp_path / "table")
    ids = fit(rows, tmp_path / "ids")
    rows.unpersist()
    assert_each_row_once_an_epoch(ids, 300)
    for shard in shards(ids).values():
        assert len(shard) == 100
        # Of the first half of the ids each has 50, with a standard deviation of 4.1.
        assert 25 <= sum(each < 150 for each in shard) <= 75


def test_rows_that_are_to_stay_where_they_are_do(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sparkdl"):
        ids = fit(frame_of_sizes(spark, [11, 40, 3]), tmp_path / "ids", shuffleRows="none")
    assert_each_row_once_an_epoch(ids, 54)
    stay = [range(11), range(11, 51), range(51, 54)]
    for part in map(set, stay):
        assert sum(part <= shard for shard in shards(ids).values()) == 1
    assert "the other workers wait for the one with the most. With shuffleRows='ex" in caplog.text


def test_rows_that_are_to_stay_where_they_cannot_are_refused(spark: SparkSession) -> None:
    ready = estimator(numWorkers=3, shuffleRows="none")
    with pytest.raises(ConfigError, match=r"has 5 for 3 tasks. .*df.repartition\(3\)"):
        ready.fit(frame(spark, partitions=5))
    with pytest.raises(ConfigError, match=r"has 2 for 3 tasks"):
        ready.fit(frame(spark, partitions=3).repartition(2))


@pytest.mark.gate
def test_each_row_is_trained_on_once_on_a_spark_that_cannot_put_partitions_together(
    spark: SparkSession, tmp_path: Path
) -> None:
    with lacking("toRdd"):
        ids = fit(frame(spark, partitions=5).repartition(7, "id"), tmp_path / "ids")
    assert_each_row_once_an_epoch(ids, 60)


@pytest.mark.gate
def test_sparks_shuffle_spreads_rows_evenly(spark: SparkSession, tmp_path: Path) -> None:
    ids = fit(frame_of_sizes(spark, [18, 23, 19]), tmp_path / "ids", shuffleRows="spark")
    assert_each_row_once_an_epoch(ids, 60)
    assert max(len(of_rank) // EPOCHS for of_rank in ids.values()) <= 22
