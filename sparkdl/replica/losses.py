"""Losses of weighted rows, derived from losses that return a mean, and models' own losses."""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sparkdl.errors import ModelError
from sparkdl.outputs import described, parts_of
from sparkdl.protocols import LossFunction, Targets


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


def loss_of_rows(loss: LossFunction) -> LossFunction:
    """The same loss, row by row: torch's own with ``reduction="none"``.

    Args:
        loss: the loss; any but torch's own is returned as is, and must give one value per row.
    """
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            return loss
        by_row: Any = copy.copy(loss)
        by_row.reduction = "none"
        rows: LossFunction = by_row
        return rows
    try:
        takes_reduction = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a callable written in C may have no signature
        return loss
    return functools.partial(loss, reduction="none") if takes_reduction else loss


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """The loss of a minibatch of weighted rows: sum_i w_i l_i / n.

    Args:
        values: the rows' losses l_i, shape (n,), or (n, ...), of which each row's mean is taken.
        weights: w_i, shape (n,), 1 on average over all rows of all workers.

    Returns:
        A scalar.

    Raises:
        ModelError: there is not one value per row.
    """
    if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != len(weights):
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ModelError(
            f"with weightCol the loss must give one value per row, shape ({len(weights)},) "
            f"here, but it gives {shape}. torch's own losses do; drop the mean from your own "
            "function"
        )
    rows = values.reshape(len(values), -1).mean(dim=1)
    return (rows * weights.to(rows.dtype)).mean()
