"""Which plans deliver their rows in the same order in every run, and what the others bring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.feed.packed import ORDER_COLUMN
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.launch.worker_rows import Workers, worker_frame
from sparkdl.spark.rows.columns import input_column
from sparkdl.spark.rows.delivery import Delivery, Way
from sparkdl.spark.rows.partitions import has_stable_order

Change = Callable[[DataFrame], DataFrame]


@pytest.fixture(scope="module")
def files(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    path = tmp_path_factory.mktemp("rows") / "table"
    spark.range(40).write.parquet(Path(path).as_uri())
    return spark.read.parquet(Path(path).as_uri())


@pytest.mark.parametrize(
    "change",
    [
        lambda df: df,
        lambda df: df.where("id > 3").select((F.col("id") * 2).alias("x")),
        lambda df: df.coalesce(1),
    ],
    ids=["read", "row by row", "coalesce"],
)
def test_files_read_row_by_row_have_a_stable_order(files: DataFrame, change: Change) -> None:
    assert has_stable_order(change(files))


@pytest.mark.parametrize(
    "change",
    [
        lambda df: df.repartition(2),
        lambda df: df.groupBy((F.col("id") % 3).alias("k")).count(),
        lambda df: df.sortWithinPartitions("id"),
        lambda df: df.join(df, "id"),
        lambda df: df.select("id").cache(),
    ],
    ids=["repartition", "groupBy", "sort", "join", "cache"],
)
def test_what_shuffles_or_sorts_has_none(files: DataFrame, change: Change) -> None:
    changed = change(files)
    assert not has_stable_order(changed)
    changed.unpersist()


def fed_columns(frame: DataFrame, way: Way) -> list[str]:
    workers = Workers(
        frame=frame,
        columns=(input_column(frame, "id", "featuresCol"),),
        num_workers=2,
        delivery=Delivery(way),
        device="cpu",
        description="",
        network=network_of(frame.sparkSession),
    )
    return worker_frame(workers, seed=1).columns


def test_rows_bring_their_order_unless_they_come_from_files_to_the_workers(
    files: DataFrame,
) -> None:
    assert fed_columns(files, Way.AS_IT_IS) == ["c0"]
    assert fed_columns(files, Way.GROUPED) == ["c0"]
    assert fed_columns(files, Way.SHUFFLED) == ["c0", ORDER_COLUMN]
    assert fed_columns(files.repartition(2), Way.GROUPED) == ["c0", ORDER_COLUMN]
