"""How much of its rows Spark hands to a worker at once."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.spark.rows.packing import RECORD_BATCH_BYTES, SETTING, small_record_batches

ROW_BYTES = 784 * 4


@pytest.fixture(scope="module")
def wide(spark: SparkSession) -> DataFrame:
    """Two partitions of 6.3 MB, fewer rows than Spark would put into one record batch."""
    return spark.range(0, 4000, 1, 2).select(F.expr("array_repeat(float(1), 784)").alias("x"))


def sizes(rows: DataFrame) -> list[int]:
    """Bytes of the record batches that Python functions get."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch([pa.array([batch.num_rows * ROW_BYTES])], ["bytes"])

    return [row.bytes for row in rows.mapInArrow(look, "bytes bigint").collect()]


def test_record_batches_are_small_only_for_jobs_that_ask_for_it(
    spark: SparkSession, wide: DataFrame
) -> None:
    before = sizes(wide)
    with small_record_batches(spark.sparkContext):
        small = sizes(wide)
    after = sizes(wide)

    assert before == after == [2000 * ROW_BYTES] * 2
    assert sum(small) == sum(before)
    assert RECORD_BATCH_BYTES / 2 < max(small) < 1.1 * RECORD_BATCH_BYTES


def test_who_has_set_the_size_gets_it(spark: SparkSession, wide: DataFrame) -> None:
    spark.conf.set(SETTING, str(512 << 10))
    try:
        with small_record_batches(spark.sparkContext):
            found = sizes(wide)
    finally:
        spark.conf.unset(SETTING)
    assert max(found) < 600 << 10
