"""Everything that can be found wrong without training, found before training."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from pyspark import InheritableThread
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.driver import as_builder
from sparkdl.errors import DataError
from sparkdl.estimator.head import Head, head_of, output_function
from sparkdl.estimator.params import EstimatorParams
from sparkdl.estimator.probe import build, probe
from sparkdl.estimator.shipping import require_picklable
from sparkdl.feed.columns import FeedSchema
from sparkdl.protocols import ColumnSpec, LossFunction
from sparkdl.spark.checks import ColumnFacts, DataFacts, check_facts, collect_facts
from sparkdl.spark.columns import input_column
from sparkdl.spark.launcher import Workers
from sparkdl.spark.partitions import known_partitions
from sparkdl.spark.session import require_classic_session
from sparkdl.spark.slots import choose_num_workers
from sparkdl.worker import Job

T = TypeVar("T")


@dataclass(frozen=True)
class Preflight:
    """What a fit needs once everything is checked.

    Attributes:
        job: what every worker trains.
        workers: where and on which rows.
        head: what the model's outputs mean.
        output_width: numbers a row that the model gives; None for one without a dimension of
            its own.
        rows: rows of the DataFrame.
    """

    job: Job
    workers: Workers
    head: Head
    output_width: int | None
    rows: int


def preflight(params: EstimatorParams, frame: DataFrame) -> Preflight:
    """Check a fit's Params against the data and the cluster.

    Args:
        params: the estimator.
        frame: the DataFrame to fit.

    Raises:
        ConfigError: more workers than slots.
        DataError: columns, types or values do not fit.
        ModelError: the model, loss or optimizer cannot be shipped or fails on a batch.
    """
    require_classic_session(frame)
    features = tuple(
        input_column(frame, name, "featuresCols" if params.getFeaturesCols() else "featuresCol")
        for name in params.feature_columns()
    )
    label = input_column(frame, params.getLabelCol(), "labelCol")
    num_workers = choose_num_workers(frame.sparkSession, params.getNumWorkers())
    partitions = known_partitions(frame)
    counted = num_workers if partitions == num_workers else 0
    # The pass over the data runs in the JVM while this thread pickles and imports.
    facts_wanted = _in_background(lambda: collect_facts(frame, (*features, label), counted))
    for name in ("model", "loss", "optimizer", "strategy"):
        require_picklable(name, params.getOrDefault(name))
    builder = as_builder(params.getModel())
    replica = build(builder, params.getOptimizer(), params.getLoss(), params.getSeed())
    fractions = _parameter_dtype(replica.module)
    facts = facts_wanted.result()
    check_facts(facts, num_workers)
    *feature_facts, label_facts = facts.columns
    _refuse_nan_labels(label_facts)
    head = head_of(params.getLoss())
    schema = FeedSchema(
        tuple(_spec(f, f.column.tensor_dtype(fractions)) for f in feature_facts),
        _spec(label_facts, _target_dtype(label_facts, params.getLoss(), head, fractions)),
    )
    outputs = probe(replica, schema, feature_facts, label_facts, head)
    job = Job(
        model=builder,
        loss=params.getLoss(),
        optimizer=params.getOptimizer(),
        strategy=params.getStrategy(),
        schema=schema,
        epochs=params.getEpochs(),
        batch_size=params.getBatchSize(),
        seed=params.getSeed(),
        deadline_s=params.getTimeout(),
    )
    workers = Workers(
        frame=frame,
        columns=(*features, label),
        num_workers=num_workers,
        repartition=not _balanced(facts),
        precise=fractions is torch.float64,
        device=params.getDevice(),
        description=_describe(params, num_workers),
    )
    width = None if outputs.dim() == 1 else outputs[0].numel()
    output_function(params.getOutputType(), head, width)
    return Preflight(job, workers, head, width, facts.rows)


def _refuse_nan_labels(label: ColumnFacts) -> None:
    # SQL takes NaN for the largest of all numbers.
    if label.largest is not None and math.isnan(label.largest):
        raise DataError(
            f"label column '{label.column.name}' holds NaN (not a number), which no loss can learn "
            f"from. Drop those rows first: df.where(~F.isnan('{label.column.name}'))"
        )


def _balanced(facts: DataFacts) -> bool:
    """Whether the partitions are as they should be: one a worker, equal to within 1 %."""
    rows = facts.partition_rows
    return bool(rows) and sum(rows) == facts.rows and max(rows) <= 1.01 * min(rows) + 1


def _spec(facts: ColumnFacts, dtype: torch.dtype) -> ColumnSpec:
    return ColumnSpec(facts.column.name, dtype, facts.longest)


def _target_dtype(
    label: ColumnFacts, loss: LossFunction, head: Head, fractions: torch.dtype
) -> torch.dtype:
    """The dtype that the loss takes targets in; for a loss that is not torch's, the column's."""
    column = label.column
    if head.takes_class_index and not column.is_array:
        if label.fractions:
            raise DataError(
                f"label column '{column.name}' ({column.type_name}) holds {label.fractions} "
                f"numbers that are not whole, but {_name(loss)} takes class indices 0, 1, .... "
                "Index the classes with pyspark.ml.feature.StringIndexer, or use a regression loss"
            )
        return torch.int64
    of_torch = isinstance(loss, nn.modules.loss._Loss) or head is not Head.UNKNOWN
    if of_torch and not head.takes_class_index:
        return fractions
    return column.tensor_dtype(fractions)


def _parameter_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of the model's parameters: fractions are fed in the same."""
    dtypes = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(dtypes, torch.float32)


def _describe(params: EstimatorParams, num_workers: int) -> str:
    model = _name(params.getModel())
    strategy = re.sub(r"\s+", " ", repr(params.getStrategy()))
    return f"sparkdl: train {model} on {num_workers} workers, {strategy}"


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _in_background(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # handed to whoever asks for the result
            future.set_exception(error)

    thread: threading.Thread = InheritableThread(target=run, name="sparkdl-checks", daemon=True)
    thread.start()
    return future
