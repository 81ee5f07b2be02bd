"""Files planned again come in as many partitions as asked for, and the user's settings stay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from every_row import every
from frames import configured, ids_by_partition, in_files
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.spark.catalyst.file_splits import NotSplitError, replanned
from sparkdl.spark.launch.worker_rows import delivered
from sparkdl.spark.rows.delivery import Way

SIZE = "spark.sql.files.maxPartitionBytes"
ADAPTIVE = "spark.sql.adaptive.enabled"
OPEN = "spark.sql.files.openCostInBytes"


@pytest.fixture(scope="module")
def files(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """Eight files of 50 rows each."""
    return in_files(spark.range(0, 400, 1, 8), tmp_path_factory.mktemp("rows") / "table")


def test_whole_files_come_in_as_many_partitions_as_asked_for(files: DataFrame) -> None:
    for partitions in (2, 4):
        parts = ids_by_partition(replanned(files, partitions).frame)
        assert [len(part) for part in parts] == [400 // partitions] * partitions
        assert sorted(chain(*parts)) == list(range(400))


def test_there_is_no_shuffle_in_the_plan(files: DataFrame) -> None:
    rows = replanned(files.where("id % 3 > 0").select("id"), 2).frame
    assert "Exchange" not in rows._jdf.queryExecution().executedPlan().toString()


def test_the_users_settings_and_partitions_stay_as_they_are(
    spark: SparkSession, files: DataFrame
) -> None:
    settings = dict(spark.conf.getAll)
    before = ids_by_partition(files)
    replanned(files, 2)
    assert dict(spark.conf.getAll) == settings
    assert ids_by_partition(files.select("id")) == before


def test_two_threads_of_a_session_get_what_each_has_asked_for(files: DataFrame) -> None:
    found: dict[int, list[int]] = {}

    def plan(partitions: int) -> None:
        rows = [replanned(files, partitions).frame for _ in range(3)]
        found[partitions] = [frame.rdd.getNumPartitions() for frame in rows]

    threads = [threading.Thread(target=plan, args=(partitions,)) for partitions in (2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {2: [2] * 3, 4: [4] * 3}


def test_each_row_is_found_where_the_users_dataframe_has_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Splits in the middle of files, on either side, and filtered rows."""
    path = tmp_path.as_uri() + "/table"
    spark.range(0, 3000, 1, 3).write.csv(path)
    with configured(spark, {SIZE: "2000", OPEN: "0"}):
        rows = spark.read.schema("id long").csv(path).where("id % 7 > 0")
        found = replanned(rows, 4)
        before, after = ids_by_partition(rows), ids_by_partition(found.frame)
        assert (len(before) > 4, len(after)) == (True, 4)
        for partition, part in enumerate(after):
            for row in (0, len(part) // 2, len(part) - 1):
                number, position = found.origin(partition, row)
                assert before[number][position] == part[row]
        with pytest.raises(ValueError, match="partition 0 has no row 3000"):
            found.origin(0, 3000)


def test_the_size_of_what_is_read_counts_and_not_that_of_the_whole_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A day out of many years: one byte in 100,000."""
    for day, rows in (("day=1", 100), ("day=2", 10_000_000)):
        (tmp_path / day).mkdir()
        (tmp_path / day / "rows.csv").write_bytes(b"1\n" * rows)
    table = spark.read.schema("id long, day int").csv(tmp_path.as_uri())
    parts = ids_by_partition(replanned(table.where("day = 1"), 16).frame)
    assert (len(parts), sum(map(len, parts))) == (16, 100)


def test_many_files_take_few_tries(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sizes differ, so that equal shares would leave a little over."""
    for number in range(300):
        (tmp_path / f"{number}.csv").write_bytes(b"1\n" * (10 + number % 7))
    monkeypatch.setattr("sparkdl.spark.catalyst.file_splits.TRIES", 2)
    rows = spark.read.schema("id long").csv(tmp_path.as_uri())
    sizes = [len(part) for part in ids_by_partition(replanned(rows, 3).frame)]
    assert sum(sizes) == sum(10 + number % 7 for number in range(300))
    assert max(sizes) <= 1.05 * sum(sizes) / 3 + 17


def test_tables_of_a_catalog_that_knows_no_sizes_are_planned_again(
    spark: SparkSession, files: DataFrame
) -> None:
    files.withColumn("odd", F.col("id") % 2).write.partitionBy("odd").saveAsTable("partitioned")
    try:
        parts = ids_by_partition(replanned(spark.table("partitioned"), 2).frame)
        assert (len(parts), sorted(chain(*parts))) == (2, list(range(400)))
    finally:
        spark.sql("DROP TABLE partitioned")


@every(
    ("change", "partitions", "message"),
    [
        (lambda df: df.repartition(3), 2, "do not come from files row by row"),
        (lambda df: df.where(F.rand(1) < 0.5), 2, "depend on the partitions"),
        (lambda df: df.coalesce(2), 3, "coalesce, which barrier mode refuses"),
    ],
)
def test_others_are_not_planned_again_and_it_says_why(
    files: DataFrame, change: Callable[[DataFrame], DataFrame], partitions: int, message: str
) -> None:
    with pytest.raises(NotSplitError, match=message):
        replanned(change(files), partitions)


def test_a_subquery_is_not_run_by_each_try(spark: SparkSession, files: DataFrame) -> None:
    files.createOrReplaceTempView("a_few")
    with configured(spark, {ADAPTIVE: "false"}):
        rows = spark.sql("SELECT * FROM a_few WHERE id > (SELECT min(id) FROM a_few)")
        with pytest.raises(NotSplitError, match="their plan has a subquery"):
            replanned(rows, 2)
    spark.catalog.dropTempView("a_few")


def test_who_exchanges_plans_again_whether_all_tasks_start_at_once_or_not(
    files: DataFrame,
) -> None:
    read = files.rdd.getNumPartitions()
    assert read != 2
    for gang_start_for in (None, "X"):
        delivery, again = delivered(files, 2, 1, "exchange", gang_start_for)
        assert (delivery.way, delivery.exchanged, again is None) == (Way.AS_IT_IS, True, False)
        delivery, again = delivered(files, 2, 1, "spark", gang_start_for)
        assert (delivery.way, again) == (Way.SHUFFLED, None)


def test_files_that_cannot_be_split_are_moved_and_the_reason_says_so(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path.as_uri() + "/table"
    spark.range(0, 100, 1, 2).write.option("compression", "gzip").csv(path)
    delivery, again = delivered(spark.read.csv(path), 3, 1, "exchange", "X")
    assert (delivery.way, delivery.exchanged, again) == (Way.MOVED, True, None)
    assert "X needs a gang-scheduled start" in delivery.reason
    assert delivery.reason.endswith("the files make 2 partitions")


def test_a_query_with_a_common_table_expression_is_planned_again(
    spark: SparkSession, files: DataFrame
) -> None:
    files.createOrReplaceTempView("all_of_them")
    try:
        rows = spark.sql(
            "WITH odd AS (SELECT id FROM all_of_them WHERE id % 2 = 1) SELECT id FROM odd"
        )
        parts = ids_by_partition(replanned(rows, 2).frame)
    finally:
        spark.catalog.dropTempView("all_of_them")
    assert [len(part) for part in parts] == [100, 100]
    assert sorted(chain(*parts)) == list(range(1, 400, 2))
