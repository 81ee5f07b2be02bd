"""Workers with a gang-scheduled start read files without Spark's shuffle, and exchange the rows."""

from __future__ import annotations

import logging
import sys
from functools import partial

import cloudpickle
import pytest
from frames import estimator, frame, same_bits
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkdl
from sparkdl import GradientAllReduce
from sparkdl.errors import DataError

cloudpickle.register_pickle_by_value(sys.modules[__name__])
FILES, ROWS, WORKERS = 16, 480, 2
ALL_REDUCE = GradientAllReduce()


@pytest.fixture(scope="module")
def files(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """Files that are sorted by class: each has rows of one only."""
    path = (tmp_path_factory.mktemp("rows") / "table").as_uri()
    rows = frame(spark, ROWS, 1).sort("label").coalesce(1)
    rows.write.option("maxRecordsPerFile", ROWS // FILES).parquet(path)
    return spark.read.parquet(path)


def test_a_fit_of_sixteen_files_takes_no_shuffle_and_every_row_once_with_the_same_bits(
    spark: SparkSession, files: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    settings = dict(spark.conf.getAll)
    tuned = estimator(strategy=ALL_REDUCE, numWorkers=WORKERS, epochs=2)
    with caplog.at_level(logging.INFO, "sparkdl"):
        first = tuned.fit(files)
    again = tuned.fit(files)
    assert "2 partitions, planned again, are read by as many tasks, and exchanged" in caplog.text
    assert "Spark's shuffle" not in caplog.text
    assert [row.examples for row in first.history] == [ROWS] * 2
    assert same_bits(first, again)
    assert dict(spark.conf.getAll) == settings


def labels_and_ids() -> list[tuple[int, int]]:
    worker = sparkdl.current_worker()
    return [
        (int(label), int(row))
        for batch in worker.batches(20)
        for label, row in zip(batch["label"], batch["id"], strict=True)
    ]


@pytest.mark.slow
def test_workers_of_a_function_get_rows_of_each_class_from_files_sorted_by_it(
    files: DataFrame,
) -> None:
    shards = sparkdl.run(labels_and_ids, num_workers=WORKERS, df=files)
    assert sorted(row for shard in shards for _, row in shard) == list(range(ROWS))
    for shard in shards:
        counts = [sum(label == each for label, _ in shard) for each in range(3)]
        # 80 of each are expected, hypergeometric with a deviation of 6.3; sorted: 160, 80 and 0
        assert all(48 <= count <= 112 for count in counts), counts


def test_rows_that_depend_on_partitions_are_shuffled_and_the_log_says_why(
    files: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    rows = files.where(F.rand(1) < 2)
    with caplog.at_level(logging.INFO, "sparkdl"):
        model = estimator(strategy=ALL_REDUCE, numWorkers=WORKERS).fit(rows)
    assert "rows: Spark's shuffle takes" in caplog.text
    assert "because GradientAllReduce needs a gang-scheduled start" in caplog.text
    assert "depend on the partitions" in caplog.text
    assert model.history[0].examples == ROWS


@pytest.mark.slow_variants
@pytest.mark.parametrize("by", ["fit", "run"])
def test_a_bad_row_is_named_where_the_users_dataframe_has_it(files: DataFrame, by: str) -> None:
    bad = 333
    label = F.when(F.col("id") != bad, F.col("label"))
    rows = files.withColumn("label", label)
    parts = [[row.id for row in part] for part in rows.rdd.glom().collect()]
    ((partition, position),) = [
        (number, part.index(bad)) for number, part in enumerate(parts) if bad in part
    ]
    fit = partial(estimator(strategy=ALL_REDUCE, numWorkers=WORKERS).fit, rows)
    run = partial(sparkdl.run, labels_and_ids, num_workers=WORKERS, df=rows)
    with pytest.raises(DataError, match=rf"row {position} of partition {partition}\b"):
        (fit if by == "fit" else run)()
