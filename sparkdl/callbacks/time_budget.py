"""Stop when the time is up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.arguments import as_number, convert_numbers
from sparkdl.callbacks.base import Callback, Training
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary, WindowReport


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
