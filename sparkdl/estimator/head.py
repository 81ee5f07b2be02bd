"""What a model's outputs mean, judging by its loss: how they become classes and probabilities.

Executors run this, so it imports little.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from sparkdl.errors import ConfigError, ModelError


class Head(Enum):
    """The meaning of a model's outputs."""

    LOGITS = "logits"
    """(n, classes) scores before a softmax: CrossEntropyLoss."""
    LOG_PROBABILITIES = "log_probabilities"
    """(n, classes) logarithms of probabilities: NLLLoss."""
    BINARY_LOGIT = "binary_logit"
    """(n,) or (n, 1) score of class 1 before a sigmoid: BCEWithLogitsLoss."""
    BINARY_PROBABILITY = "binary_probability"
    """(n,) or (n, 1) probability of class 1: BCELoss."""
    SCORES = "scores"
    """(n, classes) scores of which the largest wins, but which have no rule for probabilities:
    MultiMarginLoss."""
    UNKNOWN = "unknown"
    """Anything else, for example a regression's output."""

    @property
    def takes_class_index(self) -> bool:
        """Whether the targets are class indices 0, 1, ... as int64."""
        return self in (Head.LOGITS, Head.LOG_PROBABILITIES, Head.SCORES)

    @property
    def is_classification(self) -> bool:
        """Whether the loss is for classification."""
        return self is not Head.UNKNOWN

    def classes(self, outputs: Tensor) -> Tensor:
        """The winning class of each row.

        Args:
            outputs: shape (n, classes), (n, 1) or (n,).

        Returns:
            Shape (n,), float64.

        Raises:
            ConfigError: outputs of this shape have no classes.
            ModelError: some are NaN.
        """
        if outputs.isnan().any():
            unknown = outputs.isnan().reshape(len(outputs), -1).any(dim=1)
            raise ModelError(
                f"the model returns NaN for {int(unknown.sum())} of {len(outputs)} rows, which "
                "have no class. If it is their features that are NaN, handleInvalid='skip' gives "
                "them null; else find them in the raw outputs (outputType='raw', or "
                "predictionCol='' of a classifier). Half precision may be too small for the model"
            )
        if self is Head.BINARY_LOGIT:
            return (_single(outputs) > 0).double()
        if self is Head.BINARY_PROBABILITY:
            return (_single(outputs) > 0.5).double()
        if outputs.dim() != 2 or outputs.shape[1] < 2:
            raise ConfigError(
                f"outputType='class' needs outputs of shape (rows, classes), but the model gives "
                f"{tuple(outputs.shape)}. Use outputType='raw'"
            )
        return outputs.argmax(dim=1).double()

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The probability of each class.

        Args:
            outputs: shape (n, classes), (n, 1) or (n,).

        Returns:
            Shape (n, classes); two classes for a single output.
        """
        if self is Head.LOGITS:
            return outputs.softmax(dim=1)
        if self is Head.LOG_PROBABILITIES:
            return outputs.exp()
        if self is Head.BINARY_LOGIT:
            # Not 1 - p, which float32 rounds to 0 from a score of 17 on.
            return class_scores(_single(outputs), head=self).sigmoid()
        if self is Head.BINARY_PROBABILITY:
            positive = _single(outputs)
        else:
            raise ConfigError(
                "outputType='probability' needs a loss that defines what the outputs mean "
                f"({', '.join(kind.__name__ for kind, _, _ in _LOSSES)}). Use outputType='raw' and "
                "turn the outputs into probabilities yourself"
            )
        return torch.stack([1 - positive, positive], dim=1)


_LOSSES: list[tuple[type[nn.Module], Callable[..., Tensor], Head]] = [
    (nn.CrossEntropyLoss, functional.cross_entropy, Head.LOGITS),
    (nn.NLLLoss, functional.nll_loss, Head.LOG_PROBABILITIES),
    (nn.BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits, Head.BINARY_LOGIT),
    (nn.BCELoss, functional.binary_cross_entropy, Head.BINARY_PROBABILITY),
    (nn.MultiMarginLoss, functional.multi_margin_loss, Head.SCORES),
]


def head_of(loss: Any) -> Head:
    """The head that a loss implies: torch's classification losses, as class or function.

    Args:
        loss: a loss module, perhaps compiled, a function of torch.nn.functional, or a
            ``functools.partial`` of one.
    """
    inner = loss
    while inner is not None:
        loss = inner
        is_partial = isinstance(loss, functools.partial)
        inner = loss.func if is_partial else getattr(loss, "_orig_mod", None)
    known = (head for kind, call, head in _LOSSES if isinstance(loss, kind) or loss is call)
    return next(known, Head.UNKNOWN)


def output_function(
    output_type: str, head: Head, width: int | None
) -> tuple[Callable[[Tensor], Tensor], bool]:
    """The function from outputs to predictions, and whether those are vectors.

    Args:
        output_type: ``auto``, ``class``, ``probability`` or ``raw``.
        head: what the outputs mean.
        width: numbers per row; None for outputs without a dimension of their own.

    Raises:
        ConfigError: outputs of this meaning and width have no such predictions.
    """
    if width == 0:
        raise ConfigError(
            "the model returns tensors with no numbers per row, which cannot become a column: one "
            "of their dimensions is 0. Return at least one number per row, or choose another "
            "output with outputCols"
        )
    if output_type == "auto":
        output_type = "class" if head.is_classification else "raw"
    if output_type == "raw":
        wide = width is not None and width > 1
        return functools.partial(_flat_rows, wide=wide), wide
    function = head.classes if output_type == "class" else head.probabilities
    # To fail on a made-up row here, rather than on the first real one in an executor.
    function(torch.zeros(1) if width is None else torch.zeros(1, width))
    return function, output_type == "probability"


def _flat_rows(outputs: Tensor, *, wide: bool) -> Tensor:
    """Outputs as (n, k), or (n,) if there is one number per row."""
    if wide:
        return outputs.reshape(len(outputs), -1)
    if outputs.numel() != len(outputs):
        raise ModelError(
            f"the model returns shape {tuple(outputs.shape)}, but when it was made it gave one "
            "number per row. If its module is another one now, make another model: "
            "TorchModel.from_module(model.module, example)"
        )
    return outputs.reshape(len(outputs))


def _single(outputs: Tensor) -> Tensor:
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        return outputs[:, 0]
    if outputs.dim() != 1:
        raise ConfigError(
            f"the loss takes a single output per row, but the model gives {tuple(outputs.shape)}. "
            "Use outputType='raw', or CrossEntropyLoss for many classes"
        )
    return outputs


def class_scores(outputs: Tensor, *, head: Head) -> Tensor:
    """Scores of the classes, shape (n, classes): the larger, the likelier the class.

    pyspark.ml's evaluator of two classes and ``OneVsRest`` rank rows by the score of class 1 alone,
    of which a model's own says nothing without that of class 0.
    """
    if head is Head.BINARY_LOGIT:
        score = outputs.reshape(len(outputs))
        return torch.stack([-score, score], dim=1)
    if head in (Head.LOGITS, Head.SCORES) and outputs.shape[1] == 2:
        score = (outputs[:, 1] - outputs[:, 0]) / 2  # of the same softmax as the outputs
        return torch.stack([-score, score], dim=1)
    return head.probabilities(outputs) if head is Head.BINARY_PROBABILITY else outputs


def class_winners(
    outputs: Tensor, *, head: Head, thresholds: list[float] | None, values: list[float] | None
) -> Tensor:
    """The predicted class of each row, shape (n,), float64.

    With thresholds, the class with the largest ratio of probability to threshold wins, as in
    pyspark.ml; without them, the class with the largest output.
    """
    won = head.classes(outputs)
    if thresholds is not None:
        limits = torch.tensor(thresholds, dtype=torch.float64, device=outputs.device)
        probabilities = head.probabilities(outputs).double()
        # 0 / 0 is the least likely, not NaN.
        scaled = torch.where(probabilities > 0, probabilities / limits, 0.0)
        won = scaled.argmax(dim=1).double()
    if values is None:
        return won
    return torch.tensor(values, dtype=torch.float64, device=outputs.device)[won.long()]
