"""Plans of Spark's, and the private names by which they are reached."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from frames import frame, ids_by_partition, in_files
from missing_names import lacking
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkdl
from sparkdl.feed.packed import ORDER_COLUMN, PLACE_COLUMN
from sparkdl.spark.catalyst import cluster
from sparkdl.spark.catalyst.array_bytes import array_bytes
from sparkdl.spark.catalyst.jvm import with_fallback
from sparkdl.spark.catalyst.plans import (
    has_stable_order,
    in_partitions,
    keys_of_partitions,
    moved,
    planned,
)
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.cluster.slots import choose_num_workers
from sparkdl.spark.launch.worker_rows import Workers, worker_frame
from sparkdl.spark.rows.columns import input_column

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
    partitions = {name: planned(frame)[1] for name, frame in frames.items()}
    assert found == {name: stable for name, (_, stable) in PLANS.items()}
    assert (partitions["made"], partitions["repartition"], partitions["coalesce"]) == (3, 2, 1)
    with lacking("executedPlan", "toRdd"):
        assert {name: has_stable_order(frame) for name, frame in frames.items()} == found
        assert {name: planned(frame)[1] for name, frame in frames.items()} == partitions
        assert not has_stable_order(files.where("cast(id as string) != 'a\n+- FileScan'"))
    frames["cache"].unpersist()


def order_of(frame: DataFrame, shuffle: str, ranks_a_task: int = 1) -> dict[str, str]:
    """The types of what workers order the rows by."""
    workers = Workers(
        frame=frame,
        columns=(input_column(frame, "id", "featuresCol"),),
        num_workers=2 * ranks_a_task,
        shuffle=shuffle,
        device="cpu",
        description="",
        network=network_of(frame.sparkSession),
        ranks_a_task=ranks_a_task,
    )
    ((first, _), *others) = worker_frame(workers).dtypes
    assert first == "c0"
    return dict(others)


def test_rows_bring_their_places_and_where_these_vary_are_ordered_by_what_is_in_them(
    files: DataFrame,
) -> None:
    place = {PLACE_COLUMN: "bigint"}
    for shuffle in ("exchange", "spark"):
        assert order_of(files.coalesce(1), shuffle) == place
    made = files.repartition(3)
    assert order_of(made, "exchange") == place | {ORDER_COLUMN: "void"}
    # By its places in this run, Spark's shuffle would send a row to another task than in the next.
    assert order_of(made, "spark") == {ORDER_COLUMN: "void"}
    # Ranks that share a task share its rows before anything looks into them.
    for rows in (files, made):
        assert order_of(rows, "exchange", ranks_a_task=2) == place | {ORDER_COLUMN: "bigint"}


@pytest.mark.versions
def test_spark_takes_each_partitions_key_to_that_partition(spark: SparkSession) -> None:
    of_all = {number: keys_of_partitions(spark, number) for number in (1, 3, 40)}
    keys = [(number, key) for number, of_each in of_all.items() for key in of_each]
    rows = spark.createDataFrame(keys, "number int, key int").coalesce(1)
    found = rows.select(F.pmod(F.hash("key"), F.col("number")).alias("place")).collect()
    assert [row.place for row in found] == [place for number in of_all for place in range(number)]


def placed(rows: DataFrame) -> DataFrame:
    return planned(rows.withColumn(PLACE_COLUMN, F.monotonically_increasing_id()))[0]


@pytest.mark.nightly
def test_neighbours_are_put_together_and_fewer_partitions_leave_some_empty(
    spark: SparkSession,
) -> None:
    parts = ids_by_partition(in_partitions(placed(spark.range(0, 40, 1, 8)), 3))
    assert list(chain(*parts)) == list(range(40))
    assert [len(part) for part in parts] == [10, 15, 15]
    parts = ids_by_partition(in_partitions(placed(spark.range(0, 4, 1, 2)), 5))
    assert parts == [[0, 1], [2, 3], [], [], []]


def test_what_is_found_to_be_empty_has_as_many_partitions_too(spark: SparkSession) -> None:
    rows = placed(spark.range(10).where(F.lit(False)))
    assert ids_by_partition(in_partitions(rows, 3)) == [[], [], []]


@pytest.mark.nightly_variants(every=3)
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
    whole = {tuple(sorted(part)) for part in ids_by_partition(placed(rows)) if part}
    for put in (in_partitions, moved):
        parts = ids_by_partition(put(placed(rows), number))
        assert sorted(chain(*parts)) == expected
        assert put is moved or len(parts) == number
        for part in whole:  # none is torn apart
            assert sum(set(part) <= set(found) for found in parts) >= 1
    rows.unpersist()


def test_partitions_are_shuffled_to_tasks_in_turn(spark: SparkSession) -> None:
    parts = ids_by_partition(moved(placed(spark.range(0, 40, 1, 8)), 3))
    assert [sorted({i // 5 for i in part}) for part in parts] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert sorted(chain(*parts)) == list(range(40))


def test_files_have_the_same_partitions_when_they_are_read_again(
    spark: SparkSession, files: DataFrame
) -> None:
    """Though Spark would cut them otherwise by now: with executors that it did not have."""
    rows, found = planned(files)
    settings = {"spark.sql.files.minPartitionNum": "20", "spark.sql.files.openCostInBytes": "1"}
    before = ids_by_partition(rows)
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        assert ids_by_partition(rows) == before
        assert len(before) == found
        assert planned(files.select("id"))[1] != found
    finally:
        for name in settings:
            spark.conf.unset(name)


def test_a_query_with_a_common_table_expression_is_read_without_a_shuffle(
    spark: SparkSession, files: DataFrame
) -> None:
    files.createOrReplaceTempView("all_of_them")
    try:
        rows = spark.sql(
            "WITH odd AS (SELECT id FROM all_of_them WHERE id % 2 = 1) SELECT id FROM odd"
        )
        assert has_stable_order(rows)
        put = in_partitions(placed(rows), 2)
        parts = ids_by_partition(put)
    finally:
        spark.catalog.dropTempView("all_of_them")
    assert "Exchange" not in put._jdf.queryExecution().executedPlan().toString()
    assert len(parts) == 2
    assert sorted(chain(*parts)) == list(range(1, 40, 2))


def test_an_error_of_the_plan_is_raised_as_it_is(spark: SparkSession) -> None:
    fails = spark.range(10).select(F.expr("cast(raise_error('mine') as bigint)").alias("id"))
    with pytest.raises(Exception, match="mine"):
        planned(fails.repartition(3))


ROOT = Path(sparkdl.__file__).parent
PRIVATE = {
    *("_jvm", "_jdf", "_jsparkSession", "_jsc", "_gateway", "_jrdd", "_jc", "_jbroadcast", "_sc"),
    *("_active_spark_context", "_root_directory", "_is_running_on_worker", "_setTaskContext"),
    *("_transfer_params_to_java", "_java_resource_profile"),
}
PRIVATE_MODULES = ("pyspark.core", "pyspark.find_spark_home", "pyspark.sql.pandas")


def private_names(path: Path) -> list[str]:
    """The private names of PySpark that a module uses, but for what subclasses of its ML may."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            found.append(f"{node.lineno}: {node.attr}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyspark"):
            hidden = [each.name for each in node.names if each.name.startswith("_")]
            if hidden or str(node.module).startswith(PRIVATE_MODULES):
                found.append(f"{node.lineno}: {node.module} {hidden}")
    return found


def test_nothing_else_touches_private_names() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{name}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.parent != ROOT / "spark/catalyst"
        for name in private_names(path)
    ]
    assert wrong == [], "move these into functions of sparkdl/spark/catalyst:\n" + "\n".join(wrong)


@pytest.mark.versions
def test_this_version_of_spark_has_all_private_names(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that lacks one is slower, or shuffles: see docs/versions.md."""
    files = in_files(frame(spark, 60, 3), tmp_path / "table")
    context = spark.sparkContext
    choose_num_workers(spark, 3)  # waits for the executors
    with caplog.at_level(logging.INFO, "sparkdl"):
        rows, found = planned(files)
        assert found == files.rdd.getNumPartitions()
        assert has_stable_order(files)
        assert array_bytes(spark) is not None
        for partitions in (2, 7):
            assert in_partitions(rows, partitions).rdd.getNumPartitions() == partitions
        assert len(cluster.executor_start_times(spark)) == 3
        assert cluster.count_slots(spark) == 3
        assert cluster.count_running_tasks(spark) == 0
        assert cluster.failed_tasks(context, 0) == []
        assert cluster.jobs_with_tag(context, "x", "y") == []
        assert not cluster.feeds_a_shuffle(context, 0)
    assert [line for line in caplog.messages if "this Spark lacks" in line] == []


def test_a_scheduler_that_is_not_asked_is_counted_by_cores_and_stages(spark: SparkSession) -> None:
    context = spark.sparkContext
    choose_num_workers(spark, 3)  # waits for the executors
    asked = [cluster.count_slots(spark), cluster.count_running_tasks(spark)]
    missing = ("maxNumConcurrentTasks", "runningTasksByExecutors", "executorList", "taskList")
    with lacking(*missing, "getJobIdsForTag", "stageIdToStage"):
        assert [cluster.count_slots(spark), cluster.count_running_tasks(spark)] == asked
        assert cluster.executor_start_times(spark) == []
        assert cluster.failed_tasks(context, 0) == []
        assert cluster.jobs_with_tag(context, "x", "y") == []
        assert not cluster.feeds_a_shuffle(context, 0)


def test_jobs_are_found_by_their_group_where_there_are_no_tags(spark: SparkSession) -> None:
    context = spark.sparkContext
    context.setJobGroup("of the test", "")
    try:
        spark.range(1).collect()
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
    with lacking("getJobIdsForTag"):
        assert len(cluster.jobs_with_tag(context, "none", "of the test")) == 1


def test_only_a_name_that_is_missing_is_done_without(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    jvm: Any = spark._jvm

    @with_fallback(lambda use: "plain")
    def private(use: Callable[[], object]) -> object:
        return use()

    for missing in (
        lambda: spark._no_such_name,  # type: ignore[attr-defined]
        lambda: spark._jsparkSession.noSuchMethod(),
        lambda: jvm.org.apache.spark.NoSuchClass(),
        lambda: raised(
            Py4JError("py4j.security.Py4JSecurityException: Method x is not whitelisted")
        ),
    ):
        assert private(missing) == "plain"
    said = [line for line in caplog.messages if line.startswith("private does without")]
    assert len(said) == len(set(said)) == 4
    private(lambda: spark._no_such_name)  # type: ignore[attr-defined]
    assert len(caplog.messages) == 4
    for wrong in (
        lambda: spark.range(1).select(F.raise_error(F.lit("mine"))).collect(),
        lambda: ROOT.no_such_name,  # type: ignore[attr-defined]
        lambda: len(1),  # type: ignore[arg-type]
        lambda: raised(Py4JError("Answer from Java side is empty")),
    ):
        with pytest.raises((AttributeError, TypeError, Py4JError, PySparkException)):
            private(wrong)


def raised(error: Exception) -> None:
    raise error
