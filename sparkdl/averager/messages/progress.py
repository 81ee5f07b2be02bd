"""How far a training has come, counted at commits; for checkpoints and workers.

A row counts as trained on when the round to which it contributed is committed, not before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from sparkdl.events import EpochSummary, WindowReport, are_measured, are_metrics

T = TypeVar("T")
_COUNTS = range(1 << 63)
_BY_NAME = {"metrics": are_metrics, "measured": are_measured}
"""Fields that hold numbers by name, and the type of those."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a worker continues: the first minibatch that no committed round contains."""

    epoch: int = 1
    """Epoch counted from 1."""
    step: int = 0
    """Optimizer steps since the start of training."""
    step_of_epoch: int = 0
    """Optimizer steps since the start of the epoch."""

    @classmethod
    def after(cls, report: WindowReport) -> Position:
        """The position after a committed window."""
        return cls(epoch=report.epoch, step=report.step, step_of_epoch=report.step_of_epoch)

    def next_epoch(self) -> Position:
        """The start of the following epoch."""
        return Position(epoch=self.epoch + 1, step=self.step)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far all workers have come together."""

    epoch: int
    """The current epoch, counted from 1."""
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

    @property
    def all_rounds(self) -> int:
        """Rounds committed in the training."""
        return self.rounds + sum(summary.rounds for summary in self.history)

    def as_json(self) -> dict[str, Any]:
        """For ``from_json``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Progress:
        """What ``as_json`` returned, perhaps through a file.

        Raises:
            AttributeError, KeyError, TypeError: it is something else.
        """
        numbers = {name: _checked(int, name, fields[name]) for name in ("epoch", "rounds")}
        return cls(
            **numbers,
            positions=tuple(_read(Position, each) for each in fields["positions"]),
            reports=tuple(_read(WindowReport, each) for each in fields["reports"]),
            history=tuple(_read(EpochSummary, each) for each in fields["history"]),
        )


def _read(kind: type[T], fields: Mapping[str, Any]) -> T:
    """One of our dataclasses of numbers."""
    hints = get_type_hints(kind)
    return kind(**{name: _checked(hints[name], name, value) for name, value in fields.items()})


def _checked(hint: Any, name: str, value: Any) -> Any:
    """A number of the expected type; integers are counts."""
    if name in _BY_NAME:
        if not _BY_NAME[name](value):
            raise TypeError(f"{name} is {value!r}")
        return value
    wanted = hint | int if hint in (float, float | None) else hint
    counts = hint in (int, int | None)
    if not isinstance(value, wanted) or (counts and value is not None and value not in _COUNTS):
        raise TypeError(f"{name} is {value!r}")
    return value
