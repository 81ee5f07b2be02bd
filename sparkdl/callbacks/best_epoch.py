"""Which epoch is the best by a loss, and what there is to say about it; for callbacks."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal, get_args

from sparkdl.callbacks.base import Training
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary
from sparkdl.feed.facts import DataFacts

logger = logging.getLogger(__name__)

Metric = Literal["validation_loss", "loss"]
"""The loss on held-out rows, or while training."""
HOLD_OUT = (
    "there are none: set validationFraction, or name a column that marks them "
    "(validationIndicatorCol), or set metric='loss'"
)


def require_metric(metric: object) -> None:
    """Check that an argument names a loss.

    Raises:
        ConfigError: it does not.
    """
    if metric not in get_args(Metric):
        raise ConfigError(f"metric must be {' or '.join(get_args(Metric))}, got {metric!r}")


def require_measured(name: str, metric: Metric, facts: DataFacts) -> None:
    """Check that a loss will be known.

    Args:
        name: of the callback that follows it.
        metric: which.
        facts: what the workers have found in their rows.

    Raises:
        ConfigError: it is that on held-out rows, and there are none.
    """
    if metric == "validation_loss" and facts.complete and not facts.held_out:
        raise ConfigError(f"{name} follows the loss on held-out rows, and {HOLD_OUT}")


def value_of(summary: EpochSummary, metric: Metric) -> float:
    """An epoch's loss; infinite where it is NaN, which is never an improvement.

    Raises:
        ConfigError: it is that on held-out rows, and there were none.
    """
    value = summary.validation_loss if metric == "validation_loss" else summary.loss
    if value is None:
        raise ConfigError(f"epoch {summary.epoch} has no loss on held-out rows, for {HOLD_OUT}")
    return math.inf if math.isnan(value) else value


def best_epoch(
    history: Sequence[EpochSummary], metric: Metric, min_delta: float = 0.0
) -> EpochSummary | None:
    """The epoch of the last improvement; None before the first.

    Args:
        history: the epochs that have ended.
        metric: by which loss.
        min_delta: by how much it has to be below the best one before.
    """
    best, lowest = None, math.inf
    for summary in history:
        value = value_of(summary, metric)
        if best is None or value < lowest - min_delta:
            best, lowest = summary, value
    return best


def warn_if_lost(training: Training, best: EpochSummary | None) -> None:
    """Say so if the best epoch's model is not in the checkpoint from which the fit goes on."""
    if best is not None and (training.kept_epoch or 0) < best.epoch:
        logger.warning(
            "of the epochs before the checkpoint epoch %d was the best, whose model is not in it, "
            "because nothing kept it then: the fit returns that of a better one, or of the last",
            best.epoch,
        )
