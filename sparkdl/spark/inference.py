"""Batched inference in executors: Arrow in, Arrow out, one copy of the model a Python process."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import pyarrow as pa
import torch
from pyspark import Broadcast, SparkContext, TaskContext
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame
from pyspark.sql.pandas.functions import arrow_udf
from torch import Tensor, nn

from sparkdl.checkpoint.portable import pickled_module
from sparkdl.feed.decode import tensors_of
from sparkdl.feed.packed import unpacked
from sparkdl.missing_modules import advice
from sparkdl.outputs import OutputKey, pick
from sparkdl.protocols import ColumnSpec, Features
from sparkdl.replica import forward
from sparkdl.spark.cluster.devices import choose_device
from sparkdl.spark.launch.assignment import first_gpu
from sparkdl.spark.modules.arrival import arrive, importable
from sparkdl.spark.modules.shipping import Shipment, ship
from sparkdl.spark.rows.columns import InputColumn
from sparkdl.spark.rows.packing import Source, packed_columns
from sparkdl.torch_settings import TorchSettings

ROWS_A_BATCH = 1024
"""Rows that go through the model at once; larger batches gain no speed and cost memory."""


OutputFunction = Callable[[Tensor], Tensor]
"""From one of a model's outputs to predictions."""


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """One column of predictions.

    Attributes:
        name: the column's.
        key: which of the model's outputs it is of; None for the only one.
        function: from that output to predictions, shape (n,) or (n, k).
        as_vector: whether predictions are pyspark.ml vectors of k numbers, else doubles.
    """

    name: str
    key: OutputKey | None
    function: OutputFunction
    as_vector: bool


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model that every executor receives once.

    Attributes:
        key: names it in the executors' Python processes: the hash of what was pickled.
        pickled: the nn.Module; see ``checkpoint.portable``.
        shipment: modules of the user's own that it needs.
    """

    key: str
    pickled: Broadcast[bytes]
    shipment: Shipment | None


class ModelSharing:
    """Sends a model to the executors, once for as long as nothing about it changes."""

    def __init__(self) -> None:
        self._last: tuple[SparkContext, SharedModel] | None = None

    def share(
        self, module: nn.Module, builder: Any, context: SparkContext, *, ship_modules: bool
    ) -> SharedModel:
        """Send a model as it is now, unless this application's executors have it.

        Args:
            module: it may have been trained further, or be another one than before.
            builder: what has built it.
            context: of the application, which may be another one than before.
            ship_modules: whether modules of the user's own are sent with it.

        Raises:
            ModelError: it cannot be pickled.
            ConfigError: a module's text has changed since it was imported.
        """
        names: set[str] = set()
        pickled = pickled_module(module, builder, names)
        shipment = ship(names, context) if ship_modules else None
        digest = hashlib.sha256(pickled)
        digest.update(b"" if shipment is None else shipment.digest.encode())
        key = digest.hexdigest()
        if self._last is not None:
            known, shared = self._last
            if known is context and shared.key == key:
                return shared
        shared = SharedModel(key, context.broadcast(pickled), shipment)
        self._last = context, shared
        return shared


def readable(dataset: DataFrame, column: InputColumn) -> DataFrame:
    """The same rows, such that Spark can hand them to a Python function.

    Spark 4.3 cannot take columns of user-defined types, like pyspark.ml's vectors, from a columnar
    file past a Python function (UNSUPPORTED_DATATYPE). A filter makes rows of them first.

    Args:
        dataset: any DataFrame.
        column: one of its columns.
    """
    if '"type":"udt"' not in dataset.schema.json():
        return dataset
    value = column.expression()
    return dataset.where(value.isNull() | value.isNotNull())


def prediction_columns(
    model: SharedModel,
    dataset: DataFrame,
    columns: Sequence[InputColumn],
    specs: Sequence[ColumnSpec],
    outputs: Sequence[OutputColumn],
    *,
    by_name: bool,
    as_kwargs: bool,
) -> dict[str, Column]:
    """The columns of predictions by name; the model runs once for all of them.

    Args:
        model: the model, shared with the executors.
        dataset: the DataFrame to which it is to be added.
        columns: the feature columns, in the order of the model's arguments.
        specs: the tensors that they become.
        outputs: what is to become a column.
        by_name: whether the model takes its features by name, as one dict.
        as_kwargs: whether as keyword arguments instead.
    """
    names = [spec.name for spec in specs] if by_name else None
    sources = [
        Source(f"c{index}", column.expression(), dataset.schema[column.name].dataType)
        for index, column in enumerate(columns)
    ]
    inputs = packed_columns(sources, dataset.sparkSession)
    input_names = list(inputs)
    settings = TorchSettings.here()

    def predict(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        context = TaskContext.get()
        assert context is not None
        torch.set_num_threads(context.cpus())
        device = choose_device("auto", first_gpu(context), context.partitionId())
        # Not in inference mode, in which a model cannot differentiate even within enable_grad.
        with _loaded_model(model, device, settings) as module, settings.hold(), torch.no_grad():
            for batch in batches:
                # Spark hands over a bare array if there is but one column.
                arrays = batch if isinstance(batch, tuple) else (batch,)
                rows = unpacked(pa.RecordBatch.from_arrays(list(arrays), names=input_names))
                features = tensors_of(rows.columns, specs)
                pieces = [
                    _predict(module, piece, outputs, as_kwargs=as_kwargs)
                    for piece in _pieces(features, names, device)
                ]
                predicted = [
                    _to_arrow([piece[index] for piece in pieces], each.as_vector)
                    for index, each in enumerate(outputs)
                ]
                yield pa.StructArray.from_arrays(predicted, names=fields)

    # As the user calls them, they could contain whatever a type's text may not.
    fields = [f"p{index}" for index in range(len(outputs))]
    types = [
        f"{field} {'array<double>' if each.as_vector else 'double'}"
        for field, each in zip(fields, outputs, strict=True)
    ]
    # The stubs know iterators of one array, or of tuples, but not the two in one function.
    udf = arrow_udf(predict, f"struct<{', '.join(types)}>")  # type: ignore[call-overload]
    predictions = udf(*inputs.values())
    return {
        each.name: array_to_vector(predictions[field]) if each.as_vector else predictions[field]
        for field, each in zip(fields, outputs, strict=True)
    }


def _predict(
    module: nn.Module, piece: Features, outputs: Sequence[OutputColumn], *, as_kwargs: bool
) -> list[Tensor]:
    """The predictions for some rows, by column."""
    first = next(iter(piece.values() if isinstance(piece, dict) else piece))
    returned = forward(module, piece, as_kwargs=as_kwargs)
    return [each.function(pick(returned, each.key, len(first))).cpu() for each in outputs]


def _pieces(features: list[Tensor], names: Sequence[str] | None, device: str) -> Iterator[Features]:
    for start in range(0, len(features[0]), ROWS_A_BATCH):
        cut = [feature[start : start + ROWS_A_BATCH].to(device) for feature in features]
        yield tuple(cut) if names is None else dict(zip(names, cut, strict=True))


def _to_arrow(outputs: Sequence[Tensor], as_vector: bool) -> pa.Array:
    predictions = torch.cat(list(outputs)).double() if outputs else torch.empty(0).double()
    flat = pa.array(predictions.reshape(-1).numpy())
    if not as_vector:
        return flat
    rows = len(predictions)
    width = predictions.shape[1] if predictions.dim() == 2 else 1
    offsets = pa.array(
        torch.arange(0, (rows + 1) * width, max(width, 1), dtype=torch.int32).numpy()
    )
    return pa.ListArray.from_arrays(offsets, flat)


class _Loaded(NamedTuple):
    """A model in this Python process, which Spark uses again, with what it has imported."""

    key: tuple[str, str]
    module: nn.Module
    imported: dict[str, types.ModuleType]


_last: _Loaded | None = None
"""The last model that this process has used."""


@contextmanager
def _loaded_model(model: SharedModel, device: str, settings: TorchSettings) -> Iterator[nn.Module]:
    """The module on its device, unpickled once in this process for all of its tasks."""
    global _last
    key = (model.key, device)
    imported = _last.imported if _last is not None and _last.key == key else {}
    with importable(arrive(model.shipment), imported):
        try:
            if _last is None or _last.key != key:
                _last = None  # never two of them
                with settings.hold():  # it may have to be built again
                    module: nn.Module = cloudpickle.loads(model.pickled.value)
                _last = _Loaded(key, module.to(device).eval(), imported)
            yield _last.module
        except ModuleNotFoundError as error:
            error.add_note(advice(error))
            raise
