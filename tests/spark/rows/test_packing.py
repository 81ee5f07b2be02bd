"""Whatever a frame's rows are, the workers get them as they are, packed and taken apart again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from frames import configured, in_files
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.feed.packed import ORDER_COLUMN, unpacked
from sparkdl.spark.catalyst import array_bytes
from sparkdl.spark.rows.packing import (
    COLUMN_BYTES,
    RECORD_BATCH_BYTES,
    SETTING,
    Source,
    packed,
    packed_columns,
    small_record_batches,
)

COLUMNS = {
    "c0": "cast(id as float)",
    "c1": "if(id % 3 = 0, null, cast(id as float))",
    "c2": "cast(-id as float)",
    "c3": "cast(id * 2 as float)",
    "c4": "cast(id as int)",
    "c5": "transform(sequence(1, 70), x -> cast(x * id as float))",
    "c6": "if(id % 7 = 0, null, transform(sequence(1, cast(3 + id % 2 as int)), "
    "x -> if(x = 2 and id % 5 = 0, null, cast(x * id as double))))",
    "c7": "array_repeat(cast(id as tinyint), cast(id % 4 as int))",
    "c8": "array(id, id + 1)",
    "c9": "array(cast(id as smallint))",
    "c10": "array(1.5f, null)",
    "c11": "cast(id as string)",
    ORDER_COLUMN: "id * 100",
}
VECTORS = T.StructType(
    [T.StructField("c0", VectorUDT()), T.StructField(ORDER_COLUMN, T.LongType())]
)
SQL = [f"{expression} as {name}" for name, expression in COLUMNS.items()]


@pytest.fixture(scope="module")
def computed(spark: SparkSession) -> DataFrame:
    return spark.range(0, 100, 1, 2).selectExpr(*SQL)


@pytest.fixture(scope="module")
def files(computed: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    return in_files(computed, tmp_path_factory.mktemp("rows") / "table")


def at_the_workers(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows that come out of packing, by their order."""

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in map(unpacked, batches):
            yield pa.record_batch([pa.array([repr(batch.to_pylist())])], ["rows"])

    found = packed(frame).mapInArrow(unpack, "rows string").collect()
    rows: list[dict[str, Any]] = [each for row in found for each in eval(row.rows)]
    return sorted(rows, key=lambda row: int(row[ORDER_COLUMN]))


@pytest.fixture(scope="module")
def expected(computed: DataFrame) -> list[dict[str, Any]]:
    rows = [row.asDict() for row in computed.collect()]
    return sorted(rows, key=lambda row: int(row[ORDER_COLUMN]))


def test_rows_come_as_they_are_whatever_has_read_them(
    files: DataFrame, computed: DataFrame, expected: list[dict[str, Any]]
) -> None:
    cached = files.where("c4 > -1").cache()
    plans = {
        "read": files,
        "shuffled": files.repartition(3),
        "cached": cached,
        "filtered": files.select(*[F.col(n).alias(n) for n in files.columns]).where("c4 >= 0"),
        "just computed": computed,
    }
    wrong = [name for name, frame in plans.items() if at_the_workers(frame) != expected]
    cached.unpersist()
    assert wrong == []


def test_rows_come_as_they_are_without_generated_code(
    spark: SparkSession, files: DataFrame, expected: list[dict[str, Any]]
) -> None:
    settings = {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    with configured(spark, settings):
        assert at_the_workers(files) == expected


def test_rows_that_the_driver_made_come_as_they_are(spark: SparkSession) -> None:
    frame = spark.sql(
        f"select * from values (array(1f, 2f), 0), (array(3f, null), 1) as t(c0, {ORDER_COLUMN})"
    )
    assert at_the_workers(frame) == [
        {"c0": [1.0, 2.0], ORDER_COLUMN: 0},
        {"c0": [3.0, None], ORDER_COLUMN: 1},
    ]


def test_vectors_come_as_structs(spark: SparkSession) -> None:
    rows = [(Vectors.dense([1.0, 2.0]), 0), (Vectors.sparse(3, [2], [5.0]), 1), (None, 2)]
    frame = spark.createDataFrame(rows, schema=VECTORS)
    assert at_the_workers(frame) == [
        {"c0": {"type": 1, "size": None, "indices": [], "values": [1.0, 2.0]}, ORDER_COLUMN: 0},
        {"c0": {"type": 0, "size": 3, "indices": [2], "values": [5.0]}, ORDER_COLUMN: 1},
        {"c0": None, ORDER_COLUMN: 2},
    ]


def test_numbers_of_one_type_come_together_and_arrays_in_bytes(files: DataFrame) -> None:
    frame = packed(files.select("c0", "c1", "c2", "c3", "c4", "c5", ORDER_COLUMN))
    assert dict(frame.dtypes) == {
        "c0,c1,c2,c3": "array<float>",
        "c4": "int",
        "c5:float": "binary",
        "c5:rest": "array<float>",
        ORDER_COLUMN: "bigint",
    }


def test_arrays_in_files_come_in_bytes_alone(files: DataFrame) -> None:
    lengths = map(F.array_size, ("c5:rest", "c6:rest", "c7:rest"))  # of null, size is -1 in Spark 3
    rest = [F.coalesce(each, F.lit(0)) for each in lengths]
    assert packed(files).select(F.sum(sum(rest))).collect() == [(0,)]


def test_hundreds_of_columns_of_arrays_come_as_they_are(spark: SparkSession) -> None:
    frame = spark.range(1).select(*[F.array(F.lit(1.0)).alias(f"c{k}") for k in range(101)])
    assert packed(frame).columns == frame.columns


def assert_arrays_stay(files: DataFrame, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    with caplog.at_level(logging.INFO, "sparkdl.spark.catalyst.array_bytes"):
        frame = packed(files.select("c5", "c6"))
    assert frame.dtypes == [("c5", "array<float>"), ("c6", "array<double>")]
    assert reason in caplog.text


def test_a_spark_without_those_methods_hands_arrays_over_as_they_are(
    files: DataFrame, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(array_bytes, "_UNSAFE", "org.apache.spark.sql.catalyst.NoSuchArray")
    monkeypatch.setattr(array_bytes, "_made", {})
    assert_arrays_stay(files, caplog, "arrays are passed to Python as they are")


def test_a_spark_that_keeps_arrays_in_other_bytes_hands_them_over_as_they_are(
    files: DataFrame,
    expected: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    call = array_bytes.ArrayBytes._call

    def with_too_few(self: Any, target: Any, method: str, *arguments: Any) -> Any:
        return call(self, target, method.replace("getSizeInBytes", "numElements"), *arguments)

    monkeypatch.setattr(array_bytes.ArrayBytes, "_call", with_too_few)
    monkeypatch.setattr(array_bytes, "_made", {})
    assert_arrays_stay(files, caplog, "this Spark stores them in a different layout")
    assert at_the_workers(files) == expected


def test_the_bytes_are_looked_at_once_in_an_application(
    files: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bytes] = []
    of_sample = array_bytes.ArrayBytes.of_sample

    def counted(self: Any, spark: SparkSession) -> bytes:
        looked.append(of_sample(self, spark))
        return looked[-1]

    monkeypatch.setattr(array_bytes.ArrayBytes, "of_sample", counted)
    monkeypatch.setattr(array_bytes, "_made", {})
    for _ in range(2):
        assert ("c5:float", "binary") in packed(files.select("c5", "c6")).dtypes
    assert looked == [array_bytes._BYTES_OF_SAMPLE]


def test_columns_of_numbers_become_one_array_once(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element of an array is a message to the JVM."""
    made, array = [], F.array

    def counted(*columns: Any) -> Any:
        made.append(len(columns))
        return array(*columns)

    monkeypatch.setattr(F, "array", counted)
    sources = [Source(f"c{index}", F.col(f"c{index}"), T.FloatType()) for index in range(30)]
    assert len(packed_columns(sources, spark)) == 1
    assert made == [30]


ROW_BYTES = 784 * 4


@pytest.fixture(scope="module")
def wide(spark: SparkSession) -> DataFrame:
    """Two partitions of 6.3 MB, fewer rows than Spark would put into one record batch."""
    if pyspark.__version__ < "4":
        pytest.skip("Spark 3.5 limits the rows of record batches, not their bytes")
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
    with small_record_batches(spark):
        small = sizes(wide)
    with small_record_batches(spark, columns=1_024):
        larger = sizes(wide)
    after = sizes(wide)

    assert before == after == [2000 * ROW_BYTES] * 2
    assert sum(small) == sum(before)
    assert RECORD_BATCH_BYTES / 2 < max(small) < 1.1 * RECORD_BATCH_BYTES
    assert RECORD_BATCH_BYTES < max(larger) < 1.1 * 1_024 * COLUMN_BYTES


def test_who_has_set_the_size_gets_it(spark: SparkSession, wide: DataFrame) -> None:
    with configured(spark, {SETTING: str(512 << 10)}), small_record_batches(spark):
        found = sizes(wide)
    assert max(found) < 600 << 10
