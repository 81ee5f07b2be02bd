"""Columns and values that cannot be trained on are refused before any worker takes a step."""

from __future__ import annotations

import pytest
from frames import Refuse, estimator, frame, frame_of_sizes
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkdl.errors import DataError


@pytest.mark.parametrize("param", ["featuresCol", "labelCol"])
def test_a_missing_column_is_named_with_those_there_are(
    spark: SparkSession, refuse: Refuse, param: str
) -> None:
    refuse(frame(spark), DataError, param, "'nowhere'", "id, features, label", **{param: "nowhere"})


def test_a_missing_column_among_several_is_named(spark: SparkSession, refuse: Refuse) -> None:
    refuse(
        frame(spark), DataError, "featuresCols", "'nowhere'", featuresCols=["features", "nowhere"]
    )


@pytest.mark.parametrize("name", ["features", "label"])
def test_a_column_doubled_by_a_join_is_named_with_its_count(
    spark: SparkSession, refuse: Refuse, name: str
) -> None:
    left, right = frame(spark), frame(spark).select(F.col("id").alias("other"), name)
    doubled = left.join(right, left.id == right.other)
    refuse(doubled, DataError, f"'{name}'", "2 times", "rename")


UNSUPPORTED = {
    "string": ("'a'", "string", "StringIndexer"),
    "timestamp": ("timestamp_seconds(id)", "timestamp", "unix_timestamp"),
    "date": ("date_from_unix_date(cast(id as int))", "date", "dayofyear"),
    "map": ("map('a', id)", "map<string,bigint>", "columns of their own"),
    "struct": ("struct(id)", "struct<id:bigint>", "columns of their own"),
    "array of strings": ("array('a')", "array<string>", "array of numbers"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_an_unsupported_type_is_named_with_the_way_out(
    spark: SparkSession, refuse: Refuse, kind: str
) -> None:
    expression, type_name, fix = UNSUPPORTED[kind]
    rows = frame(spark).withColumn("features", F.expr(expression))
    refuse(rows, DataError, "'features'", type_name, fix)


def test_a_label_of_an_unsupported_type_is_named(spark: SparkSession, refuse: Refuse) -> None:
    rows = frame(spark).withColumn("label", F.col("label").cast("string"))
    refuse(rows, DataError, "'label'", "labelCol", "string", "StringIndexer")


def null_where(column: Column, condition: Column) -> Column:
    return F.when(~condition, column)


@pytest.mark.slow_variants
@pytest.mark.parametrize("name", ["features", "label"])
def test_nulls_are_counted_and_their_column_named(
    spark: SparkSession, refuse: Refuse, name: str
) -> None:
    rows = frame(spark, rows=60).withColumn(name, null_where(F.col(name), F.col("id") % 20 == 1))
    refuse(rows, DataError, f"'{name}'", "3 null values in 60 rows", f"`{name}` IS NOT NULL")


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize(
    ("where", "count"),
    [("id in (43, 57)", 2), ("id >= 40", 20), ("id in (3, 20, 39, 59)", 4)],
    ids=["in-one-partition", "a-whole-partition", "in-each-partition"],
)
@pytest.mark.parametrize("name", ["features", "label"])
def test_nulls_are_counted_over_all_partitions(
    spark: SparkSession, refuse: Refuse, name: str, where: str, count: int
) -> None:
    rows = frame(spark, rows=60, partitions=3)
    rows = rows.withColumn(name, null_where(F.col(name), F.expr(where)))
    refuse(rows, DataError, f"'{name}'", f"{count} null values in 60 rows", numWorkers=3)


def test_nulls_in_the_one_big_partition_of_a_skewed_frame_are_counted(
    spark: SparkSession, refuse: Refuse
) -> None:
    rows = frame_of_sizes(spark, [54, 3, 3])
    rows = rows.withColumn("label", null_where(F.col("label"), F.col("id") < 5))
    refuse(rows, DataError, "'label'", "5 null values in 60 rows", numWorkers=3)


@pytest.mark.slow
def test_nulls_of_a_vector_column_are_counted(spark: SparkSession, refuse: Refuse) -> None:
    vectors = null_where(array_to_vector("features"), F.col("id") < 2)
    rows = frame(spark).withColumn("features", vectors)
    refuse(rows, DataError, "'features'", "2 null values in 60 rows")


@pytest.mark.parametrize("element", ["double", "float", "int", "bigint"])
def test_rows_with_nulls_inside_arrays_are_counted(
    spark: SparkSession, refuse: Refuse, element: str
) -> None:
    holed = F.transform("features", lambda x: null_where(x, (F.col("id") % 15 == 2)))
    rows = frame(spark).withColumn("features", holed.cast(f"array<{element}>"))
    refuse(rows, DataError, "'features'", "null elements", "4 of 60 rows")


def test_arrays_of_unequal_length_are_refused_with_the_extremes(
    spark: SparkSession, refuse: Refuse
) -> None:
    cut = F.when(F.col("id") == 33, F.slice("features", 1, 2)).otherwise(F.col("features"))
    rows = frame(spark).withColumn("features", cut)
    refuse(rows, DataError, "'features'", "arrays of 2 to 4 elements", "same number")


def test_arrays_of_a_length_of_their_own_in_each_partition_are_refused_with_the_extremes(
    spark: SparkSession, refuse: Refuse
) -> None:
    """No worker sees two lengths."""
    cut = F.slice("features", F.lit(1), F.expr("cast(4 - id div 20 as int)"))
    rows = frame(spark, rows=60, partitions=3).withColumn("features", cut)
    refuse(rows, DataError, "'features'", "arrays of 2 to 4 elements", numWorkers=3)


@pytest.mark.slow
def test_vectors_of_unequal_length_are_refused_with_the_extremes(
    spark: SparkSession, refuse: Refuse
) -> None:
    longer = F.concat("features", F.array(F.lit(1.0)))
    mixed = F.when(F.col("id") == 33, longer).otherwise(F.col("features"))
    rows = frame(spark).withColumn("features", array_to_vector(mixed))
    refuse(rows, DataError, "'features'", "4 to 5 elements")


def test_arrays_without_elements_are_refused(spark: SparkSession, refuse: Refuse) -> None:
    rows = frame(spark).withColumn("features", F.slice("features", 1, 0))
    refuse(rows, DataError, "'features'", "empty arrays")


@pytest.mark.parametrize("workers", [2, 3], ids=["after-a-shuffle", "in-place"])
@pytest.mark.parametrize("where", ["id < 0", "rand(1) > 2", "false"])
def test_an_empty_frame_is_refused(
    spark: SparkSession, refuse: Refuse, where: str, workers: int
) -> None:
    """Spark knows the last to be empty before it runs anything."""
    rows = frame(spark, partitions=3).where(where)
    refuse(rows, DataError, "DataFrame is empty", numWorkers=workers)


@pytest.mark.parametrize("partitions", [1, 3], ids=["after-a-shuffle", "in-place"])
def test_fewer_rows_than_workers_are_refused_with_both_numbers(
    spark: SparkSession, refuse: Refuse, partitions: int
) -> None:
    rows = frame(spark, rows=2, partitions=partitions)
    refuse(rows, DataError, "2 rows", "3 workers", "numWorkers", numWorkers=3)


@pytest.mark.parametrize(
    ("expression", "found"), [("label + 1", "1 to 3"), ("label - 1", "-1 to 1")]
)
def test_class_labels_out_of_range_are_refused_with_the_range_that_fits(
    spark: SparkSession, refuse: Refuse, expression: str, found: str
) -> None:
    rows = frame(spark).withColumn("label", F.expr(expression))
    refuse(rows, DataError, "'label'", found, "3 outputs", "0 to 2", "StringIndexer")


def test_a_class_label_out_of_range_in_one_partition_is_refused_with_the_range_of_all(
    spark: SparkSession, refuse: Refuse
) -> None:
    rows = frame(spark, rows=60, partitions=3)
    rows = rows.withColumn("label", F.expr("if(id = 59, 7, label)"))
    place = "row 19 of partition 2"
    refuse(rows, DataError, "'label'", "0 to 7", place, "0 to 2", numWorkers=3)


def test_a_bad_row_is_named_by_the_partition_that_spark_has_read(
    spark: SparkSession, refuse: Refuse
) -> None:
    """Each worker reads several, one behind the other."""
    rows = frame(spark, rows=64, partitions=16).where("id != 41")
    rows = rows.withColumn("label", F.expr("if(id in (43, 63), 7, label)"))
    refuse(rows, DataError, "'label'", "0 to 7", "of partition 1", numWorkers=3)
    nulls = rows.withColumn("features", F.expr("if(id = 43, null, features)"))
    refuse(nulls, DataError, "'features'", "(the first is row 2 of partition 10)", numWorkers=3)


def test_doubles_that_are_whole_are_refused_as_class_labels_only_if_out_of_range(
    spark: SparkSession, refuse: Refuse
) -> None:
    rows = frame(spark).withColumn("label", F.expr("cast(label + 1 as double)"))
    refuse(rows, DataError, "'label'", "1 to 3", "0 to 2")


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.BCELoss()])
def test_binary_labels_above_one_are_refused(
    spark: SparkSession, refuse: Refuse, loss: nn.Module
) -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    refuse(frame(spark), DataError, "'label'", "0 to 2", "0 to 1", loss=loss, model=model)


def test_labels_with_fractions_are_refused_for_a_loss_of_class_indices(
    spark: SparkSession, refuse: Refuse
) -> None:
    rows = frame(spark).withColumn("label", F.expr("label + if(id < 5, 0.25D, 0D)"))
    refuse(rows, DataError, "'label'", "double", "5 numbers that are not whole", "CrossEntropyLoss")


def test_a_stream_is_refused(spark: SparkSession, refuse: Refuse) -> None:
    rows = spark.readStream.format("rate").load()
    refuse(rows, DataError, "is a stream", "foreachBatch")


def test_a_name_with_dots_and_spaces_is_taken_as_it_is(spark: SparkSession, refuse: Refuse) -> None:
    rows = frame(spark).withColumn("my.own col", F.lit("text"))
    refuse(rows, DataError, "'my.own col'", "string", featuresCol="my.own col")


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()])
def test_labels_that_are_nan_are_refused(
    spark: SparkSession, refuse: Refuse, loss: nn.Module
) -> None:
    rows = frame(spark).withColumn("label", F.expr("if(id = 17, double('NaN'), double(label))"))
    refuse(rows, DataError, "'label'", "NaN", loss=loss)


def test_a_label_that_the_loss_ignores_is_not_out_of_range(spark: SparkSession) -> None:
    rows = frame(spark).withColumn("label", F.expr("if(id < 5, -1, label)"))
    model = estimator(loss=nn.CrossEntropyLoss(ignore_index=-1)).fit(rows)
    assert model.history[0].examples == 60


@pytest.mark.parametrize(
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
