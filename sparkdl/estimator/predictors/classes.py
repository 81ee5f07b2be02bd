"""The classes of a label column: what they are called, and the index of each.

Indexing is pyspark.ml's: a ``StringIndexerModel`` looks each label up in the JVM, where the rows
are read.
"""

from __future__ import annotations

from typing import Any

from pyspark.ml.feature import StringIndexerModel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.errors import ConfigError
from sparkdl.spark.rows.columns import quoted

Label = str | int | float | bool
_TEXT = "sparkdl: text of the label"
MAX_CLASSES = 10_000
"""Of a column of texts whose labels nobody has named: more is a column of something else."""


def labels(value: Any) -> list[Label] | None:
    """Check class labels in the order of the model's outputs.

    Raises:
        ConfigError: they are not different texts, or different numbers.
    """
    if value is None:
        return None
    found = list(value) if isinstance(value, (list, tuple)) else []
    texts = all(isinstance(each, str) for each in found)
    numbers = all(type(each) in (int, float) for each in found)
    if len(found) < 2 or len(set(found)) != len(found) or not (texts or numbers):
        raise ConfigError(
            "labels must be two or more different texts, or numbers, in the order of the model's "
            f"outputs, got {value!r:.200}"
        )
    return found


def labels_of(dataset: DataFrame, column: str) -> list[Label] | None:
    """What the classes of a label column are called; None for numbers that are their indices.

    StringIndexer has left that in the column's metadata. The texts of a column are looked at, by
    one Spark job.

    Raises:
        ConfigError: a column of texts has too few different ones, or too many.
    """
    field = _field(dataset, column)
    if field is None:
        return None
    named = field.metadata.get("ml_attr", {}).get("vals")
    if not isinstance(field.dataType, T.StringType):
        return list(named) if named else None
    rows = dataset.select(quoted(column).alias("label")).dropna().distinct()
    found = sorted(row["label"] for row in rows.limit(MAX_CLASSES + 1).collect())
    if not 2 <= len(found) <= MAX_CLASSES:
        count = f"more than {MAX_CLASSES}" if len(found) > MAX_CLASSES else len(found)
        raise ConfigError(
            f"label column '{column}' holds {count} different texts, and a classifier takes 2 to "
            f"{MAX_CLASSES} classes. Choose another labelCol"
        )
    return found


def indexed(dataset: DataFrame, column: str, classes: list[Label] | None) -> tuple[DataFrame, str]:
    """The rows with the index of each label, and the column that has it.

    Args:
        dataset: the rows.
        column: with the labels; itself if it has their indices.
        classes: their labels.
    """
    field = _field(dataset, column)
    if field is None or classes is None:
        return dataset, column
    texts = isinstance(field.dataType, T.StringType)
    if not texts and isinstance(classes[0], str):
        return dataset, column  # StringIndexer's own numbers
    # Errors about the column's values quote its name. An exception in the JVM would reach nobody.
    name = f"{column} (index among the labels; {len(classes)} is none of them)"
    wanted = quoted(column) if texts else quoted(column).cast("double").cast("string")
    names = [str(each) for each in classes]
    if not texts:  # as Spark writes them, not Python
        numbers = [
            F.lit(float(each)).cast("string").alias(f"l{i}") for i, each in enumerate(classes)
        ]
        names = list(dataset.sparkSession.range(1).select(*numbers).first() or ())
    lookup = StringIndexerModel.from_labels(names, _TEXT, name, handleInvalid="keep")
    return lookup.transform(dataset.withColumn(_TEXT, wanted)).drop(_TEXT), name


def with_names(dataset: DataFrame, column: str, classes: list[Label] | None) -> DataFrame:
    """Write in a column of indices what they stand for, where IndexToString looks for it."""
    if classes is None or not isinstance(classes[0], str):
        return dataset
    attributes = {"ml_attr": {"type": "nominal", "name": column, "vals": classes}}
    return dataset.withMetadata(column, attributes)


def _field(dataset: DataFrame, column: str) -> T.StructField | None:
    """The column, if it is there once; who misses it says so."""
    found = [field for field in dataset.schema.fields if field.name == column]
    return found[0] if len(found) == 1 else None
