"""Batched inference in executors: Arrow in, Arrow out, one copy of the model a Python process."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import cloudpickle
import pyarrow as pa
import torch
from pyspark import Broadcast, SparkContext, TaskContext
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column
from pyspark.sql.pandas.functions import arrow_udf
from torch import Tensor, nn

from sparkdl.feed.columns import to_tensor
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.columns import InputColumn
from sparkdl.spark.devices import choose_device

ROWS_A_BATCH = 1024
"""Rows that go through the model at once; larger batches gain no speed and cost memory."""


OutputFunction = Callable[[Tensor], Tensor]
"""From a model's outputs to predictions."""


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model that every executor receives once.

    Attributes:
        key: names this model in the executors' Python processes.
        pickled: the nn.Module.
    """

    key: str
    pickled: Broadcast[bytes]


def share_model(module: nn.Module, context: SparkContext) -> SharedModel:
    """Send a model to the executors, once however many jobs use it."""
    return SharedModel(uuid.uuid4().hex, context.broadcast(cloudpickle.dumps(module)))


def prediction_column(
    model: SharedModel,
    columns: Sequence[InputColumn],
    specs: Sequence[ColumnSpec],
    output: OutputFunction,
    *,
    as_vector: bool,
) -> Column:
    """The column of predictions, to be added to the DataFrame that has ``columns``.

    Args:
        model: the model, shared with the executors.
        columns: the feature columns, in the order of the model's arguments.
        specs: the tensors that they become.
        output: from the model's outputs to predictions, shape (n,) or (n, k).
        as_vector: whether predictions are pyspark.ml vectors of k numbers, else doubles.
    """

    def predict(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        context = TaskContext.get()
        assert context is not None
        torch.set_num_threads(context.cpus())
        device = choose_device("auto", context)
        module = _load(model, device)
        with torch.inference_mode():
            for batch in batches:
                # Spark hands over a bare array if there is but one column.
                arrays = batch if isinstance(batch, tuple) else (batch,)
                features = [to_tensor(a, s) for a, s in zip(arrays, specs, strict=True)]
                yield _to_arrow(_forward(module, device, features, output), as_vector)

    # The stubs know iterators of one array, or of tuples, but not the two in one function.
    udf = arrow_udf(predict, "array<double>" if as_vector else "double")  # type: ignore[call-overload]
    precise = [spec.dtype is torch.float64 for spec in specs]
    predictions = udf(*[c.expression(precise=p) for c, p in zip(columns, precise, strict=True)])
    return array_to_vector(predictions) if as_vector else predictions


def _forward(
    module: nn.Module, device: str, features: list[Tensor], output: OutputFunction
) -> Tensor:
    rows = len(features[0])
    pieces = [
        output(module(*[f[start : start + ROWS_A_BATCH].to(device) for f in features])).cpu()
        for start in range(0, rows, ROWS_A_BATCH)
    ]
    return torch.cat(pieces).double() if pieces else torch.empty(0, dtype=torch.float64)


def _to_arrow(predictions: Tensor, as_vector: bool) -> pa.Array:
    flat = pa.array(predictions.reshape(-1).numpy())
    if not as_vector:
        return flat
    rows = len(predictions)
    width = predictions.shape[1] if predictions.dim() == 2 else 1
    offsets = pa.array(
        torch.arange(0, (rows + 1) * width, max(width, 1), dtype=torch.int32).numpy()
    )
    return pa.ListArray.from_arrays(offsets, flat)


_loaded: dict[tuple[str, str], nn.Module] = {}
"""The last model used in this Python process, by its key and device; Spark reuses the process."""


def _load(model: SharedModel, device: str) -> nn.Module:
    """The module on its device, unpickled once in this process for all of its tasks."""
    key = (model.key, device)
    if key not in _loaded:
        module: nn.Module = cloudpickle.loads(model.pickled.value)
        _loaded.clear()
        _loaded[key] = module.to(device).eval()
    return _loaded[key]
