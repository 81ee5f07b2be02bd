"""Return the best epoch's model, whatever follows it."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.callbacks.base import Callback, Training
from sparkdl.callbacks.best_epoch import (
    Metric,
    best_epoch,
    require_measured,
    require_metric,
    warn_if_lost,
)
from sparkdl.events import EpochSummary
from sparkdl.feed.facts import DataFacts


@dataclass(frozen=True)
class ModelCheckpoint(Callback):
    """Have the fit return the model of the epoch with the lowest loss, and train all epochs.

    The best model so far is part of each checkpoint (``checkpointPath``), so that a fit that goes
    on from one returns what it would have returned.

    Args:
        metric: ``validation_loss``, which needs held-out rows, or ``loss``, the training loss.

    Raises:
        ConfigError: there is no such metric.
    """

    metric: Metric = "validation_loss"

    def __post_init__(self) -> None:
        require_metric(self.metric)

    def on_start(self, training: Training, facts: DataFacts) -> None:
        """See whether there will be such a loss."""
        require_measured(type(self).__name__, self.metric, facts)
        warn_if_lost(training, best_epoch(training.history, self.metric))

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Keep the model if it is the best."""
        if best_epoch(training.history, self.metric) is summary:
            training.keep_model()
