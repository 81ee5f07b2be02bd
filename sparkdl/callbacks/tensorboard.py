"""A training's curves for TensorBoard.

An HTML page that shows where a training's time went.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.callbacks.base import Callback, Training, imported
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.phases import PHASES
from sparkdl.report.history import VALIDATION, metrics_of
from sparkdl.report.page import save_report

TENSORBOARD = {"package": "tensorboard", "extra": "tensorboard", "who": "TensorBoard(log_dir)"}


@dataclass(frozen=True)
class TensorBoard(Callback):
    """Write losses, metrics, speed and where time goes for TensorBoard.

    All values are plotted over the optimizer steps of the worker that has taken the most. A fit
    that resumes from a checkpoint continues the same run: what came after the checkpoint is
    replaced. ``tensorboard --logdir LOG_DIR`` shows them.

    Args:
        log_dir: a directory in the driver, or whatever else TensorBoard writes to; one for each
            training.

    Raises:
        ConfigError: ``log_dir`` is not a string.
        SetupError: tensorboard is not installed in the driver's Python.
    """

    observer = True

    log_dir: str

    def __post_init__(self) -> None:
        if not isinstance(self.log_dir, str) or not self.log_dir:
            raise ConfigError(f"log_dir must be a directory to write to, got {self.log_dir!r}")

    def on_start(self, training: Training, statistics: DataStatistics) -> None:
        """Open the files, and hide what they hold for steps after the checkpoint."""
        imported("tensorboard", **TENSORBOARD)
        module = imported("torch.utils.tensorboard", **TENSORBOARD)
        purge = training.step + 1 if training.resumed else None
        writer = module.SummaryWriter(self.log_dir, purge_step=purge)
        training.kept[self] = writer, 0.0
        if not training.resumed:
            setup = training.recording.setup
            settings = {"model": setup.model, "strategy": setup.strategy, **setup.settings}
            rows = "\n".join(f"| {_cell(k)} | {_cell(v)} |" for k, v in sorted(settings.items()))
            writer.add_text("settings", f"| name | value |\n|---|---|\n{rows}", 0)

    def on_round(self, training: Training, reports: Sequence[WindowReport]) -> None:
        """Write the mean loss of the round's windows."""
        divisor = sum(report.divisor for report in reports)
        if divisor:
            mean = sum(report.loss_sum for report in reports) / divisor
            training.kept[self][0].add_scalar("loss/round", mean, training.step)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Write the epoch's numbers."""
        writer, before = training.kept[self]
        seconds = training.recording.seconds.sum(axis=0)
        # Where the workers' time went since the last epoch.
        gone = seconds - before
        training.kept[self] = writer, seconds
        values = {
            f"{_curve(name, summary)}/{_kind(name, summary)}": value
            for name, value in metrics_of(summary).items()
        }
        values["speed/rows_per_second"] = summary.examples_per_second
        values["speed/epoch_seconds"] = summary.seconds
        whole = float(gone.sum()) or 1.0
        values |= {f"time/{name}": float(gone[k]) / whole for k, name in enumerate(PHASES)}
        for name, value in values.items():
            writer.add_scalar(name, value, training.step)
        writer.flush()

    def on_end(self, training: Training, error: BaseException | None) -> None:
        """Close the files."""
        writer, _ = training.kept.pop(self, (None, None))
        if writer is not None:
            writer.close()


def _curve(name: str, summary: EpochSummary) -> str:
    """The number that a curve shows; two metrics get two curves, whatever their names."""
    base = name.removeprefix(VALIDATION)
    both = name in summary.metrics and base in summary.metrics
    return name if both else base


def _kind(name: str, summary: EpochSummary) -> str:
    held_out = name.startswith(VALIDATION) or name in summary.metrics
    return "validation" if held_out else "training"


def _cell(value: object) -> str:
    """Text as a cell of a Markdown table, with nothing in it taken for markup."""
    return "`" + json.dumps(str(value))[1:-1].replace("`", "'").replace("|", "\\|") + "`"


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
        now = time.monotonic()
        if now - training.kept.get(self, training.began) >= EVERY_S:
            training.kept[self] = now
            save_report(training.recording, self.path)

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        """Rewrite it if the last one is old."""
        self.on_round(training, ())

    def on_end(self, training: Training, error: BaseException | None) -> None:
        """Write the final version."""
        save_report(training.recording, self.path)
