"""Slots that a run finds free, and what its callbacks were told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sparkdl.callbacks import Callback, Training
from sparkdl.events import EpochSummary


@dataclass
class Free:
    """Slots that become free at the ends of epochs, as a list says."""

    after: Sequence[int]
    given: int = 0
    ranks_a_task: int = 1
    asked: int = field(default=0)

    @property
    def free(self) -> int:
        self.asked += 1
        return self.after[self.asked - 1] if self.asked <= len(self.after) else 0

    def give(self) -> None:
        self.given += 1


class Heard(Callback):
    """What callbacks were told of each epoch, and which epochs a report would have shown then."""

    def __init__(self) -> None:
        self.told: list[EpochSummary] = []
        self.recorded: list[list[int]] = []

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        self.told.append(summary)
        self.recorded.append([each.epoch for each in training.recording.history])
