"""How a loss is used: whether it compares each row with its own target, and what it divides by.

Shapes (rows, 1) and (rows,) broadcast to (rows, rows) without an error, which compares each row
with the targets of all others. torch's own losses get targets in the shape of the outputs. One of
the user's gets them as the columns have them, and is watched on a few rows: what broadcasts like
that is refused, unless both shapes are written with two dimensions.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from sparkdl.errors import ModelError
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import DataStatistics
from sparkdl.outputs import parts_of
from sparkdl.protocols import Batch, LossFunction, Targets
from sparkdl.replica.losses import ClassIndexLoss, LossUse, MinibatchLoss, ModelLoss, is_known
from sparkdl.replica.replica import Replica

logger = logging.getLogger(__name__)

ROWS = (11, 13, 17, 19)
"""Numbers of rows to try with: the first that is no width of the outputs."""
EVEN = 6
"""As many of either kind of made-up row; more of them are copies of these."""


def require_own_targets(
    loss: LossFunction, outputs: Any, batch: Batch, rows: int, *, by_row: bool
) -> None:
    """Check that a loss compares each row of the outputs with its own target only.

    Args:
        loss: the loss.
        outputs: what the model returns for the rows.
        batch: the rows' targets, as the columns have them, and their weights.
        rows: how many: the width of nothing.
        by_row: whether a value per row will be wanted, as it is with weights.

    Raises:
        ModelError: it compares rows with each other, by broadcasting or where a value per row is
            wanted.
    """
    tried, watch = MinibatchLoss(loss), _Watch()
    values: Any = ()
    try:
        with warnings.catch_warnings(), watch:
            warnings.simplefilter("ignore")  # it will warn again
            tried(outputs, batch)
            if by_row or batch.weights is not None:
                values = tried.values(outputs, batch.targets)
    except Exception:  # the user's loss may raise anything; it is called again, and reported
        return
    if watch.crossed:
        raise ModelError(
            f"on {rows} rows, the loss broadcasts shape {watch.crossed}: it compares each row with "
            "the targets of all others. Have it compare equal shapes, by outputs.squeeze(1) or "
            "targets.unsqueeze(1); if all pairs are meant, write x[:, None] and x[None, :]"
        )
    for each in _tensors(values):
        if list(each.shape).count(rows) > 1:
            raise ModelError(
                f"weightCol and lossCol need a loss with one value per row, but for {rows} rows "
                f"it gives {tuple(each.shape)}: each row is compared with all others. Have the "
                "loss compare each row of the outputs with its own target"
            )


def require_divisible(
    loss: LossFunction, outputs: Any, batch: Batch, rows: int, *, several: bool
) -> None:
    """Check that a loss of the user's is a mean, or a pair of sums, of which strategies make one.

    Args:
        loss: the loss.
        outputs: what the model returns for the rows.
        batch: the rows' targets.
        rows: how many: the width of nothing.
        several: whether there are several workers, without which it may be a sum.

    Raises:
        ModelError: it is twice as large if each row is there twice, or one of a pair is the same.
    """
    if is_known(loss) or batch.weights is not None:
        return

    def of_rows(chosen: Tensor) -> Any:
        def picked(value: Any) -> Any:
            is_rows = isinstance(value, Tensor) and value.shape[:1] == (rows,)
            return value[chosen] if is_rows else value

        return loss(tree_map(picked, outputs), tree_map(picked, batch.targets))

    def of_copies(number: int) -> Any:
        return of_rows(torch.arange(rows).repeat(number))

    _require_sums(of_copies)
    if several:
        _require_no_sum(of_copies)
        _warn_of_no_mean(of_rows)


def _require_sums(of_copies: Callable[[int], Any]) -> None:
    """Check that neither of a pair stays the same if each row is there twice."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it will warn again
            # No pair has other than two, and these are numbers.
            (total, weight), twice = (tuple(map(float, of_copies(number))) for number in (1, 2))
    except Exception:  # the user's loss may raise anything; it is called again, and reported
        return
    for name, once, more in zip(("sum", "weight"), (total, weight), twice, strict=True):
        if once and math.isclose(more, once, rel_tol=1e-3):
            raise ModelError(
                "the loss returns two numbers, which are taken for a sum and the weight to divide "
                f"it by, but this {name} is {once:g} for some rows, and also if each of them is "
                "there twice. Return the sum over what counts, not its mean, and how much that "
                "is; or the mean alone, without any other numbers"
            )


def _require_no_sum(of_copies: Callable[[int], Any]) -> None:
    """Check that a loss is not as many times as large as there are copies of the same rows."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it will warn again
            # No numbers for a pair, whose sum may well be one.
            once, *more = (float(of_copies(number)) for number in (1, 2, 3))
    except Exception:  # the user's loss may raise anything; it is called again, and reported
        return
    grows = all(math.isclose(each, n * once, rel_tol=1e-3) for n, each in enumerate(more, 2))
    if once and math.isfinite(once) and grows:
        raise ModelError(
            "the loss adds up the rows of a minibatch: it is twice as large if each of them is "
            "there twice. With several workers the sum over the rows of one is not that over all, "
            "nor is it a mean, which strategies can weigh. Divide it by the number of rows, with a "
            "larger learning rate, or use numWorkers=1"
        )


def _warn_of_no_mean(of_rows: Callable[[Tensor], Any]) -> None:
    """Warn of a loss that is not the mean of those of its rows, of which there are two kinds."""
    kinds = torch.tensor([0, 2, 4, 6]), torch.tensor([1, 3, 5, 7])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it will warn again
            one, other = (float(of_rows(each)) for each in kinds)
            both, again = (float(of_rows(torch.cat(kinds))) for _ in range(2))
    except Exception:  # the user's loss may raise anything; it is called again, and reported
        return
    apart, rounding = abs(both - (one + other) / 2), 0.01 * max(abs(one), abs(other))
    # Of rows none of which counts, a mean is NaN.
    if both == again and math.isfinite(both) and not apart <= rounding:
        logger.warning(
            "the loss of a minibatch is not the mean of the losses of its rows (%g of some rows, "
            "%g of others, %g of both together). With several workers each has its own, weighted "
            "by its number of rows, which is not the loss of all of their rows. If it divides by "
            "class weights, or by what counts, return the pair (sum, weight); a model's own loss "
            "cannot: give a loss of its outputs instead",
            one,
            other,
            both,
        )


def require_own_targets_in(
    replica: Replica, batch_of: Callable[[int], Batch], *, scores: bool, several: bool = False
) -> None:
    """The same for a replica's loss, on made-up rows.

    Args:
        replica: one that is thrown away afterwards.
        batch_of: a made-up minibatch of so many rows, each one of two in turn.
        scores: whether rows will be scored with the loss.
        several: whether there are several workers, whose losses must be means.

    Raises:
        ModelError: as above.
    """
    own = replica.loss
    if isinstance(own, ModelLoss):
        if several:
            replica.module.eval()  # whose values are those of each row, without noise

            def of_batch(batch: Batch) -> Tensor:
                return replica.loss_of(replica.outputs(batch), batch)

            def of_rows(chosen: Tensor) -> Tensor:
                every = batch_of(int(chosen.max()) + 1)
                picked = tree_map(lambda each: each[chosen], [every.features, every.targets])
                return of_batch(replace(every, features=picked[0], targets=picked[1]))

            with torch.no_grad():
                _require_no_sum(lambda number: of_batch(batch_of(number * EVEN)))
                _warn_of_no_mean(of_rows)
        return
    replica.module.train()
    with torch.no_grad():
        try:
            for rows in ROWS:
                batch = batch_of(rows)
                outputs = replica.outputs(batch)
                if rows not in _widths(outputs):
                    break
        except Exception:  # the user's forward may raise anything; it is called again, and reported
            return
        require_own_targets(own, outputs, batch, rows, by_row=scores)
        require_divisible(own, outputs, batch, rows, several=several)


def require_own_scores(loss: LossFunction, outputs: Any, targets: Targets, rows: int) -> None:
    """The same for rows that are there, of a model of which nothing else is known.

    Args:
        loss: the loss, by row.
        outputs: what the model returned for the rows.
        targets: of the rows.
        rows: how many.

    Raises:
        ModelError: as above.
    """
    taken = _widths(outputs) | _widths(targets)
    few = next((each for each in (*ROWS, 3, 2) if each <= rows and each not in taken), 0)

    def first(value: Any) -> Any:
        is_rows = isinstance(value, Tensor) and value.shape[:1] == (rows,)
        return value[:few] if is_rows else value

    if few:  # a single row is not compared with any other
        with torch.no_grad():
            batch = Batch((), tree_map(first, targets), True)
            require_own_targets(loss, tree_map(first, outputs), batch, few, by_row=True)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks for values of all pairs of rows in each operation, inside of torch's functions too.

    Attributes:
        crossed: the shapes of which such values were made, though one of them has fewer dimensions
            than the result; empty for none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.crossed = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one of torch's elementary operations."""
        result = func(*args, **(kwargs or {}))
        broadcasts = torch.Tag.pointwise in func.tags or func is torch.ops.aten.expand.default
        if broadcasts and isinstance(result, Tensor) and result.dim() and len(result) > 1:
            given = [each for each in args if isinstance(each, Tensor) and each.dim()]
            smaller = all(each.numel() < result.numel() for each in given)
            unsaid = any(each.dim() < result.dim() for each in given)
            if smaller and unsaid and len(result) in result.shape[1:]:
                shapes = [str(tuple(each.shape)) for each in (*given, result)]
                self.crossed = " with ".join(shapes[:-1]) + f" to {shapes[-1]}"
        return result


def _widths(values: Any) -> set[int]:
    """The sizes of all dimensions but the first."""
    return {size for each in _tensors(values) for size in each.shape[1:]}


def _tensors(value: Any) -> list[Tensor]:
    leaves = [value] if isinstance(value, Tensor) else tree_leaves(value)
    if not isinstance(value, (Tensor, tuple, list)):
        leaves = tree_leaves(dict(parts_of(value)))
    return [each for each in leaves if isinstance(each, Tensor)]


def divides_by(
    loss: LossFunction, schema: FeedSchema, statistics: DataStatistics, *, transforms: bool
) -> LossUse:
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
        return "rows" if is_known(loss) else None
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
