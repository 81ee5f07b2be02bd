"""Turns a classifier's outputs into its columns; executors run this, so it imports little."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdl.estimator.head import Head


def scores(outputs: Tensor, *, head: Head) -> Tensor:
    """Scores of the classes, shape (n, classes): the larger, the likelier the class."""
    if head is Head.BINARY_LOGIT:
        score = outputs.reshape(len(outputs))
        return torch.stack([-score, score], dim=1)
    return head.probabilities(outputs) if head is Head.BINARY_PROBABILITY else outputs


def winners(
    outputs: Tensor, *, head: Head, thresholds: list[float] | None, values: list[float] | None
) -> Tensor:
    """The predicted class of each row, shape (n,), float64.

    With thresholds, the class with the largest ratio of probability to threshold wins, as in
    pyspark.ml; without them, the class with the largest output.
    """
    if thresholds is None:
        won = head.classes(outputs)
    else:
        limits = torch.tensor(thresholds, dtype=torch.float64, device=outputs.device)
        probabilities = head.probabilities(outputs).double()
        # 0 / 0 is the least likely, not NaN.
        scaled = torch.where(probabilities > 0, probabilities / limits, 0.0)
        won = scaled.argmax(dim=1).double()
    if values is None:
        return won
    return torch.tensor(values, dtype=torch.float64, device=outputs.device)[won.long()]
