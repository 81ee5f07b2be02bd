"""What the data look like, found in one pass of plain Spark SQL before any worker starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparkdl.errors import DataError
from sparkdl.spark.columns import InputColumn

_ABSENT = {True: -117, False: -1.2345678e-30}
"""A number that is hardly ever in an array, by whether the column is integral: what it hides from
``_null_elements`` is still found by the worker that reads the row."""


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """What one pass over the rows found in one column.

    Attributes:
        column: which.
        nulls: rows that are null.
        null_elements: rows whose array holds a null.
        fractions: rows whose number is not whole.
        shortest: elements of the shortest array; None for scalars.
        longest: elements of the longest array; None for scalars.
        smallest: the smallest number; None for arrays of fractions, which are not looked into.
        largest: the largest number, NaN if there is one; None as above.
    """

    column: InputColumn
    nulls: int
    null_elements: int
    fractions: int
    shortest: int | None
    longest: int | None
    smallest: float | None
    largest: float | None


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What one pass over the rows found.

    Attributes:
        rows: number of rows.
        columns: facts of each column, in the order asked for.
        partition_rows: rows of each partition, if asked for.
    """

    rows: int
    columns: tuple[ColumnFacts, ...]
    partition_rows: tuple[int, ...]


def collect_facts(
    frame: DataFrame, columns: Sequence[InputColumn], num_partitions: int
) -> DataFacts:
    """Run the one aggregation that the checks need.

    Args:
        frame: the user's DataFrame.
        columns: the columns that will feed the model.
        num_partitions: how many partitions' rows to count, from the first on; 0 for none.
    """
    asked: dict[str, Column] = {"rows": F.count(F.lit(1))}
    for index, column in enumerate(columns):
        for name, expression in _expressions(column, F.col(f"c{index}")).items():
            asked[f"{name}_{index}"] = expression
    for partition in range(num_partitions):
        asked[f"partition_{partition}"] = F.count_if(F.col("partition") == partition)
    rows = frame.select(
        *[column.expression().alias(f"c{index}") for index, column in enumerate(columns)],
        F.spark_partition_id().alias("partition"),
    )
    found: dict[str, Any] = (
        rows.agg(*[expression.alias(name) for name, expression in asked.items()])
        .collect()[0]
        .asDict()
    )
    return DataFacts(
        rows=found["rows"],
        columns=tuple(_facts(column, index, found) for index, column in enumerate(columns)),
        partition_rows=tuple(found[f"partition_{p}"] for p in range(num_partitions)),
    )


def check_facts(facts: DataFacts, num_workers: int) -> None:
    """Refuse data that no worker could train on.

    Raises:
        DataError: no rows, fewer rows than workers, nulls, or arrays of unequal length.
    """
    if facts.rows == 0:
        raise DataError("the DataFrame is empty: there is nothing to train on")
    for column in facts.columns:
        name = column.column.name
        if column.nulls:
            raise DataError(
                f"column '{name}' has {column.nulls} null values in {facts.rows} rows. Drop or "
                "fill them first: df.na.drop(subset=[...]) / df.na.fill({...})"
            )
        if column.null_elements:
            raise DataError(
                f"column '{name}' has null elements inside its arrays in {column.null_elements} "
                f"of {facts.rows} rows. Fill them first, for example with "
                "F.transform(col, lambda x: F.coalesce(x, F.lit(0)))"
            )
        if column.shortest != column.longest:
            raise DataError(
                f"column '{name}' holds arrays of {column.shortest} to {column.longest} elements; "
                "every row must have the same number. Pad or cut them first, or find the odd rows "
                f"with df.groupBy(F.size('{name}')).count()"
            )
        if column.longest == 0:
            raise DataError(f"column '{name}' holds only empty arrays: there is nothing to feed")
    if facts.rows < num_workers:
        raise DataError(
            f"the DataFrame has {facts.rows} rows, fewer than the {num_workers} workers. "
            f"Set numWorkers to at most {facts.rows}"
        )


def _expressions(column: InputColumn, values: Column) -> dict[str, Column]:
    asked = {"nulls": F.count_if(values.isNull())}
    if column.is_array:
        asked["shortest"] = F.min(F.size(values))
        asked["longest"] = F.max(F.size(values))
        if column.may_hold_nulls:
            asked["null_elements"] = _null_elements(column, values)
        if column.integral:
            asked["smallest"] = F.min(F.array_min(values))
            asked["largest"] = F.max(F.array_max(values))
        return asked
    number = values.cast("int") if column.type_name == "boolean" else values
    asked["smallest"] = F.min(number)
    asked["largest"] = F.max(number)
    if not column.integral:
        asked["fractions"] = F.count_if(values != F.floor(values))
    return asked


def _null_elements(column: InputColumn, values: Column) -> Column:
    """Rows whose array holds a null.

    SQL's array_contains answers null, not false, if it did not find the number but met a null; it
    is compiled to a plain loop, ten times faster than a lambda called for each element.
    """
    absent = F.lit(_ABSENT[column.integral]).cast(column.element_type)
    return F.count_if(F.array_contains(values, absent).isNull() & values.isNotNull())


def _facts(column: InputColumn, index: int, found: dict[str, Any]) -> ColumnFacts:
    return ColumnFacts(
        column=column,
        nulls=found[f"nulls_{index}"],
        null_elements=found.get(f"null_elements_{index}", 0),
        fractions=found.get(f"fractions_{index}", 0),
        shortest=found.get(f"shortest_{index}"),
        longest=found.get(f"longest_{index}"),
        smallest=found.get(f"smallest_{index}"),
        largest=found.get(f"largest_{index}"),
    )
