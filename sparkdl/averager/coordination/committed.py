"""How far a run has come, counted at commits: positions, windows, epochs, losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from sparkdl.averager.messages.progress import Position, Progress
from sparkdl.averager.messages.worker_state import WorkerState
from sparkdl.events import (
    EpochSummary,
    MetricValue,
    ValidationReport,
    WindowReport,
    summarize_epoch,
    with_validation,
)


class CommittedProgress:
    """How far a run has come, counting only what has been committed.

    Args:
        progress: how far the training had come when the run began.
        kept: what was kept of each rank at that time.
        now: the time, in seconds.

    Attributes:
        round: rounds committed in this run.
        epoch: the current epoch, counted from 1.
        positions: where each rank continues, by rank.
        kept: what each rank sent to be kept with its last committed window; with position and
            center the worker continues exactly as it would have.
        commit_wanted: whether the driver wants a commit before the epoch ends; reset by the next.
    """

    def __init__(self, progress: Progress, kept: Mapping[int, WorkerState], now: float) -> None:
        self.round = 0
        self.epoch = progress.epoch
        self.positions = list(progress.positions)
        self._history = list(progress.history)
        self.kept = dict(kept)
        self.commit_wanted = False
        self._reports = list(progress.reports)
        self._first_round = -progress.rounds
        # By epoch and rank, for epochs whose summaries do not have them yet.
        self._validations: dict[int, dict[int, ValidationReport]] = {}
        self._not_counted: set[int] = set()
        self._states: dict[int, WorkerState] = {}
        self.start_epoch(now)

    @property
    def begun(self) -> bool:
        """Whether anything was ever committed, in this run or before it."""
        return self.round > self._first_round or self.epoch > 1

    def start_epoch(self, now: float) -> None:
        """Count the time from now on as the epoch's."""
        self._epoch_started = now

    @property
    def has_windows(self) -> bool:
        """Whether any window of the current epoch has been committed."""
        return bool(self._reports)

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether nothing has been committed since an epoch ended."""
        return self.epoch > 1 and self.round == self._first_round

    def commit(self, windows: Iterable[WindowReport], kept: Mapping[int, WorkerState]) -> None:
        """Count a round and its windows as done.

        Args:
            windows: by rank.
            kept: what to keep of the ranks that sent something.
        """
        self.round += 1
        self.commit_wanted = False
        self.kept |= kept
        for report in windows:
            self.positions[report.rank] = Position.after(report)
            self._reports.append(report)

    def end_epoch(self, now: float) -> EpochSummary:
        """Go on to the next epoch; returns the summary of the one that has ended."""
        seconds = now - self._epoch_started
        rounds = self.round - self._first_round
        summary = summarize_epoch(self.epoch, self._reports, rounds, seconds)
        self._history.append(summary)
        self.epoch += 1
        self.positions = [position.next_epoch() for position in self.positions]
        self._first_round = self.round
        self._reports = []
        self._states = {}
        self.start_epoch(now)
        return summary

    def validated(self, report: ValidationReport, states: WorkerState | None = None) -> None:
        """Add to an epoch's summary what a rank found on its held-out rows.

        Args:
            report: the loss.
            states: what its metrics have counted.
        """
        self._validations.setdefault(report.epoch, {})[report.rank] = report
        self._not_counted.add(report.epoch)
        if states is not None and report.epoch == self.epoch - 1:
            self._states[report.rank] = states

    def take_states(self) -> tuple[WorkerState | None, ...]:
        """What each rank's metrics counted after the last epoch; no longer kept here."""
        states, self._states = self._states, {}
        return tuple(states.get(rank) for rank in range(len(self.positions)))

    def measured(self, epoch: int, values: Mapping[str, MetricValue]) -> EpochSummary:
        """Add the values of the metrics to an epoch's summary, and return it."""
        summary = replace(self.history[epoch - 1], metrics=dict(values))
        self._history[epoch - 1] = summary
        return summary

    @property
    def validated_by(self) -> Set[int]:
        """The ranks that have reported on their held-out rows after the last epoch."""
        return self._validations.get(self.epoch - 1, {}).keys()

    def epochs_with_known_loss(self, *, validates: bool) -> int:
        """The number of epochs whose loss is final.

        Args:
            validates: whether that is the loss on held-out rows, which each rank must report.
        """
        told = len(self.validated_by) == len(self.positions) or not self.at_end_of_epoch
        return self.epoch - 1 if told or not validates else self.epoch - 2

    def epoch_losses(self, first: int, last: int, metric: str | None = None) -> tuple[Any, ...]:
        """The losses of epochs: on held-out rows if there are any, else in training.

        Args:
            first: the first epoch, counted from 1.
            last: the last epoch, included.
            metric: the metric that is followed instead of the loss.
        """
        epochs = self.history[first - 1 : last]
        if metric is not None:
            return tuple(summary.metrics[metric] for summary in epochs)
        return tuple(
            summary.loss if summary.validation_loss is None else summary.validation_loss
            for summary in epochs
        )

    @property
    def history(self) -> tuple[EpochSummary, ...]:
        """The epochs that have ended."""
        for index, summary in enumerate(self._history):
            if summary.epoch in self._not_counted:
                self._not_counted.discard(summary.epoch)
                found = self._validations[summary.epoch].values()
                self._history[index] = with_validation(summary, found)
        return tuple(self._history)

    def progress(self) -> Progress:
        """How far the training has come, to continue from."""
        return Progress(
            epoch=self.epoch,
            rounds=self.round - self._first_round,
            positions=tuple(self.positions),
            reports=tuple(self._reports),
            history=self.history,
        )
