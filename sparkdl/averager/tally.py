"""How far a run has come, counted at commits: positions, windows, epochs, losses. No locks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from sparkdl.averager.kept import KeptState
from sparkdl.averager.progress import Position, Progress
from sparkdl.events import (
    EpochSummary,
    ValidationReport,
    WindowReport,
    summarize_epoch,
    with_validation,
)


class Tally:
    """What has been committed; ``Rounds`` holds its lock.

    Args:
        progress: how far the training had come when the run began.
        kept: what was kept of each rank then.

    Attributes:
        round: rounds committed in this run.
        epoch: the epoch that is under way, counted from 1.
        positions: where each rank goes on, by rank.
        history: the epochs that have ended.
        kept: of each rank, what it sent with its last committed window to be kept; with position
            and center the worker goes on exactly as it would have.
    """

    def __init__(self, progress: Progress, kept: Mapping[int, KeptState]) -> None:
        self.round = 0
        self.epoch = progress.epoch
        self.positions = list(progress.positions)
        self.history = list(progress.history)
        self.kept = dict(kept)
        self._reports = list(progress.reports)
        self._first_round = -progress.rounds
        self._validations: dict[tuple[int, int], ValidationReport] = {}
        self.start_epoch()

    @property
    def begun(self) -> bool:
        """Whether anything was committed ever, in this run or before it."""
        return self.round > self._first_round or self.epoch > 1

    def start_epoch(self) -> None:
        """From now on the time counts as the epoch's."""
        self._epoch_started = time.monotonic()

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether nothing was committed since an epoch has ended."""
        return self.epoch > 1 and self.round == self._first_round

    @property
    def epoch_is_under_way(self) -> bool:
        """Whether this run has committed a round of the epoch."""
        return self.round > max(self._first_round, 0)

    def commit(self, windows: Iterable[WindowReport], kept: Mapping[int, KeptState]) -> None:
        """Count a round and its windows: now they have happened.

        Args:
            windows: by rank.
            kept: what is to be kept of the ranks that sent something.
        """
        self.round += 1
        self.kept |= kept
        for report in windows:
            self.positions[report.rank] = Position.after(report)
            self._reports.append(report)

    def end_epoch(self) -> EpochSummary:
        """Go on to the next epoch; returns what the one that has ended was like."""
        seconds = time.monotonic() - self._epoch_started
        rounds = self.round - self._first_round
        summary = summarize_epoch(self.epoch, self._reports, rounds, seconds)
        self.history.append(summary)
        self.epoch += 1
        self.positions = [position.next_epoch() for position in self.positions]
        self._first_round = self.round
        self._reports = []
        self.start_epoch()
        return summary

    def validated(self, report: ValidationReport) -> None:
        """Add to an epoch's summary what a rank found on its held-out rows."""
        self._validations[report.epoch, report.rank] = report
        for index, summary in enumerate(self.history):
            if summary.epoch == report.epoch:
                self.history[index] = with_validation(summary, self._validations.values())

    def progress(self) -> Progress:
        """How far the training has come, to go on from."""
        return Progress(
            epoch=self.epoch,
            rounds=self.round - self._first_round,
            positions=tuple(self.positions),
            reports=tuple(self._reports),
            history=tuple(self.history),
        )
