"""What epochs came to, and which workers wait to be told.

A worker asks because its schedule follows the losses, or for leave to begin the next epoch, which
the driver gives where callbacks follow the run. Either way it is answered when the loss is known
for good: with held-out rows, once every rank has validated.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.averager import decisions as do
from sparkdl.averager import events as on
from sparkdl.averager.committed import CommittedProgress
from sparkdl.averager.shards import Shards
from sparkdl.errors import TrainingError
from sparkdl.events import EpochSummary


class EpochLosses:
    """Who is told what epochs came to, and when.

    Args:
        committed: how far the training has come.
        shards: what the workers have found in their rows.
        needs_approval: whether workers are told of an epoch only when the driver has approved it.
        metric: the metric that they follow instead of the loss; None if they follow that.

    Attributes:
        wanted: what each rank waits for that waits.
    """

    def __init__(
        self,
        committed: CommittedProgress,
        shards: Shards,
        *,
        needs_approval: bool,
        metric: str | None = None,
    ) -> None:
        self.wanted: dict[int, on.EpochLossesWanted] = {}
        self._committed = committed
        self._shards = shards
        self._needs_approval = needs_approval
        self._metric = metric
        self._known = self._approved = committed.epochs_with_known_loss(validates=True)

    def news(self) -> Sequence[EpochSummary]:
        """The epochs of which it has become known what they came to, each once."""
        validates = bool(self._shards.facts.held_out)
        before = self._known
        known = self._committed.epochs_with_known_loss(validates=validates)
        self._known = max(before, known)
        return self._committed.history[before:known]

    def approve(self, epoch: int) -> None:
        """Take note that the driver has looked at an epoch."""
        self._approved = max(self._approved, epoch)

    def want(self, event: on.EpochLossesWanted) -> None:
        """Have a worker wait.

        Raises:
            TrainingError: for an epoch that has not ended.
        """
        ended = self._committed.epoch - 1
        if event.epochs > ended:
            raise TrainingError(
                f"{event.member} wants to know what {event.epochs} epochs came to, and {ended} "
                "have ended"
            )
        self.wanted[event.member.rank] = event

    def answers(self) -> list[do.TellEpochLosses]:
        """What those are told who need not wait any more."""
        known = min(self._known, self._approved) if self._needs_approval else self._known
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
