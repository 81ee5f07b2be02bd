"""Return the best epoch's model, whatever follows it."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.callbacks.base import Callback, Training
from sparkdl.callbacks.best_epoch import (
    Mode,
    best_epoch,
    require_measured,
    require_metric,
    warn_if_lost,
)
from sparkdl.events import EpochSummary
from sparkdl.feed.statistics.shards import DataStatistics


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
