"""Which plans deliver their rows in the same order in every run, and what the others bring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.feed.record_batches.packed import ORDER_COLUMN
from sparkdl.spark.catalyst.plans import has_stable_order
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.launch.worker_rows import Workers, worker_frame
from sparkdl.spark.rows.columns import input_column
from sparkdl.spark.rows.delivery import Delivery, Way

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


def order_of(frame: DataFrame, way: Way, ranks_a_task: int = 1) -> str | None:
    """The type of what workers order the rows by; None if they arrive in their order."""
    workers = Workers(
        frame=frame,
        columns=(input_column(frame, "id", "featuresCol"),),
        num_workers=2 * ranks_a_task,
        delivery=Delivery(way),
        device="cpu",
        description="",
        network=network_of(frame.sparkSession),
        ranks_a_task=ranks_a_task,
    )
    ((first, _), *others) = worker_frame(workers, seed=1).dtypes
    assert first == "c0"
    return dict(others).get(ORDER_COLUMN)


def test_rows_bring_their_order_unless_they_come_from_files_to_the_workers(
    files: DataFrame,
) -> None:
    assert order_of(files, Way.AS_IT_IS) is None
    assert order_of(files, Way.GROUPED) is None
    assert order_of(files, Way.SHUFFLED) == "bigint"


def test_rows_of_any_other_plan_are_ordered_by_what_is_in_them(files: DataFrame) -> None:
    for way in (Way.GROUPED, Way.SHUFFLED):
        assert order_of(files.repartition(2), way) == "void"
        # who assigns them to several ranks has not looked into them
        assert order_of(files.repartition(2), way, ranks_a_task=2) == "bigint"
