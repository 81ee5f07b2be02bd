"""How far a run has come, counted at commits: positions, windows, epochs, losses.

A worker asks for losses because its schedule follows them, or for leave to begin the next epoch,
which the driver gives where callbacks follow the run. Either way the answer comes once the loss is
final: with held-out rows, once every rank has validated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.run_events import (
    EpochCounted,
    EpochValidated,
    Position,
    Progress,
    WorkerState,
)
from sparkdl.errors import TrainingError
from sparkdl.events import (
    EpochSummary,
    MetricValue,
    ValidationReport,
    WindowReport,
    WindowSums,
    summarize_epoch,
    with_validation,
)

if TYPE_CHECKING:
    from sparkdl.averager.coordination.run_state import RunState


class CommittedProgress:
    """What has been committed.

    Args:
        progress: how far the training had come when the run began.
        kept: what was kept of each rank at that time.
        now: the time, in seconds.
        validated: whether the loss of the last epoch before was known then.

    Attributes:
        round: rounds committed in this run.
        epoch: the epoch under way, counted from 1.
        kept: what each rank sent to be kept with its last committed window; with that, its position
            and the center, the worker continues exactly as it would have.
        commit_wanted: whether the driver wants a commit before the epoch ends; set until there is
            one.
        since: where these workers began together.
    """

    def __init__(
        self,
        progress: Progress,
        kept: Mapping[int, WorkerState],
        now: float,
        validated: bool = False,
    ) -> None:
        self.round = 0
        self.epoch = progress.epoch
        self.since = progress.since
        self._validated = validated
        # Up to date once the ranks' newest windows, in ``_moved``, are taken into account.
        self._positions = list(progress.positions)
        self._moved: dict[int, WindowReport] = {}
        self._history = list(progress.history)
        self.kept = dict(kept)
        self.commit_wanted = False
        # By rank, of the epoch under way.
        self._sums = {each.rank: replace(each) for each in progress.sums}
        self._first_round = -progress.rounds
        # Of the epoch under way, at its last commit; a run that goes on from there adds to it.
        self._seconds = progress.seconds
        # By rank, of the last epoch that ended; and whether its summary includes them all.
        self._validations: dict[int, ValidationReport] = {}
        self._counted = True
        self._states: dict[int, WorkerState] = {}
        self.start_epoch(now)

    @property
    def positions(self) -> Sequence[Position]:
        """Where each rank continues, by rank."""
        for rank, report in self._moved.items():
            self._positions[rank] = Position.after(report)
        self._moved.clear()
        return self._positions

    @property
    def begun(self) -> bool:
        """Whether anything was ever committed, in this run or before it."""
        return self.round > self._first_round or self.epoch > 1

    def start_epoch(self, now: float) -> None:
        """Start counting the epoch's time, or go on from the last commit."""
        self._epoch_started = now - self._seconds

    @property
    def has_windows(self) -> bool:
        """Whether any window of the epoch under way was committed."""
        return bool(self._sums)

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether nothing has been committed since the end of an epoch without a known loss."""
        return self.epoch > 1 and self.round == self._first_round and not self._validated

    def commit(
        self, windows: Iterable[WindowReport], kept: Mapping[int, WorkerState], now: float
    ) -> None:
        """Count a round and its windows as having happened.

        Args:
            windows: the windows' reports, by rank.
            kept: what to keep of the ranks that sent something.
            now: the time, in seconds.
        """
        self.round += 1
        self._seconds = now - self._epoch_started
        self.commit_wanted = False
        self.kept |= kept
        for window in windows:
            self._moved[window.rank] = window
            if window.rank not in self._sums:
                self._sums[window.rank] = WindowSums(rank=window.rank)
            self._sums[window.rank].add(window)

    def end_epoch(self, now: float) -> EpochSummary:
        """Go on to the next epoch; returns the summary of the one that ended."""
        seconds = now - self._epoch_started
        rounds = self.round - self._first_round
        workers = len(self._positions)
        summary = summarize_epoch(self.epoch, self._sums.values(), rounds, seconds, workers)
        self._history = [*self.history, summary]
        self.epoch += 1
        self._positions = [position.next_epoch() for position in self.positions]
        self._first_round = self.round
        self._sums, self._validations, self._states = {}, {}, {}
        self._validated = False
        self._seconds = 0.0
        self.start_epoch(now)
        return summary

    def validated(self, report: ValidationReport, states: WorkerState | None = None) -> None:
        """Add to the last epoch's summary what a rank found on its held-out rows.

        Args:
            report: the loss.
            states: what its metrics counted.
        """
        if report.epoch != self.epoch - 1:
            return  # an epoch ends only once everyone has validated the one before
        self._validations[report.rank] = report
        self._counted = False
        if states is not None:
            self._states[report.rank] = states

    def take_states(self) -> tuple[WorkerState | None, ...]:
        """What each rank's metrics counted after the last epoch; no longer kept here."""
        states, self._states = self._states, {}
        return tuple(states.get(rank) for rank in range(len(self._positions)))

    def measured(self, epoch: int, values: Mapping[str, MetricValue]) -> EpochSummary:
        """Add the metrics' values to an epoch's summary, and return it."""
        summary = replace(self.history[epoch - 1], metrics=dict(values))
        self._history[epoch - 1] = summary
        return summary

    @property
    def validated_by(self) -> Set[int]:
        """The ranks that have reported their validation after the last epoch."""
        return self._validations.keys()

    def epochs_with_known_loss(self, *, validates: bool) -> int:
        """The number of epochs whose loss is final.

        Args:
            validates: whether it is the loss on held-out rows, which each rank has to report.
        """
        told = len(self.validated_by) == len(self._positions) or not self.at_end_of_epoch
        return self.epoch - 1 if told or not validates else self.epoch - 2

    def epoch_losses(self, first: int, last: int, metric: str | None = None) -> tuple[Any, ...]:
        """The losses of epochs: on held-out rows if there are any, else in training.

        Args:
            first: the first epoch, counted from 1.
            last: the last epoch, inclusive.
            metric: the metric to follow instead of the loss.
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
        if self._history and not self._counted:
            self._history[-1] = with_validation(self._history[-1], self._validations.values())
            self._counted = True
        return tuple(self._history)

    def progress(self) -> Progress:
        """How far the training has come, to continue from."""
        return Progress(
            epoch=self.epoch,
            rounds=self.round - self._first_round,
            positions=tuple(self.positions),
            sums=tuple(replace(self._sums[rank]) for rank in sorted(self._sums)),
            history=self.history,
            since=self.since,
            seconds=self._seconds,
        )


class EpochLosses:
    """Who is told epochs' losses, and when.

    Args:
        run: how it stands. If callbacks follow it, they are told of each epoch first, and workers
            only once the driver has approved it.

    Attributes:
        wanted: who waits, by rank: the worker, for how many epochs it knows the loss, and for how
            many it wants to know it.
        known: how many epochs' losses are final; the driver has been told of these epochs.
    """

    def __init__(self, run: RunState) -> None:
        self.wanted: dict[int, tuple[Member, int, int]] = {}
        self._run = run
        self.known = self._approved = run.committed.epochs_with_known_loss(validates=True)

    @property
    def waits_for_driver(self) -> bool:
        """Whether those who wait do so for the driver alone: for its callbacks or its metrics."""
        validates = bool(self._run.shards.statistics.held_out)
        ended = self._run.committed.epochs_with_known_loss(validates=validates)
        return any(epochs <= ended for _, _, epochs in self.wanted.values())

    def validated(self, report: ValidationReport, states: WorkerState | None) -> None:
        """Take what a worker found on its held-out rows."""
        self._run.committed.validated(report, states if self._run.spec.measures else None)
        self.news()

    def news(self) -> None:
        """Tell driver and workers of epochs that have now ended or been validated."""
        run, before = self._run, self.known
        validates = bool(run.shards.statistics.held_out)
        known = run.committed.epochs_with_known_loss(validates=validates)
        self.known = max(before, known)
        for summary in run.committed.history[before:known]:
            if run.spec.measures:
                run.do.report(EpochCounted(summary.epoch, run.committed.take_states()))
            else:
                self._for_callbacks(summary)
        self._answer()

    def measured(self, epoch: int, values: Mapping[str, MetricValue]) -> None:
        """Take the values of an epoch's metrics."""
        self._for_callbacks(self._run.committed.measured(epoch, values))

    def approve(self, epoch: int) -> None:
        """Note that the driver has approved an epoch."""
        self._approved = max(self._approved, epoch)
        self._answer()

    def want(self, member: Member, known: int, epochs: int) -> None:
        """Have a worker wait, unless what it wants to know is known already.

        Raises:
            TrainingError: it asks about an epoch that has not ended.
        """
        ended = self._run.committed.epoch - 1
        if epochs > ended:
            raise TrainingError(
                f"{member} asked for the losses of {epochs} epochs, but only {ended} have ended"
            )
        self.wanted[member.rank] = member, known, epochs
        self._answer()

    def _for_callbacks(self, summary: EpochSummary) -> None:
        if self._run.spec.followed:
            self._run.do.report(EpochValidated(summary))

    def _answer(self) -> None:
        """Answer the workers that need not wait any more."""
        run = self._run
        ended = min(self.known, self._approved) if run.spec.followed else self.known
        answered = [each for each in self.wanted.values() if each[2] <= ended]
        for member, known, epochs in answered:
            del self.wanted[member.rank]
            losses = run.committed.epoch_losses(known + 1, epochs, run.spec.metric)
            run.do.send_epoch_losses(member, losses)
            run.members.restart_clock()
