"""Finds the best epoch by a loss or a metric, and returns its model, whatever follows it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal, get_args

from sparkdl.callbacks.base import Callback, Training
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary
from sparkdl.feed.statistics.shards import DataStatistics

logger = logging.getLogger(__name__)

LOSSES = ("validation_loss", "loss")
"""The loss on held-out rows, or in training; anything else is the name of a metric."""
Mode = Literal["min", "max"]
"""Whether a smaller or a larger value is better."""
HOLD_OUT = (
    "there are none: set validationFraction, or name a column that marks them "
    "(validationIndicatorCol), or set metric='loss'"
)


def require_metric(metric: object, mode: object) -> None:
    """Check arguments that say what to follow.

    Raises:
        ConfigError: ``metric`` is not a name, or ``mode`` is neither of the two, or wrong for a
            loss.
    """
    if not isinstance(metric, str) or not metric:
        raise ConfigError(
            f"metric must be {' or '.join(LOSSES)}, or the name of a metric, got {metric!r}"
        )
    if mode is not None and mode not in get_args(Mode):
        raise ConfigError(f"mode must be 'min', 'max' or None, got {mode!r}")
    if metric in LOSSES and mode == "max":
        raise ConfigError(f"mode='max' would look for the largest {metric}: leave mode out")


def require_measured(
    name: str, metric: str, mode: Mode | None, training: Training, statistics: DataStatistics
) -> None:
    """Check that what a callback follows will be known, and which values of it are better.

    Args:
        name: of the callback.
        metric: what it follows.
        mode: which values are better, if that was specified.
        training: the fit.
        statistics: what the workers found in their rows.

    Raises:
        ConfigError: one of the two will not be known.
    """
    if metric == "validation_loss" and not statistics.held_out:
        raise ConfigError(f"{name} follows the loss on held-out rows, but {HOLD_OUT}")
    if metric in LOSSES:
        return
    if metric not in training.metrics:
        measured = ", ".join((*LOSSES, *training.metrics))
        raise ConfigError(
            f"{name} follows '{metric}', which is not measured; there are {measured}. Add it: "
            f"metrics={{'{metric}': ...}}"
        )
    higher = training.metrics[metric]
    if mode is None and higher is None:
        raise ConfigError(
            f"{name} follows '{metric}', which does not say whether a larger value is better: set "
            "mode='max' or mode='min'"
        )
    if mode is not None and higher is not None and higher != (mode == "max"):
        raise ConfigError(
            f"{name} has mode='{mode}', but a {'larger' if higher else 'smaller'} '{metric}' is "
            "better: leave mode out"
        )


def value_of(summary: EpochSummary, metric: str) -> float:
    """The value that an epoch reached.

    Raises:
        ConfigError: it is not known, or not a number.
    """
    if metric not in LOSSES:
        return _metric_of(summary, metric)
    value = summary.validation_loss if metric == "validation_loss" else summary.loss
    if value is None:
        raise ConfigError(f"epoch {summary.epoch} has no loss on held-out rows, because {HOLD_OUT}")
    return value


def _metric_of(summary: EpochSummary, metric: str) -> float:
    if metric not in summary.metrics:
        raise ConfigError(
            f"epoch {summary.epoch} has no '{metric}': it was trained without that metric, before "
            "the checkpoint that the fit resumes from. Start over (resume='never'), or follow one "
            "that was measured"
        )
    value = summary.metrics[metric]
    if not isinstance(value, (int, float)):
        raise ConfigError(
            f"'{metric}' came to {value!r:.80} in epoch {summary.epoch}; only a metric with a "
            "single value can be followed, for example one with average='macro'"
        )
    return value


def best_epoch(
    training: Training, metric: str, mode: Mode | None = None, min_delta: float = 0.0
) -> EpochSummary | None:
    """The epoch of the last improvement; None before the first. NaN is never one.

    Args:
        training: the fit, with the epochs that have ended.
        metric: what to compare epochs by.
        mode: which values are better; None for what the metric says.
        min_delta: by how much an epoch must be better than the best one before it.
    """
    best, lowest = None, math.inf
    sign = -1.0 if is_better_larger(training, metric, mode) else 1.0
    for summary in training.history:
        value = sign * value_of(summary, metric)
        value = math.inf if math.isnan(value) else value
        if best is None or value < lowest - min_delta:
            best, lowest = summary, value
    return best


def is_better_larger(training: Training, metric: str, mode: Mode | None) -> bool:
    """Whether a larger value is better."""
    return mode == "max" if mode is not None else bool(training.metrics.get(metric))


def warn_if_lost(training: Training, best: EpochSummary | None) -> None:
    """Warn if the best epoch's model is not in the checkpoint that the fit resumes from."""
    if best is not None and (training.kept_epoch or 0) < best.epoch:
        logger.warning(
            "epoch %d was the best before the checkpoint, but its model was not kept: the fit "
            "returns that of a better epoch, or of the last",
            best.epoch,
        )


@dataclass(frozen=True)
class ModelCheckpoint(Callback):
    """Have the fit return the model of the best epoch, and train all epochs.

    The best model so far is part of each checkpoint (``checkpointPath``), so that a fit that
    resumes from one returns what it would have returned anyway.

    Args:
        metric: ``validation_loss``, which needs held-out rows, ``loss``, the training loss, or the
            name of one of the estimator's ``metrics``.
        mode: ``max`` or ``min``, whichever is better, for a metric that does not say so itself.

    Raises:
        ConfigError: an argument is not one of these.
    """

    metric: str = "validation_loss"
    mode: Mode | None = None

    def __post_init__(self) -> None:
        require_metric(self.metric, self.mode)

    def on_start(self, training: Training, statistics: DataStatistics) -> None:
        """Check that what is followed will be known."""
        require_measured(type(self).__name__, self.metric, self.mode, training, statistics)
        warn_if_lost(training, best_epoch(training, self.metric, self.mode))

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Keep the model if it is the best."""
        if best_epoch(training, self.metric, self.mode) is summary:
            training.keep_model()
