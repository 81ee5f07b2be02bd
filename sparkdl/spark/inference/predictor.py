"""What an executor does with rows to predict for: outputs, and the loss of labelled rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import torch
from pyspark import TaskContext
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sparkdl.errors import DataError, ModelError
from sparkdl.feed.conversion import first_lost
from sparkdl.feed.decode import (
    refuse_lost,
    small_parts,
    tensors_of,
    valid_tensors,
)
from sparkdl.feed.schema import (
    Column,
    Ragged,
    cut,
    dense,
    inputs_described,
    model_inputs,
    order_by_length,
    picked,
)
from sparkdl.outputs import OutputKey, described, pick
from sparkdl.process.torch_settings import TorchSettings
from sparkdl.protocols import ColumnSpec, LossFunction, Targets
from sparkdl.replica import forward
from sparkdl.replica.loss_use import require_own_scores
from sparkdl.replica.losses import MinibatchLoss
from sparkdl.spark.cluster.devices import choose_device
from sparkdl.spark.inference.failures import as_model_error
from sparkdl.spark.inference.shared_model import SharedModel, loaded
from sparkdl.spark.launch.assignment import first_gpu


@dataclass(frozen=True)
class Labels:
    """The labels of rows as tensors.

    Attributes:
        specs: what the columns become.
        as_one: whether the loss takes one tensor rather than a tuple.
    """

    specs: Sequence[ColumnSpec]
    as_one: bool

    def tensors(self, columns: Sequence[pa.Array]) -> list[Tensor]:
        """Decode the label columns of some rows.

        Raises:
            DataError: one cannot become part of a tensor, or be an index although it must be.
        """
        # Padded ones have been refused before.
        found = [each for each in tensors_of(columns, self.specs) if isinstance(each, Tensor)]
        return [dense(label, spec) for spec, label in zip(self.specs, found, strict=True)]

    def targets(self, labels: Sequence[Tensor], start: int, rows: int, device: str) -> Targets:
        """Some of the labels, in the form that the loss takes."""
        cut = tuple(label[start : start + rows].to(device) for label in labels)
        return cut[0] if self.as_one else cut


@dataclass(frozen=True)
class Score:
    """Gives each row its loss.

    Attributes:
        loss: (outputs, targets) -> the mean; also by row, if it is one of torch's own.
        labels: of the rows.
    """

    loss: LossFunction
    labels: Labels

    def __call__(self, outputs: Any, targets: Targets, rows: int) -> Tensor:
        """The losses of some rows, shape (rows,), float64.

        Args:
            outputs: all that the model returned for them.
            targets: their labels.
            rows: how many.

        Raises:
            ModelError: the loss does not give one value per row.
        """
        device = (targets if isinstance(targets, Tensor) else targets[0]).device
        loss = self.loss.to(device) if isinstance(self.loss, torch.nn.Module) else self.loss
        try:
            require_own_scores(loss, outputs, targets, rows)
            return MinibatchLoss(loss).scores(outputs, targets, rows)
        except ModelError:
            raise
        except BaseException as error:  # the user's loss may raise anything
            raise as_model_error(
                f"the loss, for lossCol, fails on outputs {described(outputs)} and targets "
                f"{described(targets)}",
                error,
            ) from None


def not_of_one_output(output: Tensor) -> Tensor:
    """Stands in for a function of one output: the loss depends on all of them."""
    raise AssertionError


OutputFunction = Callable[[Tensor], Tensor]
"""Turns one of a model's outputs into predictions."""


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """One column of predictions.

    Attributes:
        name: the column's.
        key: which of the model's outputs it comes from; None for the only one.
        function: turns that output into predictions, shape (n,) or (n, k).
        wide: whether a prediction is k numbers rather than one.
    """

    name: str
    key: OutputKey | None
    function: OutputFunction
    wide: bool


@dataclass(frozen=True, slots=True)
class PredictionSettings:
    """How a model predicts.

    Attributes:
        batch_rows: the most rows that go through the model at once.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: of the model's floating-point parameters and features; None for their own.
        compiled: whether ``torch.compile`` is used.
        double: whether predictions become float64 rather than float32.
    """

    batch_rows: int
    device: str
    dtype: torch.dtype | None
    compiled: bool
    double: bool


@dataclass(frozen=True, slots=True)
class Predictor:
    """A model with everything that turns rows into predictions; it is sent to the executors.

    Attributes:
        model: as shared with them.
        outputs: the columns of predictions.
        names: of the features, if the model takes them by name; None for separate arguments.
        as_kwargs: whether names are keyword arguments rather than keys of one dict.
        prediction: how it predicts.
        settings: the driver's torch settings, which apply here too.
        score: a pickled ``Score`` for the last of ``outputs``, which is each row's loss; the rows
            then have labels after their features. None for none.
        skip_invalid: whether rows whose features cannot be used get nulls, rather than end the job.
    """

    model: SharedModel
    outputs: Sequence[OutputColumn]
    names: Sequence[str] | None
    as_kwargs: bool
    prediction: PredictionSettings
    settings: TorchSettings
    score: bytes | None = None
    skip_invalid: bool = False

    @property
    def fields(self) -> list[str]:
        """Names of the predictions, since the user's may not be valid in SQL."""
        return [f"p{index}" for index in range(len(self.outputs))]

    @property
    def sql_types(self) -> list[str]:
        """The SQL types of the predictions."""
        element = "double" if self.prediction.double else "float"
        return [f"array<{element}>" if each.wide else element for each in self.outputs]

    def predictions(
        self, batches: Iterator[tuple[Sequence[pa.Array], Sequence[ColumnSpec]]]
    ) -> Iterator[list[pa.Array]]:
        """Predict in a Spark task.

        Args:
            batches: the rows' feature columns in the order of the model's arguments, and the
                tensors that they become.

        Yields:
            The predictions by column, for one part of a batch after another.

        Raises:
            DataError: a row cannot become part of a tensor.
            ModelError: the model returns no such output.
        """
        with self.running() as run:
            score: Score | None = None if self.score is None else cloudpickle.loads(self.score)
            for batch, specs in batches:
                for columns in small_parts(batch, specs):
                    yield self._predicted(run, score, columns, specs)

    def _predicted(
        self,
        run: Running,
        score: Score | None,
        columns: Sequence[pa.Array],
        specs: Sequence[ColumnSpec],
    ) -> list[pa.Array]:
        """The predictions for some rows, by column."""
        count = len(columns) - (0 if score is None else len(score.labels.specs))
        features, valid = self.features(columns[:count], specs[:count])
        rest = columns[count:] if valid is None else only(columns[count:], valid)
        labels = [] if score is None else score.labels.tensors(rest)
        order = order_by_length(features)
        if order is not None:
            features = [picked(column, order) for column in features]
            labels = [label[order] for label in labels]
        pieces = []
        for start, outputs in run.outputs(features, specs[:count]):
            rows = min(self.prediction.batch_rows, len(features[0]) - start)
            piece = self._columns(outputs, rows)
            if score is not None:
                targets = score.labels.targets(labels, start, rows, run.device)
                if self.prediction.dtype is not None:  # of which the loss knows nothing
                    outputs = tree_map(_widened, outputs)
                piece.append(score(outputs, targets, rows).cpu())
            pieces.append(piece)
        predicted = [
            self._to_arrow([piece[index] for piece in pieces], each, order)
            for index, each in enumerate(self.outputs)
        ]
        if valid is None:
            return predicted
        places = pa.array(np.cumsum(valid) - 1, mask=~valid)
        return [each.take(places) for each in predicted]

    def features(
        self, columns: Sequence[pa.Array], specs: Sequence[ColumnSpec]
    ) -> tuple[list[Column], np.ndarray | None]:
        """The features of some rows as tensors.

        Args:
            columns: as Spark delivers them.
            specs: what they become.

        Returns:
            The tensors; and of which rows, shape (rows,), bool, or None for all.

        Raises:
            DataError: a row cannot become part of a tensor.
        """
        if self.skip_invalid:
            return valid_tensors(columns, specs)
        return tensors_of(columns, specs), None

    def as_taken(self, spec: ColumnSpec) -> ColumnSpec:
        """A feature, whose floats the model may take in another precision."""
        if spec.scale is None or self.prediction.dtype is None:
            return spec
        return replace(spec, scale=replace(spec.scale, dtype=self.prediction.dtype))

    @contextmanager
    def running(self) -> Iterator[Running]:
        """Keep the model ready in a Spark task, on the task's device."""
        context = TaskContext.get()
        assert context is not None
        device = choose_device(self.prediction.device, first_gpu(context), context.partitionId())
        model = loaded(
            self.model,
            device,
            self.prediction.dtype,
            self.settings,
            compiled=self.prediction.compiled,
        )
        # Not in inference mode, where a model cannot differentiate even within enable_grad.
        with self.settings.hold(context.cpus()), model as module, torch.no_grad():
            yield Running(self, module, device)

    def _columns(self, returned: Any, rows: int) -> list[Tensor]:
        """The predictions for some rows, by column."""
        predicted = self.outputs if self.score is None else self.outputs[:-1]
        picked = [pick(returned, each.key, rows) for each in predicted]
        picked = [_widened(each) for each in picked]
        return [each.function(output).cpu() for each, output in zip(predicted, picked, strict=True)]

    def _to_arrow(
        self, outputs: Sequence[Tensor], column: OutputColumn, order: Tensor | None
    ) -> pa.Array:
        widths = sorted({each[0].numel() for each in outputs})
        if len(widths) > 1:
            raise ModelError(
                f"the model returns {widths[0]} numbers per row for column '{column.name}' in one "
                f"minibatch and {widths[-1]} in another. A prediction column needs the same number "
                "in every row, so it must not depend on the rows: return a fixed number"
            )
        whole = torch.cat(list(outputs)) if outputs else torch.empty(0)
        if order is not None:
            whole = torch.empty_like(whole).index_copy_(0, order, whole)
        predictions = whole.to(torch.float64 if self.prediction.double else torch.float32)
        lost: int | None = None
        # Of all floats, float64 alone has numbers that float32 does not hold.
        if whole.dtype == torch.float64 and not self.prediction.double:
            lost = first_lost(whole.numpy(), torch.float32)
        elif not whole.is_floating_point() and whole.dtype.itemsize > 2:
            # Whole numbers may be ids, of which the nearest is another.
            changed = (predictions.to(whole.dtype) != whole).reshape(-1)
            lost = int(changed.int().argmax()) if changed.any() else None
        if lost is not None:
            own, dtype = (str(each.dtype).removeprefix("torch.") for each in (whole, predictions))
            way = "Set predictionDtype='float64'"
            if self.prediction.double:
                way = "Return such numbers in two parts"
            raise DataError(
                f"column '{column.name}' would hold {whole.reshape(-1)[lost].item()} ({own}), "
                f"which {dtype} cannot hold. {way}"
            )
        flat = pa.array(predictions.reshape(-1).numpy())
        if not column.wide:
            return flat
        rows = len(predictions)
        width = predictions.shape[1] if predictions.dim() == 2 else 1
        offsets = pa.array(
            torch.arange(0, (rows + 1) * width, max(width, 1), dtype=torch.int32).numpy()
        )
        return pa.ListArray.from_arrays(offsets, flat)


def _widened(output: Any) -> Any:
    """Half precision as float32, so that probabilities are not rounded again.

    Nothing else: float32 would change whole numbers, which may be ids, and float64.
    """
    half = isinstance(output, Tensor) and output.is_floating_point() and output.dtype.itemsize < 4
    return output.float() if half else output


def only(columns: Sequence[pa.Array], valid: np.ndarray) -> list[pa.Array]:
    """Some rows of columns: those for which ``valid``, shape (rows,), is true."""
    return [column.filter(pa.array(valid)) for column in columns]


@dataclass(frozen=True, slots=True)
class Running:
    """A model that predicts in this task.

    Attributes:
        predictor: what to do with the rows.
        module: the model.
        device: where it is.
    """

    predictor: Predictor
    module: nn.Module
    device: str

    def outputs(
        self, features: Sequence[Column], specs: Sequence[ColumnSpec]
    ) -> Iterator[tuple[int, Any]]:
        """What the model returns for some rows, as many at a time as go through it at once.

        Args:
            features: in the order of the model's arguments, all of equally many rows.
            specs: what they are.

        Yields:
            The position of the first row, and what was returned.
        """
        predictor, rows = self.predictor, len(features[0])
        taken = [predictor.as_taken(spec) for spec in specs]
        starts = range(0, rows, predictor.prediction.batch_rows)
        sizes = [min(predictor.prediction.batch_rows, rows - start) for start in starts]
        pieces = zip(*(cut(column, sizes) for column in features), strict=True)
        for start, piece in zip(starts, pieces, strict=True):
            moved = list(map(self._moved, piece, specs))
            given = model_inputs(moved, taken, by_name=predictor.names is not None)
            try:
                returned = forward(self.module, given, as_kwargs=predictor.as_kwargs)
            except BaseException as error:  # the user's forward may raise anything
                raise as_model_error(
                    f"the model {type(self.module).__name__} fails on {len(moved[0])} rows "
                    f"({inputs_described(given, specs)})",
                    error,
                ) from None
            yield start, returned

    def _moved(self, column: Column, spec: ColumnSpec) -> Column:
        values = column.values if isinstance(column, Ragged) else column
        dtype = self.predictor.prediction.dtype if values.is_floating_point() else None
        if dtype is not None:
            numbers = (values if values.element_size() > 2 else values.float()).numpy()
            if (lost := first_lost(numbers, dtype)) is not None:
                refuse_lost(
                    numbers.reshape(-1)[lost], replace(spec, dtype=dtype), "(predictPrecision)"
                )
        moved = values.to(self.device, dtype)
        return Ragged(moved, column.lengths) if isinstance(column, Ragged) else moved
