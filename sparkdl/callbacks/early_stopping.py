"""Stop when the loss does not fall any more (Prechelt 1998, "Early Stopping - But When?")."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkdl.callbacks.base import Callback, Training
from sparkdl.callbacks.best_epoch import (
    Metric,
    best_epoch,
    require_measured,
    require_metric,
    value_of,
    warn_if_lost,
)
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary
from sparkdl.feed.facts import DataFacts


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """End the training when the loss has not fallen for some epochs.

    What it decides follows from the history alone, so that a fit that goes on from a checkpoint
    stops where it would have stopped; the best model so far is part of each checkpoint.

    Args:
        metric: ``validation_loss``, which needs held-out rows, or ``loss``, the training loss.
        patience: epochs without improvement after which it ends, >= 1.
        min_delta: by how much the loss has to fall to count as an improvement, >= 0.
        restore_best: whether the fit returns the model of the best epoch, not of the last.

    Raises:
        ConfigError: an argument is out of range.
    """

    metric: Metric = "validation_loss"
    patience: int = 3
    min_delta: float = 0.0
    restore_best: bool = True

    def __post_init__(self) -> None:
        require_metric(self.metric)
        if type(self.patience) is not int or self.patience < 1:
            raise ConfigError(
                f"patience must be a whole number >= 1 of epochs, got {self.patience!r}"
            )
        if not isinstance(self.min_delta, (int, float)) or not 0 <= self.min_delta < math.inf:
            raise ConfigError(f"min_delta must be a number >= 0, got {self.min_delta!r}")
        if not isinstance(self.restore_best, bool):
            raise ConfigError(f"restore_best must be a bool, got {self.restore_best!r}")

    def on_start(self, training: Training, facts: DataFacts) -> None:
        """Look at the epochs before a checkpoint; they may have been enough."""
        require_measured(type(self).__name__, self.metric, facts)
        if self.restore_best:
            warn_if_lost(training, self._best(training))
        self._stop_if_due(training)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Keep the model if it is the best, and stop if the best one was long ago."""
        if self.restore_best and self._best(training) is summary:
            training.keep_model()
        self._stop_if_due(training)

    def _stop_if_due(self, training: Training) -> None:
        best = self._best(training)
        if best is None or training.history[-1].epoch - best.epoch < self.patience:
            return
        training.stop(
            f"{self.metric} has not fallen below {value_of(best, self.metric):.6g} (epoch "
            f"{best.epoch}) for {self.patience} epochs"
        )

    def _best(self, training: Training) -> EpochSummary | None:
        return best_epoch(training.history, self.metric, self.min_delta)
