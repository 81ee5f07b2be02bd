"""What workers report, and what the driver makes of it for progress bars and histories."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowReport:
    """What one worker did since its last contribution; travels with each contribution."""

    rank: int
    """The worker's rank."""
    epoch: int
    """Epoch counted from 1."""
    step: int
    """The worker's optimizer steps since the start of training."""
    examples: int
    """Rows trained on in this window; the weight of the contribution."""
    loss_sum: float
    """Sum over those rows of the loss (the minibatch mean times its rows)."""
    last: bool
    """Whether this window was the worker's last of the epoch."""
    step_of_epoch: int = 0
    """The worker's optimizer steps since the start of the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSummary:
    """One row of a model's training history."""

    epoch: int
    """Epoch counted from 1."""
    loss: float
    """Mean training loss over the rows of the epoch, as seen by the replicas while they trained."""
    examples: int
    """Rows trained on by all workers together."""
    rounds: int
    """Averaging rounds in the epoch."""
    seconds: float
    """Wall-clock seconds from the end of the epoch before."""

    @property
    def examples_per_second(self) -> float:
        """Rows per second of all workers together."""
        return self.examples / self.seconds if self.seconds > 0 else float("inf")


def summarize_epoch(
    epoch: int, windows: Iterable[WindowReport], rounds: int, seconds: float
) -> EpochSummary:
    """Add up what the workers reported of one epoch.

    Args:
        epoch: epoch counted from 1.
        windows: every report of that epoch, in any order.
        rounds: averaging rounds in the epoch.
        seconds: wall-clock duration of the epoch.
    """
    # Sorted, because floating-point sums depend on the order in which the reports arrived.
    ordered = sorted(windows, key=lambda window: (window.rank, window.step))
    examples = sum(window.examples for window in ordered)
    loss_sum = sum(window.loss_sum for window in ordered)
    return EpochSummary(
        epoch=epoch,
        loss=loss_sum / examples if examples else float("nan"),
        examples=examples,
        rounds=rounds,
        seconds=seconds,
    )
