"""Metrics of a model on the rows of a DataFrame, counted where the rows are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import torch
from pyspark import TaskContext
from pyspark.sql import DataFrame
from torch import Tensor

from sparkdl.errors import DataError
from sparkdl.events import MetricValue
from sparkdl.feed.decode import tensors_of
from sparkdl.feed.packed import unpacked
from sparkdl.metrics import Metrics
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference.predictor import Predictor
from sparkdl.spark.rows.columns import InputColumn
from sparkdl.spark.rows.packing import Source, packed_columns

MAX_STATES_BYTES = 256 << 20
"""Of what metrics have counted in one partition."""
_COUNTED = pa.schema([("partition", pa.int32()), ("states", pa.binary())])


@dataclass(frozen=True)
class Evaluation:
    """Counts the rows of one partition; sent to the executors.

    Attributes:
        predictor: the model; its output columns are not looked at.
        metrics: what to count.
        features: the tensors that the model takes.
        labels: those that the metrics take.
        as_one: whether the label is one tensor, else a tuple.
    """

    predictor: Predictor
    metrics: Metrics
    features: Sequence[ColumnSpec]
    labels: Sequence[ColumnSpec]
    as_one: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Count in a Spark task; gives one row if there is one."""
        rows = 0
        with self.predictor.running() as run:
            counted = self.metrics.begin(run.device)
            for batch in batches:
                rows += batch.num_rows
                if batch.num_rows:
                    columns = unpacked(batch).columns
                    count = len(self.features)
                    features = tensors_of(columns[:count], self.features)
                    labels = self._labels(columns[count:])
                    for start, outputs in run.outputs(features):
                        piece = slice(start, start + self.predictor.manner.batch_rows)
                        targets = tuple(label[piece].to(run.device) for label in labels)
                        counted.update(outputs, targets[0] if self.as_one else targets)
        if rows:
            context = TaskContext.get()
            assert context is not None
            yield _row(context.partitionId(), counted.states(), rows)

    def _labels(self, columns: Sequence[pa.Array]) -> list[Tensor]:
        # Class indices are looked at before they become whole numbers.
        indices = [spec.dtype is torch.int64 and not spec.is_array for spec in self.labels]
        wide = [
            replace(spec, dtype=torch.float64) if index else spec
            for spec, index in zip(self.labels, indices, strict=True)
        ]
        found = tensors_of(columns, wide)
        for spec, label, index in zip(self.labels, found, indices, strict=True):
            if index and not bool((label == label.round()).all()):
                raise DataError(
                    f"label column '{spec.name}' holds {label[label != label.round()][0]:g}, but "
                    "the model has classes 0, 1, ...: index the labels as those that it was "
                    "trained on"
                )
        return [label.to(spec.dtype) for spec, label in zip(self.labels, found, strict=True)]


def _row(partition: int, states: bytes, rows: int) -> pa.RecordBatch:
    if len(states) > MAX_STATES_BYTES:
        raise DataError(
            f"the metrics have counted {len(states)} bytes on the {rows} rows of partition "
            f"{partition}, and {MAX_STATES_BYTES} can go to the driver. Metrics that keep every "
            "score (AUROC, average precision) take a fixed size with thresholds=200"
        )
    return pa.RecordBatch.from_arrays(
        [pa.array([partition], pa.int32()), pa.array([states], pa.binary())], schema=_COUNTED
    )


def evaluate(
    evaluation: Evaluation, dataset: DataFrame, columns: Sequence[InputColumn]
) -> dict[str, MetricValue]:
    """Measure a model by one Spark job; no row leaves its executor.

    Args:
        evaluation: what to count.
        dataset: the rows.
        columns: the features' columns, then the labels'.

    Raises:
        DataError: there is no row.
        ModelError: a metric cannot be computed.
    """
    sources = [
        Source(f"c{index}", column.expression(), dataset.schema[column.name].dataType)
        for index, column in enumerate(columns)
    ]
    packed = packed_columns(sources, dataset.sparkSession)
    # The stubs want columns that SQL knows; these are as it made them.
    selected: Any = dataset.select(*(column.alias(name) for name, column in packed.items()))
    counted = selected.mapInArrow(evaluation, "partition int, states binary").collect()
    if not counted:
        raise DataError("the DataFrame has no rows to evaluate the model on")
    counted.sort(key=lambda row: row["partition"])
    return evaluation.metrics.measure([bytes(row["states"]) for row in counted])
