"""One training step in the driver on a made-up batch, before any worker takes its first.

The batch has two rows: the smallest and the largest value of every column. An embedding too small,
a label out of range, a wrong width or a loss that needs another dtype all show here, in a second.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.arguments import counted
from sparkdl.errors import DataError, ModelError
from sparkdl.estimator.checks.hints import fail, how_called, what_padding_adds, which_param_helps
from sparkdl.estimator.head import Head
from sparkdl.feed.columns.ragged import Column, equal_rows, picked
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.metrics.metrics import Metrics, rehearse
from sparkdl.outputs import Widths, described, pick, widths_of
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.protocols import Batch, ColumnSpec, Features, LossFunction, Targets
from sparkdl.replica import Replica
from sparkdl.replica.buffers import left_as_it_was
from sparkdl.replica.flat import persistent_buffers
from sparkdl.replica.loss_use import require_own_targets_in
from sparkdl.replica.losses import ModelLoss

PREDICTED_ROWS = (0, 1, 0, 1, 0)
"""Rows of the made-up batch to predict for: a number that few models have of layers or classes, so
that the length of a tensor tells whether it has one value per row."""


def probe(
    replica: Replica,
    schema: FeedSchema,
    statistics: Sequence[ColumnStatistics],
    head: Head,
    *,
    metrics: Metrics | None = None,
    scores: bool = False,
) -> Any:
    """Take one step with a replica that is thrown away afterwards.

    Args:
        replica: from ``build``.
        schema: the tensors that it will be fed.
        statistics: what is known of each of its columns.
        head: what the loss says about the outputs.
        metrics: to try on its predictions.
        scores: whether rows will be scored with the loss.

    Returns:
        What the model returns in evaluation mode, without labels, for ``PREDICTED_ROWS``.

    Raises:
        ModelError: the model, the loss or the optimizer fails.
        DataError: the label is out of the model's range.
    """
    columns = list(map(_extremes, statistics, schema.stored))
    if schema.weight is not None:
        columns[-1] = torch.ones(2)
    batch = schema.batch(columns, last=True)
    built = _shapes_of(replica.module)
    with borrowed_random_numbers():
        require_own_targets_in(replica, partial(_rows_of, schema, columns), scores=scores)
        with torch.enable_grad():
            outputs, loss = _try_out(replica, batch, schema, statistics, head)
        predicted = _rows_of(schema, columns, len(PREDICTED_ROWS))
        predictions = _predict(replica, predicted, schema, statistics)
        if metrics is not None:
            rehearse(metrics, predictions, predicted.targets, predicted.weights)
        _require_as_built(replica.module, built)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            replica.optimizer.step()
        except Exception as error:  # a detached output, an optimizer that needs a closure, ...
            both = _both(outputs, batch)
            fail(f"the backward pass or the optimizer's step fails after {both}", error)
    return predictions


def _rows_of(schema: FeedSchema, columns: Sequence[Column], rows: int) -> Batch:
    """A minibatch of so many rows, each one of two."""
    chosen = torch.arange(rows) % 2
    return schema.batch([picked(column, chosen) for column in columns], last=True)


def widths_of_shorter_rows(
    replica: Replica, schema: FeedSchema, statistics: Sequence[ColumnStatistics]
) -> Widths | None:
    """How wide the outputs are for rows one item shorter than the longest of the data.

    Args:
        replica: from ``build``.
        schema: the tensors that it will be fed.
        statistics: what is known of each of its columns.

    Returns:
        The widths for ``PREDICTED_ROWS``; None if no features are padded.

    Raises:
        ModelError: the model fails on them.
    """
    if all(spec.padding is None for spec in schema.features):
        return None
    rows = torch.tensor(PREDICTED_ROWS)
    shorter = [
        _shorter(statistics, spec)
        for statistics, spec in zip(statistics, schema.columns, strict=True)
    ]
    columns = [picked(column, rows) for column in map(_extremes, shorter, schema.stored)]
    batch = schema.batch(columns, last=True)
    with borrowed_random_numbers():
        outputs = _predict(replica, batch, schema, shorter)
    return widths_of(outputs, len(PREDICTED_ROWS))


def _shorter(statistics: ColumnStatistics, spec: ColumnSpec) -> ColumnStatistics:
    if spec.padding is None:
        return statistics
    width, longest = math.prod(spec.item_shape), statistics.longest or 0
    items = max(1, longest - width) if longest > width else 2 * width
    return replace(statistics, shortest=items, longest=items)


def require_single_row(
    replica: Replica,
    schema: FeedSchema,
    statistics: Sequence[ColumnStatistics],
    rows: int,
    *,
    joint_batch_norm: bool = False,
) -> None:
    """Check that a model trains on a single row, which a worker's last minibatch may have.

    Args:
        replica: from ``build``.
        schema: the tensors that it will be fed.
        statistics: what is known of each of its columns.
        rows: how many the worker with such a minibatch has.
        joint_batch_norm: whether BatchNorm layers have others' rows besides, and so are left out.

    Raises:
        ModelError: the model or the loss fails on it.
    """
    columns = [row[:1] for row in map(_extremes, statistics, schema.stored)]
    batch = schema.batch(columns, last=True)
    try:
        with borrowed_random_numbers(), left_as_it_was(replica.module), torch.no_grad():
            for layer in replica.module.modules() if joint_batch_norm else ():
                if isinstance(layer, _BatchNorm):
                    layer.forward = _as_it_is  # type: ignore[assignment, method-assign]
            replica.forward(batch)
    except Exception as error:  # the user's forward may raise anything
        fail(
            "the model fails on a minibatch of one row, which a worker with "
            f"{counted(rows, 'row')} has last",
            error,
            ". Set dropLast=True to leave such minibatches out, or another batchSize",
        )


def _as_it_is(features: Tensor) -> Tensor:
    return features


def _try_out(
    replica: Replica,
    batch: Batch,
    schema: FeedSchema,
    statistics: Sequence[ColumnStatistics],
    head: Head,
) -> tuple[Any, Tensor]:
    """The outputs and the loss."""
    replica.module.train()
    outputs = _outputs(replica, batch, schema, statistics, with_labels=True)
    labels = schema.labels
    if isinstance(outputs, Tensor) and not isinstance(replica.loss, ModelLoss):
        pick(outputs, None, batch.examples)
    ignored = _ignored_label(replica.loss)
    for label, found in zip(labels, statistics[len(schema.features) :][: len(labels)], strict=True):
        _check_label_range(label, found, outputs, head, ignored)
    return outputs, _loss(replica, outputs, batch, labels)


def _predict(
    replica: Replica, batch: Batch, schema: FeedSchema, statistics: Sequence[ColumnStatistics]
) -> Any:
    """What ``transform`` will see; and the loss on held-out rows, if there are any."""
    replica.module.eval()
    # Not in inference mode: a backward pass must be able to use what the model keeps from this.
    with torch.no_grad():
        predictions = _outputs(replica, batch, schema, statistics, with_labels=False)
        if schema.validation is not None:
            outputs = _outputs(replica, batch, schema, statistics, with_labels=True)
            _loss(replica, outputs, batch, schema.labels)
    replica.module.train()
    return predictions


def _shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that are trained or averaged, by name."""
    tensors = {**dict(module.named_parameters()), **persistent_buffers(module)}
    return {name: tuple(each.shape) for name, each in tensors.items()}


def _require_as_built(module: nn.Module, built: dict[str, tuple[int, ...]]) -> None:
    """Check that the forward passes kept the tensors that the model was built with."""
    now = _shapes_of(module)
    changed = [
        f"'{name}' from {built.get(name, 'nothing')} to {now.get(name, 'nothing')}"
        for name in built | now
        if built.get(name) != now.get(name)
    ]
    if changed:
        raise ModelError(
            f"the model's forward pass changes its parameters or buffers: {', '.join(changed)}. "
            "The optimizer and the other workers only know those that exist when it is built. "
            "Create them all in __init__, with their final shapes, or give a function as model "
            "that builds it and calls it on a batch. Buffers that are caches may be registered "
            "with persistent=False"
        )


def _outputs(
    replica: Replica,
    batch: Batch,
    schema: FeedSchema,
    statistics: Sequence[ColumnStatistics],
    *,
    with_labels: bool,
) -> Any:
    """What the model returns; for ``with_labels`` see ``Replica.outputs``."""
    try:
        return replica.outputs(batch, with_labels=with_labels)
    except Exception as error:  # the user's forward may raise anything
        labels = with_labels and isinstance(replica.loss, ModelLoss)
        columns = schema.stored if labels else schema.features
        given = _shapes(batch.features) + _integers(columns, statistics[: len(columns)])
        mode = "" if replica.module.training else " in evaluation mode"
        fail(
            f"the model fails{mode} on a batch with features of {given}",
            error,
            (
                which_param_helps(error, schema.features, statistics)
                or how_called(replica, batch, error, with_labels=with_labels)
            )
            + what_padding_adds(error, schema.features, statistics),
        )


def _loss(replica: Replica, outputs: Any, batch: Batch, labels: Sequence[ColumnSpec]) -> Tensor:
    """The loss of what the model returned."""
    both = _both(outputs, batch)
    mode = "" if replica.module.training else " in evaluation mode, which validation uses,"
    try:
        with warnings.catch_warnings():
            # torch only warns before it broadcasts (2, 2) outputs against (2,) targets.
            warnings.filterwarnings("error", message="Using a target size")
            loss = replica.loss_of(outputs, batch)
    except ModelError:
        raise
    except Exception as error:  # the user's loss may raise anything
        whose, advice = f" (label column '{labels[0].name}')", ""
        if not isinstance(outputs, Tensor):
            advice = (
                ". The loss is given all that the model returns; to use one output of several, "
                "give a function, for example loss=lambda outputs, targets: "
                "mse_loss(outputs[0], targets)"
            )
        elif outputs.dim() > 2 and not labels[0].is_array:
            whose = ""
            advice = (
                f". The model returns shape {tuple(outputs.shape[1:])} for each row, and the "
                "label is one number: have forward return shape (rows,), or (rows, classes)"
            )
        fail(f"the loss fails{mode} on {both}{whose}", error, advice)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(f"the loss of {both} must be a scalar tensor (the mean), not {shape}")
    return loss


def _both(outputs: Any, batch: Batch) -> str:
    return f"outputs {described(outputs)} and targets {_shapes(batch.targets)}"


def _ignored_label(loss: LossFunction) -> int | None:
    """The label of rows that the loss skips: torch's ``ignore_index``."""
    if isinstance(loss, nn.Module):
        found = getattr(loss, "ignore_index", None)
    else:
        try:
            argument = inspect.signature(loss).parameters.get("ignore_index")
        except (TypeError, ValueError):  # a callable written in C may have no signature
            return None
        found = None if argument is None else argument.default
    return found if isinstance(found, int) else None


def _check_label_range(
    label: ColumnSpec, statistics: ColumnStatistics, outputs: Any, head: Head, ignored: int | None
) -> None:
    name, low, high = label.name, statistics.smallest, statistics.largest
    if low is None or high is None or label.is_array:
        return
    if head.takes_class_index and isinstance(outputs, Tensor) and outputs.dim() == 2:
        classes = outputs.shape[1]
        if (low < 0 and low != ignored) or (high >= classes and high != ignored):
            raise DataError(
                f"label column '{name}' holds {low:g} to {high:g} ({_where(statistics)}), but the "
                f"model has {classes} outputs and so takes classes 0 to {classes - 1}. Number the "
                "classes from 0 (pyspark.ml.feature.StringIndexer does), or give the model more "
                "outputs"
            )
    if head in (Head.BINARY_LOGIT, Head.BINARY_PROBABILITY) and (low < 0 or high > 1):
        raise DataError(
            f"label column '{name}' holds {low:g} to {high:g} ({_where(statistics)}), but the loss "
            "takes 0 to 1. Map the two classes to 0 and 1, or use CrossEntropyLoss for more classes"
        )


def _integers(features: Sequence[ColumnSpec], statistics: Sequence[ColumnStatistics]) -> str:
    """The batch's integers, which may be out of an embedding's range, by column."""
    ranges = [
        f"'{spec.name}' from {found.smallest} ({found.where('smallest')}) to {found.largest} "
        f"({found.where('largest')})"
        for spec, found in zip(features, statistics, strict=True)
        if not spec.dtype.is_floating_point and found.smallest is not None
    ]
    return f", {', '.join(ranges)}" if ranges else ""


def _where(statistics: ColumnStatistics) -> str:
    return f"{statistics.where('smallest')}, {statistics.where('largest')}"


def _extremes(statistics: ColumnStatistics, spec: ColumnSpec) -> Column:
    """Two rows: the column's smallest and largest value; 0 and 1 where those are unknown.

    If the column is padded, they are as long as its shortest and its longest row.
    """
    low = 0.0 if statistics.smallest is None else statistics.smallest
    high = 1.0 if statistics.largest is None else statistics.largest
    exact = torch.float64 if spec.dtype.is_floating_point else spec.dtype
    width = math.prod(spec.item_shape) if spec.padding is not None else 1
    items = (statistics.shortest or 0) // width, max(1, (statistics.longest or 0) // width)
    return equal_rows(spec, torch.tensor([low, high], dtype=exact), items)


def _shapes(tensors: Features | Targets) -> str:
    if isinstance(tensors, dict):
        return ", ".join(f"'{name}' {described(tensor)}" for name, tensor in tensors.items())
    return ", ".join(map(described, tensors if isinstance(tensors, tuple) else (tensors,)))
