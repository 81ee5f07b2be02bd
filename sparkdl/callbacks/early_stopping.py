"""Stop when the loss does not fall any more (Prechelt 1998, "Early Stopping - But When?")."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparkdl.callbacks.base import Callback, Training
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary
from sparkdl.feed.facts import DataFacts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """End the training when the loss has not fallen for some epochs.

    What it decides follows from the history alone, so that a fit that goes on from a checkpoint
    stops where it would have stopped.

    Args:
        metric: ``validation_loss``, which needs held-out rows (``validationIndicatorCol``), or
            ``loss``, the training loss.
        patience: epochs without improvement after which it ends, >= 1.
        min_delta: by how much the loss has to fall to count as an improvement, >= 0.
        restore_best: whether the fit returns the model of the best epoch, not of the last.

    Raises:
        ConfigError: an argument is out of range.
    """

    metric: Literal["validation_loss", "loss"] = "validation_loss"
    patience: int = 3
    min_delta: float = 0.0
    restore_best: bool = True

    def __post_init__(self) -> None:
        if self.metric not in ("validation_loss", "loss"):
            raise ConfigError(f"metric must be validation_loss or loss, got {self.metric!r}")
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
        if self.metric == "validation_loss" and facts.complete and not facts.held_out:
            raise ConfigError(
                "EarlyStopping follows the loss on held-out rows, and there are none: name a "
                "column that marks them (validationIndicatorCol), or set metric='loss'"
            )
        best = self._best(training.history)
        if self.restore_best and best is not None and best < len(training.history) - 1:
            logger.warning(
                "of the epochs before the checkpoint epoch %d was the best, whose model is not "
                "in it: the fit returns that of a better one, or of the last",
                training.history[best].epoch,
            )
        self._stop_if_due(training)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Keep the model if it is the best, and stop if the best one was long ago."""
        if self.restore_best and self._best(training.history) == len(training.history) - 1:
            training.keep_model()
        self._stop_if_due(training)

    def _stop_if_due(self, training: Training) -> None:
        best = self._best(training.history)
        if best is None or len(training.history) - 1 - best < self.patience:
            return
        epoch = training.history[best]
        training.stop(
            f"{self.metric} has not fallen below {self._value(epoch):.6g} (epoch {epoch.epoch}) "
            f"for {self.patience} epochs"
        )

    def _best(self, history: Sequence[EpochSummary]) -> int | None:
        """Where the last improvement is; None before the first epoch."""
        best = None
        for index, summary in enumerate(history):
            value = self._value(summary)
            if best is None or value < self._value(history[best]) - self.min_delta:
                best = index
        return best

    def _value(self, summary: EpochSummary) -> float:
        value = summary.validation_loss if self.metric == "validation_loss" else summary.loss
        # NaN is never an improvement.
        return math.inf if value is None or math.isnan(value) else value
