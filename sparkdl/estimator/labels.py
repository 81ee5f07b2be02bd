"""The tensors to compare a model's outputs with, known from the training or from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from pyspark.sql import DataFrame

from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.head import Head
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.spark.rows.columns import InputColumn


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
