"""The loss of a minibatch: a sum over what counts, divided by how much that is.

Most losses are means over the rows. torch's losses of class indices divide by the labels that
count, each by its class's weight; a loss of one's own may return its sum and what to divide it by.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn._reduction import legacy_get_string  # type: ignore[attr-defined]

from sparkdl.errors import ModelError
from sparkdl.outputs import described, parts_of
from sparkdl.protocols import Batch, LossFunction, Targets

HALVES = (torch.float16, torch.bfloat16)
LossUse = Literal["rows", "counts"] | None
"""What a loss divides the sum of a minibatch by; None where nobody has looked."""


@dataclass(frozen=True)
class ModelLoss:
    """The loss that a model computes itself when given the labels by keyword.

    Attributes:
        keywords: one per label.
    """

    keywords: tuple[str, ...] = ("labels",)

    def labels(self, targets: Targets) -> dict[str, Tensor]:
        """What the model is given besides its features."""
        several = (targets,) if isinstance(targets, Tensor) else targets
        return dict(zip(self.keywords, several, strict=True))

    def __call__(self, outputs: Any, targets: Targets) -> Tensor:
        """Take the loss from the outputs: the one named loss, a tuple's first, or the whole output.

        Raises:
            ModelError: there is no loss.
        """
        parts = parts_of(outputs)
        loss = outputs if isinstance(outputs, Tensor) else parts.get("loss", parts.get(0))
        if isinstance(loss, Tensor) and loss.dim() == 0:
            return loss
        given = ", ".join(f"{name}=..." for name in self.keywords)
        raise ModelError(
            "loss='model' needs a scalar tensor as the model's output 'loss' or first in its "
            f"tuple of outputs; called with {given} the model returns {described(outputs)}"
        )


@dataclass(frozen=True)
class ClassIndexLoss:
    """What torch's cross entropy and negative log likelihood divide the sum of a minibatch by.

    Attributes:
        weight: of each class, shape (classes,); None where all count the same.
        ignore_index: the label that does not count.
    """

    weight: Tensor | None
    ignore_index: int

    @classmethod
    def of(cls, loss: LossFunction) -> ClassIndexLoss | None:
        """From a loss with ``reduction="mean"``; None for any other than these two of torch's."""
        if reduction_of(loss) != "mean":
            return None
        loss = unwrapped(loss)
        if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
            own = type(loss).forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
            return cls(loss.weight, loss.ignore_index) if own else None
        given: dict[str, Any] = {}
        while isinstance(loss, functools.partial):
            if loss.args:
                return None
            given, loss = {**loss.keywords, **given}, unwrapped(loss.func)
        if loss not in (functional.cross_entropy, functional.nll_loss):
            return None
        return cls(given.get("weight"), given.get("ignore_index", -100))

    def counts(self, targets: Tensor) -> Tensor | None:
        """How much each label counts, in the targets' shape; None for probabilities of classes."""
        if targets.is_floating_point():
            return None
        counts = targets != self.ignore_index
        if self.weight is None:
            return counts
        return self.weight.to(targets.device)[torch.where(counts, targets, 0).long()] * counts


def is_known(loss: LossFunction) -> bool:
    """Whether a loss is torch's or the model's own, none of which returns a pair."""
    loss = unwrapped(loss)
    while isinstance(loss, functools.partial):
        loss = unwrapped(loss.func)
    if isinstance(loss, nn.Module):
        return type(loss).__module__ == nn.modules.loss.__name__
    of_torch = getattr(nn.functional, getattr(loss, "__name__", ""), None) is loss
    return of_torch or isinstance(loss, ModelLoss)


def unwrapped(loss: LossFunction) -> LossFunction:
    """The loss behind what only passes calls on to it.

    Args:
        loss: perhaps torch.compile's, a module's bound ``forward``, or a partial of a module.
    """
    while True:
        inner: Any = None
        if isinstance(loss, nn.Module):
            inner = loss._modules.get("_orig_mod")
        elif isinstance(loss, functools.partial):
            inner = loss.func if isinstance(loss.func, nn.Module) and not loss.args else None
        elif inspect.ismethod(loss) and isinstance(loss.__self__, nn.Module):
            calls = type(loss.__self__).forward, nn.Module.__call__
            inner = loss.__self__ if loss.__func__ in calls else None
        else:
            inner = getattr(loss, "_torchdynamo_orig_callable", None)
        if inner is None:
            return loss
        loss = inner


def reduction_of(loss: LossFunction) -> str | None:
    """The reduction that a loss is set to, as torch's have one; None for any other."""
    loss = unwrapped(loss)
    if isinstance(loss, nn.Module):
        found = _own_reduction(loss)
        return found if isinstance(found, str) else None
    parameters = _parameters(loss)
    old = [parameters[name].default if name in parameters else None for name in _OLD]
    if any(isinstance(each, bool) for each in old):
        return str(legacy_get_string(old[0], old[1], emit_warning=False))
    found = parameters["reduction"].default if "reduction" in parameters else None
    return found if isinstance(found, str) else None


_OLD = ("size_average", "reduce")
"""What ``reduction`` was called, and still wins over it."""


def _own_reduction(loss: nn.Module) -> Any:
    """Not that of a module which it wraps: setting it would change nothing, or the user's own."""
    return vars(loss).get("reduction", getattr(type(loss), "reduction", None))


def _parameters(loss: LossFunction) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a callable written in C may have no signature
        return {}


def with_reduction(loss: LossFunction, reduction: str) -> LossFunction:
    """The same loss with another reduction; any but one that has a reduction is returned as is.

    Args:
        loss: the loss.
        reduction: as torch's losses take it.
    """
    given, loss = loss, unwrapped(loss)
    if isinstance(loss, nn.Module):
        if _own_reduction(loss) is None:
            return given
        changed: Any = copy.copy(loss)
        changed.reduction = reduction
        return changed  # type: ignore[no-any-return]
    parameters = _parameters(loss)
    if "reduction" not in parameters:
        return given
    old = {name: None for name in _OLD if name in parameters}
    return functools.partial(loss, reduction=reduction, **old)


class MinibatchLoss:
    """The loss of one minibatch after another, with what each was divided by.

    Args:
        loss: the user's, or the model's own.
        use: as the driver has found out before the first step: ``rows`` where every row's label
            counts, and equally; ``counts`` where each minibatch has a divisor of its own.

    Attributes:
        is_sum: whether it is a sum, so that the gradients of parts of a minibatch are added.
        may_divide: whether minibatches may have divisors of their own.
    """

    def __init__(self, loss: LossFunction, use: LossUse = None) -> None:
        self._loss = loss
        # A class of each row is no number to put into the outputs' shape: torch would take a column
        # of numbers for the probabilities of a single class, of which the loss is always 0.
        self._is_elementwise = is_known(loss) and ClassIndexLoss.of(loss) is None
        self._reduction = reduction_of(loss)
        self.is_sum = self._reduction == "sum"
        self._indices = None if use == "rows" else ClassIndexLoss.of(loss)
        self.may_divide = use != "rows"
        # The mean weight of all rows is 1, but not that of the labels that count.
        certain = self._indices is not None and self._indices.weight is not None
        self._counts_weighted = use == "counts" or certain
        self._sum = with_reduction(loss, "sum")
        self._of_rows = with_reduction(loss, "none")

    def __call__(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Compute it.

        Args:
            outputs: what the model returned.
            batch: the minibatch.

        Returns:
            The mean, a scalar, 0 where nothing counts; and what its sum was divided by, a float64
            scalar, or None where that is the number of rows.

        Raises:
            ModelError: the loss gives neither a mean nor a pair, or, with weights, not one value
                per row.
        """
        targets = self._in_shape(outputs, batch.targets)
        if batch.weights is not None:
            return self._weighted(outputs, targets, batch.weights)
        counts = self._counts(targets)
        if counts is None:
            found = self._loss(outputs, targets)
            return self._ratio(found, ()) if isinstance(found, tuple) else (found, None)
        divisor = counts.sum(dtype=torch.float64)
        if isinstance(outputs, Tensor) and outputs.dtype in HALVES:
            # The sum of many labels would be rounded.
            if counts.dtype == outputs.dtype:  # class weights are of the outputs' dtype, or float32
                values = self._of_rows(outputs, targets)
                return _ratio(values.sum(dtype=torch.float32), divisor)
            outputs = outputs.float()
        return _ratio(self._sum(outputs, targets), divisor)

    def _in_shape(self, outputs: Any, targets: Targets) -> Targets:
        """One number per row in the shape of the outputs, (rows, 1) or (rows,), for torch's own."""
        if self._is_elementwise and isinstance(outputs, Tensor) and isinstance(targets, Tensor):
            rows = len(targets)
            if {outputs.shape, targets.shape} == {(rows,), (rows, 1)}:
                return targets.view_as(outputs)
        return targets

    def _counts(self, targets: Targets) -> Tensor | None:
        if self._indices is None or not isinstance(targets, Tensor):
            return None
        return self._indices.counts(targets)

    def _weighted(
        self, outputs: Any, targets: Targets, weights: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        values = self._of_rows(outputs, targets)
        if isinstance(values, tuple):
            return self._ratio(values, weights.shape, weights)
        rows = by_row(values, len(weights))
        rows = rows.float() if rows.dtype in HALVES else rows  # weights and sum would be rounded
        found = self._counts(targets) if self._counts_weighted else None
        if found is not None:
            total = (rows.sum(1) * weights.to(rows.dtype)).sum()
            return _ratio(total, (_sum_of_rows(found) * weights).sum())
        if self._reduction in ("sum", "batchmean"):
            weighted = rows.sum(1) * weights.to(rows.dtype)
            return weighted.sum() if self.is_sum else weighted.mean(), None
        return (rows.mean(1) * weights.to(rows.dtype)).mean(), None

    def _ratio(
        self, values: tuple[Any, ...], shape: tuple[int, ...], weights: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """From the pair that the loss has returned, of all rows together or by row."""
        if not self.may_divide:
            raise ModelError(
                "the loss returns a pair (sum, weight) now, but returned a mean when it was tried "
                "out before the first step. Have it return a pair always"
            )
        total, divisor = _pair(values, shape)
        return _ratio((total * weights).sum(), (divisor.double() * weights).sum())

    def values(self, outputs: Any, targets: Targets) -> Any:
        """What the loss gives by row.

        Args:
            outputs: what the model returned.
            targets: the labels.
        """
        return self._of_rows(outputs, self._in_shape(outputs, targets))

    def scores(self, outputs: Any, targets: Targets, rows: int) -> Tensor:
        """The loss of each row, shape (rows,), float64: its sum, or its mean over what counts.

        Args:
            outputs: what the model returned.
            targets: the labels, in the columns' shapes.
            rows: how many there are.

        Raises:
            ModelError: the loss does not give one value per row.
        """
        targets = self._in_shape(outputs, targets)
        values = self._of_rows(outputs, targets)
        if isinstance(values, tuple):
            sums, counts = (each.double() for each in _pair(values, (rows,)))
            return torch.where(counts > 0, sums / counts, 0.0)
        found = by_row(values, rows).double()
        if self._reduction in ("sum", "batchmean"):
            return found.sum(1)
        counted = self._counts(targets)
        if counted is None:
            return found.mean(1)
        return found.sum(1) / _sum_of_rows(counted != 0).clamp(min=1)


def by_row(values: Any, rows: int) -> Tensor:
    """The values of a loss by row, shape (rows, k).

    Args:
        values: what the loss gives.
        rows: how many rows there are.

    Raises:
        ModelError: there is not one value, or one tensor of values, per row.
    """
    if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != rows:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ModelError(
            f"weightCol and lossCol need a loss with one value per row, shape ({rows},) here, but "
            f"it gives {shape}. torch's own losses do; have your own function take "
            "reduction='none' as an argument, or drop the mean"
        )
    return values.reshape(rows, -1)


def _sum_of_rows(counts: Tensor) -> Tensor:
    return counts.reshape(len(counts), -1).sum(1, dtype=torch.float64)


def _pair(values: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The sum and what to divide it by, both of a shape.

    Raises:
        ModelError: that is not what the loss has returned.
    """
    if len(values) == 2 and isinstance(values[0], Tensor):
        total, weight = values[0], torch.as_tensor(values[1], device=values[0].device)
        if total.shape == weight.shape == shape:
            return total, weight
    wanted = "scalar tensors" if not shape else f"tensors of shape {tuple(shape)}, by row,"
    raise ModelError(
        f"a loss that returns a pair must return {wanted} (sum, weight): the sum over what counts "
        f"in the minibatch, and what to divide it by. It returns {described(values)}"
    )


def _ratio(total: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    divisor = divisor.detach().double()
    return total / torch.where(divisor == 0, 1.0, divisor).to(total.dtype), divisor
