"""An HTML page that shows where a training's time went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.callbacks.base import Callback, Training
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.report.page import save_report

EVERY_S = 30.0
"""Seconds between two versions while the training runs."""


@dataclass(frozen=True)
class TrainingReport(Callback):
    """Write a training's report: now and then while it runs, and at its end, however it ends.

    ``model.summary.save_report(path)`` writes the same after a successful fit.

    Args:
        path: where to write it; a URI that pyarrow.fs takes (``s3://bucket/report.html``), or a
            path in the driver. An existing file is replaced.

    Raises:
        ConfigError: the path is not one.
    """

    observer = True

    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f"path must be a file to write, got {self.path!r}")

    def on_start(self, training: Training, statistics: DataStatistics) -> None:
        """Write the first one: a path that cannot be written to must not wait until the end."""
        save_report(training.recording, self.path)

    def on_round(self, training: Training, reports: Sequence[WindowReport]) -> None:
        """Rewrite it if the last one is old."""
        self._write_if_due(training)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Rewrite it if the last one is old."""
        self._write_if_due(training)

    def on_end(self, training: Training, error: BaseException | None) -> None:
        """Write the final version."""
        save_report(training.recording, self.path)

    def _write_if_due(self, training: Training) -> None:
        now = time.monotonic()
        if now - training.kept.get(self, training.began) >= EVERY_S:
            training.kept[self] = now
            save_report(training.recording, self.path)
