"""Which plans deliver their rows in the same order in every run, and what the others bring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from missing_names import lacking
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.feed.record_batches.packed import ORDER_COLUMN
from sparkdl.spark.catalyst.plans import has_stable_order, known_partitions
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


PLANS: dict[str, tuple[Change, bool]] = {
    "read": (lambda df: df, True),
    "row by row": (lambda df: df.where("id > 3").select((F.col("id") * 2).alias("x")), True),
    "coalesce": (lambda df: df.coalesce(1), True),
    "repartition": (lambda df: df.repartition(2), False),
    "groupBy": (lambda df: df.groupBy((F.col("id") % 3).alias("k")).count(), False),
    "sort": (lambda df: df.sortWithinPartitions("id"), False),
    "join": (lambda df: df.join(df, "id"), False),
    "cache": (lambda df: df.where("id > 1").cache(), False),
    "made": (lambda df: df.sparkSession.range(0, 9, 1, 3), False),
}


def test_only_files_read_row_by_row_have_a_stable_order(files: DataFrame) -> None:
    """And so it is, with the same numbers of partitions, where private names are missing."""
    frames = {name: change(files) for name, (change, _) in PLANS.items()}
    found = {name: has_stable_order(frame) for name, frame in frames.items()}
    partitions = {name: known_partitions(frame) for name, frame in frames.items()}
    assert found == {name: stable for name, (_, stable) in PLANS.items()}
    assert partitions["made"] == 3
    assert partitions["repartition"] is None
    with lacking("executedPlan", "toRdd"):
        assert {name: has_stable_order(frame) for name, frame in frames.items()} == found
        assert {name: known_partitions(frame) for name, frame in frames.items()} == partitions
        assert not has_stable_order(files.where("cast(id as string) != 'a\n+- FileScan'"))
    frames["cache"].unpersist()


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
    for way in (Way.MOVED, Way.SHUFFLED):
        assert order_of(files, way) == "bigint"
    # ranks that share a task share its rows by their order
    assert order_of(files, Way.GROUPED, ranks_a_task=2) == "bigint"


def test_rows_of_any_other_plan_are_ordered_by_what_is_in_them(files: DataFrame) -> None:
    for way in (Way.GROUPED, Way.SHUFFLED):
        assert order_of(files.repartition(2), way) == "void"
        # who assigns them to several ranks has not looked into them
        assert order_of(files.repartition(2), way, ranks_a_task=2) == "bigint"
