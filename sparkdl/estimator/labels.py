"""Labels: the classes of a label column, the index of each, and the tensors that they become.

pyspark.ml does the indexing: a ``StringIndexerModel`` looks up each label in the JVM, where the
rows are read.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
import torch
from pyspark.ml.feature import StringIndexerModel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.arguments import counted
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.head import Head
from sparkdl.estimator.params.converters import INSTANTS, Label
from sparkdl.feed.decode import in_sql
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.spark.catalyst.versions import frame_of
from sparkdl.spark.rows.columns import InputColumn, quoted

_TEXT, _INDEX = "sparkdl: text of the label", "sparkdl: index of the label"
_OF_BYTES = "UTF8_BINARY"
"""The collation by which only texts of the same bytes are equal, and that of texts in Spark 3."""
MAX_CLASSES = 10_000
"""The most in a column of texts whose labels nobody has named: more are not classes."""


def labels_of(dataset: DataFrame, column: str) -> list[Label] | None:
    """The labels of a label column's classes; None for numbers that are their indices.

    StringIndexer leaves them in the column's metadata. Otherwise one Spark job collects the texts
    or dates of the column.

    Raises:
        ConfigError: a column of texts has too few distinct ones, or too many.
        DataError: the column holds points in time, or texts of which several are one to Spark.
    """
    field = _field(dataset, column)
    if field is None:
        return None
    if isinstance(field.dataType, T.TimestampType | T.TimestampNTZType):
        raise DataError(f"label column '{column}' holds timestamps: {INSTANTS}")
    named = field.metadata.get("ml_attr", {}).get("vals")
    if not _is_text(field):
        return list(named) if named else None
    collation = getattr(field.dataType, "collation", _OF_BYTES)
    if collation != _OF_BYTES:
        raise DataError(
            f"label column '{column}' has the collation {collation}, by which texts that differ "
            "may be equal, but each would be a class of its own. Make equal ones the same and "
            f"leave the collation out, for example CAST(lower({in_sql(column)}) AS STRING), or "
            "set labels"
        )
    rows = dataset.select(quoted(column).cast("string").alias("label")).dropna().distinct()
    found = sorted(row["label"] for row in rows.limit(MAX_CLASSES + 1).collect())
    if not 2 <= len(found) <= MAX_CLASSES:
        count = f"more than {MAX_CLASSES}" if len(found) > MAX_CLASSES else len(found)
        what = "strings" if isinstance(field.dataType, T.StringType) else "dates"
        raise ConfigError(
            f"label column '{column}' holds {count} different {what}, but a classifier takes 2 to "
            f"{MAX_CLASSES} classes. Choose another labelCol"
        )
    return found


def indexed(
    dataset: DataFrame, column: str, classes: list[Label] | None, *, strict: bool = False
) -> tuple[DataFrame, str]:
    """The rows with the index of each label, and the column that has it.

    Args:
        dataset: the rows.
        column: the one with the labels; returned itself if it has their indices.
        classes: their labels.
        strict: whether Spark raises an error for another label. Else its index is one more than the
            last: in a training, nobody would see what Spark says.

    Raises:
        ConfigError: the labels are texts, and the column booleans: which is true?
        DataError: the column has indices of the same texts in another order.
    """
    field = _field(dataset, column)
    if field is None or classes is None:
        return dataset, column
    texts = _is_text(field)
    if isinstance(field.dataType, T.BooleanType) and isinstance(classes[0], str):
        raise ConfigError(
            f"label column '{column}' holds booleans, but labels are strings: {classes!r:.200}. "
            "Set labels=[False, True] or [True, False], in the order of the model's outputs, or "
            "drop labels for the first of these"
        )
    if not texts and isinstance(classes[0], str):
        _require_same_indices(field, classes)
        return dataset, column  # StringIndexer's own numbers
    name = f"{column} (index into the labels)"  # errors about the column's values quote it
    wanted = quoted(column) if texts else quoted(column).cast("double")
    names = [str(each) for each in classes]
    if not texts:  # written as Spark does, not as Python does
        # Of one row: Spark takes minutes for thousands of columns.
        numbers = frame_of(dataset.sparkSession, pa.table({"l": [list(map(float, classes))]}))
        ((names,),) = numbers.select(F.col("l").cast("array<string>")).collect()
    lookup = StringIndexerModel.from_labels(names, _TEXT, _INDEX, handleInvalid="keep")
    found = lookup.transform(dataset.withColumn(_TEXT, wanted.cast("string")))
    index = F.col(f"`{_INDEX}`")
    if strict:
        text = F.coalesce(F.col(f"`{_TEXT}`"), F.lit("null"))
        told = F.concat(F.lit(_holds(column)), text, F.lit(_not_among(classes)))
        index = F.when(index < len(classes), index).otherwise(F.raise_error(told).cast("double"))
    return found.withColumn(name, index).drop(_TEXT, _INDEX), name


def _require_same_indices(field: T.StructField, classes: list[Label]) -> None:
    """Refuse indices of a StringIndexer that was fitted to other rows: it sorts by frequency."""
    for index, text, place in _moved(field.metadata.get("ml_attr", {}).get("vals"), classes):
        raise DataError(
            f"{_holds(field.name)}{index} for {text!r}, as its metadata says, but that is class "
            f"{place} of labels={classes!r:.200}. Index all rows with one StringIndexerModel, or "
            "set labelCol to the column of texts"
        )


def require_outputs_of(
    column: str, classes: list[Label] | None, trained: list[Label] | None
) -> None:
    """Refuse to start from a model whose outputs stand for the same labels in another order.

    Args:
        column: the one with the labels.
        classes: their labels.
        trained: those of the model that a training starts from.

    Raises:
        ConfigError: a label has another place among them.
    """
    for index, label, place in _moved(classes, trained):
        raise ConfigError(
            f"{label!r} is class {index} of label column '{column}', but class {place} of "
            f"warm_start, whose labels are {trained!r:.200}: the training would start from the "
            "output of another class. Set labels=warm_start.getLabels(); if the column holds "
            "indices, make them with the StringIndexerModel of the earlier training"
        )


def _moved(
    labels: Sequence[Label] | None, others: Sequence[Label] | None
) -> Iterator[tuple[int, Label, int]]:
    """Labels that have another place among others: place, label and other place."""
    places = {label: place for place, label in enumerate(others or ())}
    for place, label in enumerate(labels or ()):
        if places.get(label, place) != place:
            yield place, label, places[label]


def require_known(
    indices: DataFrame, index: str, column: str, classes: list[Label] | None, cause: Exception
) -> None:
    """Once something has failed, find out whether a label is not among the classes; a Spark job.

    Args:
        indices: the rows with their indices, as ``indexed`` returned them.
        index: the one that has them.
        column: the one with the labels.
        classes: their labels.
        cause: what has failed.

    Raises:
        DataError: there is such a label.
    """
    if classes is None or index == column:
        return
    others = indices.where(quoted(index) >= len(classes))
    field = _field(indices, column)
    label = quoted(column) if field is None or _is_text(field) else quoted(column).cast("double")
    row = others.agg(F.count(F.lit(1)), F.min(label)).first()
    if row is None or not row[0]:
        return
    value = row[1].isoformat() if isinstance(row[1], datetime.date) else row[1]
    shown = "null" if value is None else repr(value)
    raise DataError(
        f"{_holds(column)}{shown}{_not_among(classes)}. {counted(row[0], 'row')} had no known "
        "label: drop them first, or give labels and the model one class more"
    ) from cause


def _holds(column: str) -> str:
    return f"label column '{column}' holds "


def _not_among(classes: list[Label]) -> str:
    return f", which is not among labels={classes!r:.200}"


def with_names(indices: Column, name: str, classes: list[Label] | None) -> Column:
    """A column of indices with what they stand for, where IndexToString looks for it."""
    if classes is None or not isinstance(classes[0], str):
        return indices.alias(name)
    attributes = {"ml_attr": {"type": "nominal", "name": name, "vals": classes}}
    return indices.alias(name, metadata=attributes)


def _is_text(field: T.StructField) -> bool:
    """Whether the labels of a column are looked up by their text."""
    return isinstance(field.dataType, T.StringType | T.DateType)


def _field(dataset: DataFrame, column: str) -> T.StructField | None:
    """The column, if it is there exactly once; whoever needs it reports if it is not."""
    found = [field for field in dataset.schema.fields if field.name == column]
    return found[0] if len(found) == 1 else None


def label_tensors(
    dataset: DataFrame, columns: Sequence[InputColumn], trained: Sequence[ColumnSpec], head: Head
) -> list[ColumnSpec]:
    """What the label columns of a DataFrame become.

    Args:
        dataset: the rows; the first one tells the length of arrays if nothing else does.
        columns: the label columns.
        trained: what the model was trained with; empty for one trained elsewhere.
        head: what the outputs mean.

    Raises:
        ConfigError: there are more or fewer than the model was trained with.
        DataError: the rows do not show how long their arrays are.
    """
    if trained and len(trained) != len(columns):
        raise ConfigError(
            f"the model was trained with {len(trained)} label columns "
            f"({', '.join(each.name for each in trained)}), but {len(columns)} are named: "
            f"{', '.join(each.name for each in columns)}. Set labelCol, or labelCols"
        )
    padded = [known.name for known in trained if known.padding is not None]
    if padded:
        raise ConfigError(
            f"the model was trained with padded labels ('{padded[0]}'), so rows can be neither "
            "measured nor scored: only the loss knows how to treat their padding. Compute it from "
            "the columns that transform adds"
        )
    if trained:
        return [column.as_trained(known) for column, known in zip(columns, trained, strict=True)]
    return [_from_rows(dataset, column, head) for column in columns]


def _from_rows(dataset: DataFrame, column: InputColumn, head: Head) -> ColumnSpec:
    scalar = column.dimensions == 0
    indices = head.takes_class_index and scalar
    dtype = torch.int64 if indices else column.tensor_dtype(torch.float32)
    spec = column.spec(dtype)
    if spec.row_shape != (UNKNOWN,):
        return spec
    first = dataset.select(column.expression().alias("label")).dropna().first()
    if first is None:
        raise DataError(f"label column '{column.name}' has no value in any row")
    return replace(spec, row_shape=(len(first[0]),))
