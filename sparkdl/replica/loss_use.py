"""How a loss is used: the shapes of its targets, tried out on some rows, and what it divides by."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sparkdl.errors import ModelError
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.protocols import Batch, LossFunction, Targets
from sparkdl.replica.losses import ClassIndexLoss, LossUse, MinibatchLoss, ModelLoss, unwrapped
from sparkdl.replica.replica import Replica
from sparkdl.replica.targets import ROWS, chosen_dims, crosses_rows, distinct_rows, shaped, widths


def use_for(
    loss: LossFunction,
    outputs: Any,
    targets: Targets,
    rows: int,
    *,
    weights: Tensor | None = None,
    by_row: bool = False,
) -> LossUse:
    """Find the shapes in which a loss takes its targets.

    Args:
        loss: the loss.
        outputs: what the model returns for the rows.
        targets: of the rows, as the columns have them.
        rows: how many: the width of nothing.
        weights: of the rows, if they have some.
        by_row: whether a value per row will be wanted in any case.

    Raises:
        ModelError: a value per row is wanted, but depends on other rows.
    """
    tried = MinibatchLoss(loss, LossUse())
    use = LossUse(
        chosen_dims(lambda given: tried(outputs, Batch((), given, True, weights)), targets)
    )
    if weights is None and not by_row:
        return use
    try:
        values = tried.values(outputs, shaped(targets, use.target_dims))
    except Exception:  # the user's loss may raise anything; it is called again, and reported
        return use
    if crosses_rows(values, rows):
        raise ModelError(
            f"weightCol and scoreCol need a loss with one value per row, but for {rows} rows it "
            f"gives {tuple(values.shape)}: each row is compared with all others. Have the loss "
            "compare each row of the outputs with its own target"
        )
    return use


def use_in(replica: Replica, batch_of: Callable[[int], Batch], *, scores: bool) -> LossUse:
    """The same for a replica's loss, on made-up rows.

    Args:
        replica: one that is thrown away afterwards.
        batch_of: a made-up minibatch of so many rows.
        scores: whether rows will be scored with the loss.

    Raises:
        ModelError: a row's loss, where one is wanted, depends on other rows.
    """
    if isinstance(replica.loss, ModelLoss):
        return LossUse()
    batches: dict[int, Batch] = {}

    def outputs_of(rows: int) -> Any:
        batches[rows] = batch_of(rows)
        return replica.outputs(batches[rows])

    replica.module.train()
    with torch.no_grad():
        try:
            rows, outputs = distinct_rows(outputs_of)
        except Exception:  # the user's forward may raise anything; it is called again, and reported
            return LossUse()
        batch = batches[rows]
        return use_for(
            replica.loss, outputs, batch.targets, rows, weights=batch.weights, by_row=scores
        )


def use_for_some(loss: LossFunction, outputs: Any, targets: Targets, rows: int) -> LossUse:
    """The same for rows that are there, of a model of which nothing else is known.

    Args:
        loss: the loss, by row.
        outputs: what the model returned for the rows.
        targets: of the rows.
        rows: how many.

    Raises:
        ModelError: as above.
    """
    taken = widths(outputs) | widths(targets)
    few = next((each for each in (*ROWS, 3, 2) if each <= rows and each not in taken), 0)
    if not few:
        return LossUse()  # a single row is not compared with any other

    def first(value: Any) -> Any:
        is_rows = isinstance(value, Tensor) and value.shape[:1] == (rows,)
        return value[:few] if is_rows else value

    with torch.no_grad():
        return use_for(loss, tree_map(first, outputs), tree_map(first, targets), few, by_row=True)


def divides_by(
    loss: LossFunction, schema: FeedSchema, statistics: DataStatistics, *, transforms: bool
) -> Literal["rows", "counts"] | None:
    """What a loss divides the sum of a minibatch by, as far as it is known without trying it.

    Args:
        loss: the loss.
        schema: the tensors that it is fed.
        statistics: of the rows.
        transforms: whether a function of the user's may change the labels. Where rows have weights,
            it is expected to give each a label that counts.

    Returns:
        None for a loss that is not torch's.
    """
    indices = ClassIndexLoss.of(loss)
    if indices is None:
        return "rows" if _is_known(loss) else None
    label, found = schema.labels[0], statistics.columns[len(schema.features)]
    if label.dtype.is_floating_point:
        return "rows"
    if indices.weight is not None:
        return "counts"
    if transforms and schema.weight is None:
        return "counts"
    if label.padding is not None or found.smallest is None or found.largest is None:
        return "counts"
    ignored = found.smallest <= indices.ignore_index <= found.largest
    return "counts" if ignored else "rows"


def _is_known(loss: LossFunction) -> bool:
    """Whether a loss is torch's or the model's own, none of which returns a pair."""
    loss = unwrapped(loss)
    while isinstance(loss, functools.partial):
        loss = unwrapped(loss.func)
    if isinstance(loss, nn.Module):
        return type(loss).__module__ == nn.modules.loss.__name__
    of_torch = getattr(nn.functional, getattr(loss, "__name__", ""), None) is loss
    return of_torch or isinstance(loss, ModelLoss)
