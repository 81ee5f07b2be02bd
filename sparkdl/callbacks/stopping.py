"""Stop when a loss or a metric no longer improves, or when the time is up.

Source: Prechelt 1998, "Early Stopping - But When?".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.arguments import as_number, convert_numbers
from sparkdl.callbacks.base import Callback, Training
from sparkdl.callbacks.best_epoch import (
    Mode,
    best_epoch,
    is_better_larger,
    require_measured,
    require_metric,
    value_of,
    warn_if_lost,
)
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import DataStatistics


@dataclass(frozen=True)
class EarlyStopping(Callback):
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
        require_metric(self.metric, self.mode)
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
        require_measured(type(self).__name__, self.metric, self.mode, training, statistics)
        if self.restore_best:
            warn_if_lost(training, self._best(training))
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
        larger = is_better_larger(training, self.metric, self.mode)
        training.stop(
            f"{self.metric} has not {'risen above' if larger else 'fallen below'} "
            f"{value_of(best, self.metric):.6g} (epoch {best.epoch}) for {self.patience} epochs"
        )

    def _best(self, training: Training) -> EpochSummary | None:
        return best_epoch(training, self.metric, self.mode, self.min_delta)


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
        self._look(training)

    def on_round(self, training: Training, reports: Sequence[WindowReport]) -> None:
        """Check the clock."""
        self._look(training)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Check the clock, even if an epoch has no rounds."""
        self._look(training)

    def _look(self, training: Training) -> None:
        if time.monotonic() >= training.began + self.seconds:
            training.stop(f"its time budget of {self.seconds:g} s is used up")
