"""Stop when a loss or a metric no longer improves, or when the time is up.

Source: Prechelt 1998, "Early Stopping - But When?".

Finds the best epoch by a loss or a metric, and returns its model, whatever follows it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sparkdl.arguments import as_number, convert_numbers
from sparkdl.callbacks.base import Callback, Training
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics

logger = logging.getLogger(__name__)

LOSSES = ("validation_loss", "loss")
"""The loss on held-out rows, or in training; anything else is the name of a metric."""
Mode = Literal["min", "max"]
"""Whether a smaller or a larger value is better."""
HOLD_OUT = (
    "there are none: set validationFraction, or name a column that marks them "
    "(validationIndicatorCol), or set metric='loss'"
)


class _Following(Callback):
    """Compares epochs by a loss or a metric.

    Attributes:
        metric: which one.
        mode: which values are better; None for what the metric says.
        min_delta: by how much an epoch must be better than the best one before it.
    """

    metric: str
    mode: Mode | None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        metric, mode = self.metric, self.mode
        if not isinstance(metric, str) or not metric:
            raise ConfigError(
                f"metric must be {' or '.join(LOSSES)}, or the name of a metric, got {metric!r}"
            )
        if mode is not None and mode not in get_args(Mode):
            raise ConfigError(f"mode must be 'min', 'max' or None, got {mode!r}")
        if metric in LOSSES and mode == "max":
            raise ConfigError(f"mode='max' would look for the largest {metric}: leave mode out")

    def _require_measured(self, training: Training, statistics: DataStatistics) -> None:
        """Check that what is followed will be known, and which values of it are better.

        Raises:
            ConfigError: one of the two will not be known.
        """
        name, metric, mode = type(self).__name__, self.metric, self.mode
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
                f"{name} follows '{metric}', which does not say whether a larger value is better: "
                "set mode='max' or mode='min'"
            )
        if mode is not None and higher is not None and higher != (mode == "max"):
            raise ConfigError(
                f"{name} has mode='{mode}', but a {'larger' if higher else 'smaller'} '{metric}' "
                "is better: leave mode out"
            )

    def _value(self, summary: EpochSummary) -> float:
        """The value that an epoch reached.

        Raises:
            ConfigError: it is not known, or not a number.
        """
        metric, epoch = self.metric, summary.epoch
        if metric == "loss":
            return summary.loss
        if metric == "validation_loss":
            if summary.validation_loss is None:
                raise ConfigError(f"epoch {epoch} has no loss on held-out rows, because {HOLD_OUT}")
            return summary.validation_loss
        if metric not in summary.metrics:
            raise ConfigError(
                f"epoch {epoch} has no '{metric}': it was trained without that metric, before the "
                "checkpoint that the fit resumes from. Start over (resume='never'), or follow one "
                "that was measured"
            )
        value = summary.metrics[metric]
        if not isinstance(value, (int, float)):
            raise ConfigError(
                f"'{metric}' came to {value!r:.80} in epoch {epoch}; only a metric with a single "
                "value can be followed, for example one with average='macro'"
            )
        return value

    def _prefers_larger(self, training: Training) -> bool:
        return self.mode == "max" if self.mode else bool(training.metrics.get(self.metric))

    def _best(self, training: Training) -> EpochSummary | None:
        """The epoch of the last improvement; None before the first. NaN is never one."""
        best, lowest = None, math.inf
        sign = -1.0 if self._prefers_larger(training) else 1.0
        for summary in training.history:
            value = sign * self._value(summary)
            value = math.inf if math.isnan(value) else value
            if best is None or value < lowest - self.min_delta:
                best, lowest = summary, value
        return best

    def _warn_if_lost(self, training: Training) -> None:
        """Warn if the best epoch's model is not in the checkpoint that the fit resumes from."""
        best = self._best(training)
        if best is not None and (training.kept_epoch or 0) < best.epoch:
            logger.warning(
                "epoch %d was the best before the checkpoint, but its model was not kept: the fit "
                "returns that of a better epoch, or of the last",
                best.epoch,
            )


@dataclass(frozen=True)
class ModelCheckpoint(_Following):
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

    def on_start(self, training: Training, statistics: DataStatistics) -> None:
        """Check that what is followed will be known."""
        self._require_measured(training, statistics)
        self._warn_if_lost(training)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Keep the model if it is the best."""
        if self._best(training) is summary:
            training.keep_model()


@dataclass(frozen=True)
class EarlyStopping(_Following):
    """End the training when a loss or a metric has not improved for some epochs.

    It decides by the history alone, so that a fit that resumes from a checkpoint stops where it
    would have stopped anyway; the best model so far is part of each checkpoint.

    Args:
        metric: ``validation_loss``, which needs held-out rows, ``loss``, the training loss, or the
            name of one of the estimator's ``metrics``.
        patience: epochs without improvement after which to stop, >= 1.
        min_delta: the smallest change that counts as an improvement, >= 0.
        restore_best: whether the fit returns the model of the best epoch, not of the last.
        mode: ``max`` or ``min``, whichever is better, for a metric that does not say so itself.

    Raises:
        ConfigError: an argument is out of range.
    """

    metric: str = "validation_loss"
    patience: int = 3
    min_delta: float = 0.0
    restore_best: bool = True
    mode: Mode | None = None

    def __post_init__(self) -> None:
        convert_numbers(self)
        super().__post_init__()
        if type(self.patience) is not int or self.patience < 1:
            raise ConfigError(
                f"patience must be a whole number of epochs >= 1, got {self.patience!r}"
            )
        least = as_number(self.min_delta)
        if least is None or least < 0:
            raise ConfigError(f"min_delta must be a number >= 0, got {self.min_delta!r}")
        if not isinstance(self.restore_best, bool):
            raise ConfigError(f"restore_best must be a bool, got {self.restore_best!r}")

    def on_start(self, training: Training, statistics: DataStatistics) -> None:
        """Check the epochs before a checkpoint, which may have been enough."""
        self._require_measured(training, statistics)
        if self.restore_best:
            self._warn_if_lost(training)
        self._stop_if_due(training)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Keep the model if it is the best; stop if the best one is long past."""
        if self.restore_best and self._best(training) is summary:
            training.keep_model()
        self._stop_if_due(training)

    def _stop_if_due(self, training: Training) -> None:
        best = self._best(training)
        if best is None or training.history[-1].epoch - best.epoch < self.patience:
            return
        direction = "risen above" if self._prefers_larger(training) else "fallen below"
        training.stop(
            f"{self.metric} has not {direction} {self._value(best):.6g} (epoch {best.epoch}) for "
            f"{self.patience} epochs"
        )


@dataclass(frozen=True)
class TimeBudget(Callback):
    """End the training at the first round after some time; the fit returns the model so far.

    Workers that exchange among themselves have a round a few seconds after the time is up. Others
    have theirs when their windows end, those of ``GossipAveraging`` at the end of an epoch.

    Args:
        seconds: counted from when the workers have read their rows, > 0. A fit that resumes from a
            checkpoint has the whole budget again.

    Raises:
        ConfigError: ``seconds`` is not a duration.
    """

    seconds: float

    def __post_init__(self) -> None:
        convert_numbers(self)
        seconds = as_number(self.seconds)
        if seconds is None or seconds <= 0:
            raise ConfigError(f"seconds must be a number > 0, got {self.seconds!r}")

    def on_tick(self, training: Training) -> None:
        """Check the clock, even during a long round."""
        if time.monotonic() >= training.began + self.seconds:
            training.stop(f"its time budget of {self.seconds:g} s is used up")

    def on_round(self, training: Training, reports: Sequence[WindowReport]) -> None:
        """Check the clock."""
        self.on_tick(training)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Check the clock, even if an epoch has no rounds."""
        self.on_tick(training)
