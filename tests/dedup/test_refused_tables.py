"""What cannot be searched is said in words, before any row is hashed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from every_row import every_row
from frames import no_jobs
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl import NearDuplicates
from sparkdl.errors import ConfigError, DataError

Change = Callable[[DataFrame], DataFrame]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    columns = {"id": range(4), "word": pa.array([0, 1, 7, 7], pa.int64()), "label": ["a"] * 4}
    return spark.createDataFrame(pa.table(columns))


@every_row(
    ({"hash": "md5"}, "hash must be one of dhash, ahash, phash, whash, simhash, given"),
    ({"threshold": -1}, "threshold must be a whole number of bits >= 0"),
    ({"threshold": 32}, "threshold must be at most 31 of the 64 bits, got 32"),
    ({"threshold": 1.5}, "threshold must be a whole number"),
    ({"mode": "drop"}, "mode must be one of filter, mark"),
    ({"keep": None}, "keep must be a name, got None"),
    ({"within": ""}, "within must be a name"),
    ({"treshold": 3}, "no parameter 'treshold'. Did you mean 'threshold'?"),
)
def test_params(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NearDuplicates(**params)
    assert said in str(caught.value)


@every_row(
    ({"inputCol": "image"}, None, "'image', which the DataFrame does not have. It has: id"),
    ({"within": "class"}, None, "or set within=None to compare all rows"),
    ({"keep": "path"}, None, "keep names the column 'path'"),
    ({"hash": "dhash"}, None, "(inputCol) has type bigint, but hash='dhash' takes binary"),
    ({"hash": "simhash"}, None, "hash='simhash' takes strings"),
    ({"inputCol": "label"}, None, "hash='given' takes longs"),
    ({}, lambda f: f.withColumn("id", F.array("id")), "(keep) has type array<bigint>"),
    ({}, lambda f: f.withColumn("label", F.struct("id")), "(within) has type struct"),
    ({}, lambda f: f.select("*", "id"), "'id', which occurs 2 times"),
    ({"keep": "Distance"}, lambda f: f.withColumnRenamed("id", "Distance"), "are marked with"),
    ({"keep": "duplicate_of"}, lambda f: f.withColumnRenamed("id", "duplicate_of"), "Rename"),
)
def test_tables_before_any_task(
    spark: SparkSession, rows: DataFrame, params: dict[str, Any], change: Change | None, said: str
) -> None:
    estimator = NearDuplicates(**{"hash": "given", "inputCol": "word", **params})
    with no_jobs(spark), pytest.raises(DataError) as caught:
        estimator.fit(change(rows) if change else rows)
    assert said in str(caught.value)


@every_row(
    ("false", "id", "the DataFrame has no rows"),
    (
        "true",
        "nullif(id, 2)",
        "(keep) must be unique and without null, but of 4 rows 1 have null and 0",
    ),
    ("true", "id % 3", "0 have null and 1 the value of another"),
)
def test_rows_that_cannot_be_told_apart(
    rows: DataFrame, condition: str, keep: str, said: str
) -> None:
    wrong = rows.where(condition).withColumn("id", F.expr(keep))
    with pytest.raises(DataError) as caught:
        NearDuplicates(hash="given", inputCol="word").fit(wrong)
    assert said in str(caught.value)


def test_a_stream_is_no_table_of_rows(spark: SparkSession) -> None:
    stream = spark.readStream.format("rate").load()
    with pytest.raises(DataError, match="is a stream"):
        NearDuplicates(inputCol="value", hash="given", keep="timestamp", within=None).fit(stream)


def test_what_a_model_does_not_know(rows: DataFrame, spark: SparkSession) -> None:
    model = NearDuplicates(hash="given", inputCol="word", threshold=2).fit(rows)
    with pytest.raises(ConfigError, match=r"hash='given' and threshold=2, but now .*threshold=3"):
        model.transform(rows, {model.threshold: 3})
    with pytest.raises(ConfigError, match="Fit again"):
        model.transform(rows, {model.hash: "dhash"})
    with pytest.raises(ConfigError, match="fitted with a column 'within', but now has within=None"):
        model.transform(rows, {model.within: None})
    with pytest.raises(DataError, match=r"'id' \(keep\) has type string, but it had bigint"):
        model.transform(rows.withColumn("id", F.col("id").cast("string")))
    with pytest.raises(DataError, match="already has a column 'distance'"):
        model.transform(rows.withColumn("Distance", F.lit(1)), {model.mode: "mark"})
    stream = spark.readStream.format("rate").load()
    with pytest.raises(DataError, match="foreachBatch"):
        model.transform(stream)


def test_new_rows_that_cannot_be_told_apart_fail_the_query(rows: DataFrame) -> None:
    model = NearDuplicates(hash="given", inputCol="word").fit(rows)
    for identity in ("id % 2", "nullif(id, 2)"):
        new = rows.withColumn("id", F.expr(identity))
        with pytest.raises(PySparkException, match="must be unique and without null, but is not"):
            model.transform(new).collect()
