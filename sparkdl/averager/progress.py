"""How far a training has come, as counted at commits; what a checkpoint says and a worker is told.

A row counts as trained on when the round to which it contributed is committed, not before.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sparkdl.events import EpochSummary, WindowReport


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a worker goes on: the first minibatch that no committed round contains."""

    epoch: int = 1
    """Epoch counted from 1."""
    step: int = 0
    """Optimizer steps since the start of training."""
    step_of_epoch: int = 0
    """Optimizer steps since the start of the epoch."""

    @classmethod
    def after(cls, report: WindowReport) -> Position:
        """The position behind a committed window."""
        return cls(epoch=report.epoch, step=report.step, step_of_epoch=report.step_of_epoch)

    def next_epoch(self) -> Position:
        """The start of the following epoch."""
        return Position(epoch=self.epoch + 1, step=self.step)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far all workers have come together."""

    epoch: int
    """The epoch that is under way, counted from 1."""
    rounds: int
    """Rounds committed in that epoch."""
    positions: tuple[Position, ...]
    """By rank."""
    reports: tuple[WindowReport, ...] = ()
    """The windows committed in that epoch."""
    history: tuple[EpochSummary, ...] = ()
    """The epochs before."""

    @classmethod
    def start(cls, world_size: int) -> Progress:
        """Nothing has been done."""
        return cls(epoch=1, rounds=0, positions=(Position(),) * world_size)

    def as_json(self) -> dict[str, Any]:
        """For ``from_json``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Progress:
        """What ``as_json`` returned, perhaps by way of a file.

        Raises:
            AttributeError, KeyError, TypeError: it is something else.
        """
        counts = _numbers({"epoch": fields["epoch"], "rounds": fields["rounds"]})
        return cls(
            **counts,
            positions=tuple(Position(**_numbers(each)) for each in fields["positions"]),
            reports=tuple(WindowReport(**_numbers(each)) for each in fields["reports"]),
            history=tuple(EpochSummary(**_numbers(each)) for each in fields["history"]),
        )


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that all are numbers, or None where they may be left out."""
    for name, value in fields.items():
        if not isinstance(value, (int, float, type(None))):
            raise TypeError(f"{name} is {value!r}")
    return fields
