"""Labels are looked up by Spark: what is not among the classes is named, whatever its type."""

from __future__ import annotations

from typing import Any

import pytest
from every_row import every
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sparkdl.errors import DataError
from sparkdl.estimator.labels import indexed, require_known, with_names


@every(
    ("sql", "labels", "shown", "in_spark"),
    [
        ("cast(0.1 as float)", [0.1, 0.2], "0.10000000149011612", "0.10000000149011612"),
        ("'c'", ["a", "b"], "'c'", "c"),
        ("'%s \\' `x`'", ["a", "b"], '"%s \' `x`"', "%s ' `x`"),
        ("cast(null as string)", ["a", "b"], "null", "null"),
        ("date'2021-03-04'", ["2020-01-01", "2020-01-02"], "'2021-03-04'", "2021-03-04"),
        ("3.50", [1, 2], "3.5", "3.5"),
        ("double('nan')", [1, 2], "nan", "NaN"),
    ],
)
def test_a_label_that_is_not_among_the_labels_is_named(
    spark: SparkSession, sql: str, labels: list[Any], shown: str, in_spark: str
) -> None:
    column = "the.label"
    rows = spark.range(3).selectExpr(f"{sql} as `{column}`", "id")
    told = f", which is not among labels={labels!r}"
    with_indices, index = indexed(rows, column, labels)
    with pytest.raises(DataError) as raised:
        require_known(with_indices, index, column, labels, ValueError("the cause"))
    assert f"label column '{column}' holds {shown}{told}. 3 rows" in str(raised.value)
    assert str(raised.value.__cause__) == "the cause"
    strictly, index = indexed(rows, column, labels, strict=True)
    with pytest.raises(PySparkException) as by_spark:
        strictly.select(f"`{index}`").collect()
    assert f"label column '{column}' holds {in_spark}{told}" in str(by_spark.value)


def test_labels_that_are_known_have_their_index(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("b",), ("a",)], ["x.y"])
    for strict in (False, True):
        found, index = indexed(rows, "x.y", ["a", "b"], strict=strict)
        assert [tuple(row) for row in found.collect()] == [("b", 1.0), ("a", 0.0)]
        require_known(found, index, "x.y", ["a", "b"], ValueError())


@every("name", ["a.b", "a`b", "*", "a b"])
def test_indices_get_their_names_whatever_the_column_is_called(
    spark: SparkSession, name: str
) -> None:
    rows = spark.createDataFrame([(1.0, "x")], [name, "other"])
    named = with_names(rows, name, ["no", "yes"])
    assert named.columns == [name, "other"]
    assert named.schema[name].metadata["ml_attr"]["vals"] == ["no", "yes"]
    assert tuple(named.collect()[0]) == (1.0, "x")
