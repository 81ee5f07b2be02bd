"""Columns and values that cannot be trained on are refused before any worker takes a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from every_row import every
from frames import Refuse, estimator, frame, frame_of_sizes
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkdl.errors import DataError


def null_where(name: str, condition: str) -> str:
    return f"if({condition}, null, {name})"


HOLED = "transform(features, x -> if(id % 15 = 2, null, x))"
BINARY = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
RANGE = "3 outputs", "0 to 2", "StringIndexer"
THREE = {"numWorkers": 3}
Case = tuple[str, str | Callable[[], Column], Sequence[str], dict[str, Any]]
TYPES: list[Case] = [
    ("features", "'a'", ["string", "StringIndexer"], {}),
    ("features", "timestamp_seconds(id)", ["timestamp", "unix_timestamp"], {}),
    ("features", "date_from_unix_date(cast(id as int))", ["date", "dayofyear"], {}),
    ("features", "map('a', id)", ["map<string,bigint>", "columns of their own"], {}),
    ("features", "struct(id)", ["struct<id:bigint>", "columns of their own"], {}),
    ("features", "array('a')", ["array<string>", "array of numbers"], {}),
    ("label", "string(label)", ["labelCol", "string", "StringIndexer"], {}),
    ("my.own col", "'text'", ["string"], {"featuresCol": "my.own col"}),
]
NULLS: list[Case] = [
    *(
        (
            name,
            null_where(name, "id % 20 = 1"),
            ["3 null values in 60", f"`{name}` IS NOT NULL"],
            {},
        )
        for name in ("features", "label")
    ),
    *(
        ("features", null_where("features", where), [f"{count} null values in 60 rows"], THREE)
        for where, count in (("id in (43, 57)", 2), ("id >= 40", 20), ("id in (3, 20, 39, 59)", 4))
    ),
    (
        "features",
        lambda: F.when(F.col("id") >= 2, array_to_vector("features")),
        ["2 null values in 60 rows"],
        {},
    ),
    *(
        ("features", f"cast({HOLED} as array<{kind}>)", ["null elements", "4 of 60 rows"], {})
        for kind in ("double", "float", "int", "bigint")
    ),
]
LENGTHS: list[Case] = [
    (
        "features",
        "if(id = 33, slice(features, 1, 2), features)",
        ["arrays of 2 to 4 elements", "same number"],
        {},
    ),
    (
        "features",
        lambda: array_to_vector(F.expr("if(id = 33, concat(features, array(1.0D)), features)")),
        ["4 to 5 elements"],
        {},
    ),
    ("features", "slice(features, 1, 0)", ["empty arrays"], {}),
    # No worker sees two lengths.
    ("features", "slice(features, 1, int(4 - id div 20))", ["arrays of 2 to 4 elements"], THREE),
]
LABELS: list[Case] = [
    ("label", "label + 1", ["1 to 3", *RANGE], {}),
    ("label", "label - 1", ["-1 to 1", *RANGE], {}),
    ("label", "double(label + 1)", ["1 to 3", "0 to 2"], {}),
    ("label", "if(id = 59, 7, label)", ["0 to 7", "row 19 of partition 2", "0 to 2"], THREE),
    (
        "label",
        "label + if(id < 5, 0.25D, 0D)",
        ["double", "not whole in 5 rows, the first", "CrossEntropyLoss"],
        {},
    ),
    *(
        ("label", "label", ["0 to 2", "0 to 1"], {"loss": loss, "model": BINARY})
        for loss in (nn.BCEWithLogitsLoss(), nn.BCELoss())
    ),
    *(
        ("label", "if(id = 17, double('NaN'), double(label))", ["NaN"], {"loss": loss})
        for loss in (nn.CrossEntropyLoss(), nn.MSELoss())
    ),
]


@pytest.mark.parametrize(
    "cases", [TYPES, NULLS, LENGTHS, LABELS], ids=["types", "nulls", "lengths", "labels"]
)
def test_a_column_that_cannot_be_trained_on_is_named_with_why_and_the_way_out(
    spark: SparkSession, refuse: Refuse, cases: list[Case]
) -> None:
    @every(("name", "column", "fragments", "changes"), cases)
    def is_refused(
        name: str,
        column: str | Callable[[], Column],
        fragments: Sequence[str],
        changes: dict[str, Any],
    ) -> None:
        made = F.expr(column) if isinstance(column, str) else column()
        rows = frame(spark, rows=60, partitions=3).withColumn(name, made)
        refuse(rows, DataError, f"'{name}'", *fragments, **changes)

    is_refused()


def test_a_column_that_is_missing_or_there_twice_is_named(
    spark: SparkSession, refuse: Refuse
) -> None:
    rows = frame(spark)
    for param in ("featuresCol", "labelCol"):
        refuse(rows, DataError, param, "'nowhere'", "id, features, label", **{param: "nowhere"})
    several = {"featuresCols": ["features", "nowhere"]}
    refuse(rows, DataError, "featuresCols", "'nowhere'", **several)
    for name in ("features", "label"):
        right = frame(spark).select(F.col("id").alias("other"), name)
        doubled = rows.join(right, rows.id == right.other)
        refuse(doubled, DataError, f"'{name}'", "2 times", "rename")


def test_nulls_in_the_one_big_partition_of_a_skewed_frame_are_counted(
    spark: SparkSession, refuse: Refuse
) -> None:
    rows = frame_of_sizes(spark, [54, 3, 3]).withColumn(
        "label", F.expr(null_where("label", "id < 5"))
    )
    refuse(rows, DataError, "'label'", "5 null values in 60 rows", numWorkers=3)


@every("workers", [2, 3])
def test_a_frame_of_fewer_rows_than_workers_is_refused_shuffled_or_not(
    spark: SparkSession, refuse: Refuse, workers: int
) -> None:
    """Spark knows the last to be empty before it runs anything."""
    for where in ("id < 0", "rand(1) > 2", "false"):
        rows = frame(spark, partitions=3).where(where)
        refuse(rows, DataError, "DataFrame is empty", numWorkers=workers)
    rows = frame(spark, rows=2, partitions=1 if workers == 2 else 3)
    refuse(rows, DataError, "2 rows", "3 workers", "numWorkers", numWorkers=3)


def test_a_bad_row_is_named_by_the_partition_that_spark_has_read(
    spark: SparkSession, refuse: Refuse
) -> None:
    """Each worker reads several, one behind the other."""
    rows = frame(spark, rows=64, partitions=16).where("id != 41")
    rows = rows.withColumn("label", F.expr("if(id in (43, 63), 7, label)"))
    refuse(rows, DataError, "'label'", "0 to 7", "of partition 1", numWorkers=3)
    nulls = rows.withColumn("features", F.expr("if(id = 43, null, features)"))
    refuse(nulls, DataError, "'features'", "(the first is row 2 of partition 10)", numWorkers=3)


def test_a_stream_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    rows = spark.readStream.format("rate").load()
    refuse(rows, DataError, "is a stream", "foreachBatch")


def test_a_label_that_the_loss_ignores_is_not_out_of_range(spark: SparkSession) -> None:
    rows = frame(spark).withColumn("label", F.expr("if(id < 5, -1, label)"))
    model = estimator(loss=nn.CrossEntropyLoss(ignore_index=-1)).fit(rows)
    assert model.history[0].examples == 60


@every(
    ("column", "dtype", "value", "names"),
    [
        ("features", "float16", 1e5, "float16, -65504 to 65504"),
        ("features", "bfloat16", 3.4e38, "bfloat16, -3.38953e+38"),
        ("features", "float32", -1e300, "float32, -3.40282e+38"),
        ("features", "int8", 200.0, "int8, -128 to 127"),
        ("label", "float32", 1e39, "float32"),
    ],
)
def test_numbers_out_of_the_dtypes_range_are_named_with_their_place(
    spark: SparkSession, refuse: Refuse, column: str, dtype: str, value: float, names: str
) -> None:
    rows = frame(spark, rows=60, partitions=2).withColumn("label", F.col("label").cast("double"))
    bad = F.lit(value) if column == "label" else F.array(*[F.lit(value)] * 4)
    rows = rows.withColumn(column, F.when(F.col("id").isin(33, 47), bad).otherwise(F.col(column)))
    changes = {"columnDtypes": {column: dtype}, "loss": nn.MSELoss()}
    place = "(the first is row 3 of partition 1)"
    refuse(rows, DataError, f"'{column}'", "2 rows of 60", names, place, **changes)
