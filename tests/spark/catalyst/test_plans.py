"""What is read of Spark's plans: their nodes and groups of partitions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from frames import configured, ids_by_partition
from missing_names import lacking
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.feed.record_batches.packed import ORDER_COLUMN
from sparkdl.spark.catalyst import groups
from sparkdl.spark.catalyst.groups import (
    NoGroupsError,
    balanced,
    grouped,
    keys_of_partitions,
)
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


def test_the_largest_goes_first_and_each_to_the_smallest_group() -> None:
    # 9 to the first, 8 and 5 to the second, 4 to the first, 3 to the first of two that have 13
    assert balanced([3, 9, 4, 8, 5], 2) == [[0, 1, 2], [3, 4]]
    assert [len(numbers) for numbers in balanced([0] * 1000, 3)] == [334, 333, 333]
    assert balanced([1, 0, 100], 3) == [[2], [0], [1]]


@pytest.mark.versions
def test_spark_takes_each_partitions_key_to_that_partition(spark: SparkSession) -> None:
    for partitions in (1, 2, 3, 7, 1000):
        keys = spark.createDataFrame([(key,) for key in keys_of_partitions(partitions)], "key int")
        found = keys.select(F.pmod(F.hash("key"), F.lit(partitions)).alias("place")).collect()
        assert [row.place for row in found] == list(range(partitions))


@pytest.mark.nightly
def test_more_partitions_are_put_together_each_group_in_the_order_of_their_numbers(
    spark: SparkSession,
) -> None:
    """Fewer leave the last groups empty."""
    rows = spark.range(0, 40, 1, 8)
    found = grouped(rows, 3)
    parts = ids_by_partition(found.frame)
    assert list(map(len, found.members)) == [3, 3, 2]
    assert [len(part) for part in parts] == [15, 15, 10]
    assert all(part == sorted(part) for part in parts)
    assert sorted(chain(*parts)) == list(range(40))
    found = grouped(spark.range(0, 4, 1, 2), 5)
    assert found.members == ((0,), (1,), (), (), ())
    assert ids_by_partition(found.frame) == [[0, 1], [2, 3], [], [], []]


@pytest.mark.nightly
def test_each_row_is_found_where_it_was_before(spark: SparkSession) -> None:
    rows = spark.range(0, 40, 1, 8)  # five in each partition
    few, many = grouped(rows.where("id % 5 < 3 or id < 20"), 3), grouped(rows, 9)
    for found in (few, many):
        before = ids_by_partition(rows if found is many else rows.where("id % 5 < 3 or id < 20"))
        for group, part in enumerate(ids_by_partition(found.frame)):
            for row in {0, len(part) // 2, len(part) - 1} if part else ():
                partition, position = found.origin(group, row)
                assert before[partition][position] == part[row]
    with pytest.raises(ValueError, match="no such row"):
        few.origin(0, 40)


def test_what_is_found_to_be_empty_has_as_many_partitions_too(spark: SparkSession) -> None:
    found = grouped(spark.range(10).where(F.lit(False)), 3)
    assert ids_by_partition(found.frame) == [[], [], []]


@pytest.mark.nightly_variants(every=2)
@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda df: df.repartition(7), 2),
        (lambda df: df.join(df.select("id"), "id"), 1),
        (lambda df: df.union(df), 9),
        (lambda df: df.where("id < 0"), 2),
        (lambda df: df.orderBy("id").limit(30), 9),
        (lambda df: df.cache(), 1),
    ],
    ids=["repartition", "join", "union", "where", "limit", "cache"],
)
def test_every_plan_has_the_same_rows_in_as_many_partitions_as_asked_for(
    spark: SparkSession, change: Callable[[DataFrame], DataFrame], number: int
) -> None:
    rows = change(spark.range(0, 40, 1, 4))
    expected = sorted(row.id for row in rows.collect())
    parts = ids_by_partition(grouped(rows, number).frame)
    moved = ids_by_partition(grouped(rows, number, moved=True).frame)
    rows.unpersist()
    assert len(parts) == number
    assert sorted(chain(*parts)) == expected
    assert [sorted(part) for part in moved] == [sorted(part) for part in parts]


def test_files_are_assigned_by_what_they_take_to_read(spark: SparkSession, tmp_path: Path) -> None:
    """One with more than the other four together, though there are as many rows in each."""
    path = tmp_path / "table"
    for number, length in enumerate([1, 5, 300, 1, 2]):
        rows = spark.range(number, number + 1, 1, 1).withColumn(
            "text", F.repeat(F.lit("x"), length)
        )
        rows.write.mode("append").json(path.as_uri())
    sizes = {"spark.sql.files.openCostInBytes": "1", "spark.sql.files.maxPartitionBytes": "400"}
    with configured(spark, sizes):
        # Files of one value over several lines are not split.
        rows = spark.read.schema("id long").json(path.as_uri(), multiLine=True)
        parts = ids_by_partition(grouped(rows, 2).frame)
    assert sorted(map(sorted, parts)) == [[0, 1, 3, 4], [2]]


def test_a_spark_that_lacks_a_method_is_told_apart(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: object) -> None:
        raise Py4JError("fromBitMaskNoCopy does not exist in the JVM")

    monkeypatch.setattr(groups, "_set_of", missing)
    with pytest.raises(NoGroupsError, match="does not exist"):
        grouped(spark.range(0, 9, 1, 9), 2)


def test_an_error_of_the_plan_is_raised_as_it_is(spark: SparkSession) -> None:
    fails = spark.range(10).select(F.expr("cast(raise_error('mine') as bigint)").alias("id"))
    with pytest.raises(Exception, match="mine") as raised:
        grouped(fails.repartition(3), 2)
    assert not isinstance(raised.value, NoGroupsError)
