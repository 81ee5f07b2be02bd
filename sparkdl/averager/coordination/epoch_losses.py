"""Epochs' losses, and which workers wait for them.

A worker asks because its schedule follows the losses, or for leave to begin the next epoch, which
the driver gives where callbacks follow the run. Either way the answer comes once the loss is final:
with held-out rows, once every rank has validated.
"""

from __future__ import annotations

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.committed import CommittedProgress
from sparkdl.averager.coordination.decisions import Decision
from sparkdl.averager.coordination.shards import Shards
from sparkdl.averager.messages.run_events import EpochCounted, EpochValidated
from sparkdl.errors import TrainingError
from sparkdl.events import EpochSummary


class EpochLosses:
    """Who is told epochs' losses, and when.

    Args:
        committed: how far the training has come.
        shards: what the workers found in their rows.
        followed: whether callbacks follow the run: they are told of each epoch first, and workers
            only once the driver has approved it.
        measures: whether the driver computes metrics from what the workers count on held-out rows.
        metric: the metric that workers follow instead of the loss; None for the loss.

    Attributes:
        wanted: what each waiting rank waits for.
    """

    def __init__(
        self,
        committed: CommittedProgress,
        shards: Shards,
        *,
        followed: bool,
        measures: bool,
        metric: str | None = None,
    ) -> None:
        self.wanted: dict[int, on.EpochLossesWanted] = {}
        self._committed = committed
        self._shards = shards
        self._followed = followed
        self._measures = measures
        self._metric = metric
        self._known = self._approved = committed.epochs_with_known_loss(validates=True)

    def validated(self, event: on.Validated) -> list[Decision]:
        """Take what a worker found on its held-out rows."""
        self._committed.validated(event.report, event.states if self._measures else None)
        return self.news()

    def news(self) -> list[Decision]:
        """What to tell driver and workers about epochs that have now ended or been validated."""
        validates = bool(self._shards.statistics.held_out)
        before = self._known
        known = self._committed.epochs_with_known_loss(validates=validates)
        self._known = max(before, known)
        decided: list[Decision] = []
        for summary in self._committed.history[before:known]:
            if self._measures:
                states = self._committed.take_states()
                decided.append(do.Report(EpochCounted(summary.epoch, states)))
            else:
                decided += self._for_callbacks(summary)
        return decided + self._answers()

    def measured(self, event: on.EpochMeasured) -> list[Decision]:
        """Take the values of an epoch's metrics."""
        return self._for_callbacks(self._committed.measured(event.epoch, event.values))

    def approve(self, epoch: int) -> list[Decision]:
        """Take note that the driver has approved an epoch."""
        self._approved = max(self._approved, epoch)
        return self._answers()

    def want(self, event: on.EpochLossesWanted) -> list[Decision]:
        """Have a worker wait, unless what it wants to know is known already.

        Raises:
            TrainingError: it asks about an epoch that has not ended.
        """
        ended = self._committed.epoch - 1
        if event.epochs > ended:
            raise TrainingError(
                f"{event.member} asked for the losses of {event.epochs} epochs, but only {ended} "
                "have ended"
            )
        self.wanted[event.member.rank] = event
        return self._answers()

    def _for_callbacks(self, summary: EpochSummary) -> list[Decision]:
        return [do.Report(EpochValidated(summary))] if self._followed else []

    def _answers(self) -> list[Decision]:
        """The answers to workers that need not wait any more."""
        known = min(self._known, self._approved) if self._followed else self._known
        answered = [event for event in self.wanted.values() if event.epochs <= known]
        for event in answered:
            del self.wanted[event.member.rank]
        return [
            do.TellEpochLosses(
                event.member,
                self._committed.epoch_losses(event.known + 1, event.epochs, self._metric),
            )
            for event in answered
        ]
