"""What labelled rows get besides predictions: the loss of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from sparkdl.errors import ModelError
from sparkdl.feed.columns.ragged import dense
from sparkdl.feed.record_batches.decode import tensors_of
from sparkdl.outputs import described
from sparkdl.protocols import ColumnSpec, LossFunction, Targets
from sparkdl.replica.loss_use import require_own_scores
from sparkdl.replica.losses import MinibatchLoss
from sparkdl.spark.inference.failures import as_model_error


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
        device = _device(targets)
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


def _device(targets: Targets) -> torch.device:
    return (targets if isinstance(targets, Tensor) else targets[0]).device
