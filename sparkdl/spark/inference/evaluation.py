"""Metrics of a model on the rows of a DataFrame, counted where the rows are."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import cloudpickle
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from torch import Tensor

from sparkdl.errors import DataError
from sparkdl.events import MetricValue
from sparkdl.feed.decode import small_parts, tensors_of
from sparkdl.feed.packed import unpacked
from sparkdl.metrics import Metrics
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference.failures import told_in_driver
from sparkdl.spark.inference.predictor import Labels, Predictor, only
from sparkdl.spark.launch.environments import checked
from sparkdl.spark.rows.columns import InputColumn
from sparkdl.spark.rows.packing import packed

logger = logging.getLogger(__name__)

MAX_STATES_BYTES = 256 << 20
"""The most bytes of what metrics have counted in one partition."""
_COUNTED = pa.schema(
    [
        ("partition", pa.int32()),
        ("states", pa.binary()),
        ("rows", pa.int64()),
        ("skipped", pa.int64()),
    ]
)


def count_rows(
    predictor: Predictor,
    pickled: bytes,
    specs: Sequence[ColumnSpec],
    labels: Labels,
    weight: ColumnSpec | None,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Count the rows of one partition in a Spark task.

    Args:
        predictor: the model; its output columns are ignored.
        pickled: a ``Metrics``.
        specs: the tensors that the model takes.
        labels: those that the metrics take.
        weight: what the column that says how much each row counts becomes; None without one.
        batches: the rows, packed.

    Yields:
        One row, unless the partition is empty.
    """
    rows, skipped, count = 0, 0, len(specs)
    with predictor.running() as run:
        metrics: Metrics = cloudpickle.loads(pickled)
        counted = metrics.begin(run.device)
        parts = (unpacked(batch).columns for batch in filter(len, batches))
        for columns in (part for whole in parts for part in small_parts(whole, specs)):
            features, valid = predictor.features(columns[:count], specs)
            rows += len(features[0])
            skipped += len(columns[0]) - len(features[0])
            if valid is not None:
                columns = [*columns[:count], *only(columns[count:], valid)]
            weights = None if weight is None else _weights(columns.pop(), weight)
            decoded = labels.tensors(columns[count:])
            most = predictor.prediction.batch_rows
            for start, outputs in run.outputs(features, specs):
                targets = labels.targets(decoded, start, most, run.device)
                cut = None if weights is None else weights[start : start + most].to(run.device)
                counted.update(outputs, targets, cut)
        states = counted.states()
    if rows or skipped:
        context = TaskContext.get()
        assert context is not None
        yield _row(context.partitionId(), states if rows else None, rows, skipped)


def _weights(column: pa.Array, spec: ColumnSpec) -> Tensor:
    """How much each row counts, shape (n,), float32.

    Raises:
        DataError: it is below 0, or out of the range of float32.
    """
    (weights,) = tensors_of([column], [spec])
    assert isinstance(weights, Tensor)
    wrong = weights[~(weights >= 0) | weights.isinf()]
    if len(wrong):
        raise DataError(f"weight column '{spec.name}' holds {wrong[0]:g}; weights are numbers >= 0")
    narrow = weights.float()
    lost = weights[narrow.isinf() | ((narrow == 0) & (weights > 0))]
    if len(lost):
        raise DataError(
            f"weight column '{spec.name}' holds {lost[0]:g}, which is out of the range of float32, "
            "in which metrics take weights. Scale the weights first"
        )
    return narrow


def _row(partition: int, states: bytes | None, rows: int, skipped: int) -> pa.RecordBatch:
    if len(states or b"") > MAX_STATES_BYTES:
        raise DataError(
            f"the metrics hold {len(states or b'')} bytes after the {rows} rows of partition "
            f"{partition}, and at most {MAX_STATES_BYTES} can go to the driver. Metrics that "
            "keep every score (AUROC, average precision) have a fixed size with thresholds=200"
        )
    values = {"partition": partition, "states": states, "rows": rows, "skipped": skipped}
    return pa.RecordBatch.from_pylist([values], schema=_COUNTED)


def evaluate(
    counts: partial[Iterator[pa.RecordBatch]],
    metrics: Metrics,
    dataset: DataFrame,
    columns: Sequence[InputColumn],
) -> dict[str, MetricValue]:
    """Measure a model by one Spark job; no row leaves its executor.

    Args:
        counts: ``count_rows`` with all but the rows.
        metrics: the same metrics, to be computed here.
        dataset: the rows.
        columns: the features' columns, then the labels', then the weights' if there is one.

    Raises:
        DataError: there is no row, or one cannot become part of a tensor.
        ModelError: the model fails, or a metric cannot be computed.
    """
    selected = packed(
        dataset.select(*(each.expression().alias(f"c{i}") for i, each in enumerate(columns)))
    )
    with told_in_driver():
        schema = "partition int, states binary, rows bigint, skipped bigint"
        counted = selected.mapInArrow(checked(counts), schema).collect()
    skipped, rows = (sum(row[name] for row in counted) for name in ("skipped", "rows"))
    told = f"handleInvalid='skip' left out {skipped} of {skipped + rows} rows"
    if not rows:
        why = f": {told}" if skipped else ""
        raise DataError(f"the DataFrame has no rows to evaluate the model on{why}")
    if skipped:
        logger.warning("%s, whose features cannot be used", told)
    counted.sort(key=lambda row: row["partition"])
    return metrics.measure([bytes(row["states"]) for row in counted if row["rows"]])
