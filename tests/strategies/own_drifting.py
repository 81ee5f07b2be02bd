"""A strategy of one's own that keeps something on each worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkdl.averager.values.wire_format import FULL_PRECISION, WireFormat
from sparkdl.protocols import Batch
from sparkdl.strategies import Needs, Run, Strategy


@dataclass
class Drift:
    """Where the parameters of one worker drift to, and since how many steps."""

    direction: Tensor
    steps: int = 0


@dataclass(frozen=True)
class Drifting(Strategy[Drift]):
    """Averages after each step, and pushes each worker by what it has seen before."""

    @property
    def wire_format(self) -> WireFormat:
        return FULL_PRECISION

    @property
    def needs(self) -> Needs:
        return Needs(exchanges_optimizer_state=True)

    def start(self, run: Run) -> Drift:
        return Drift(torch.zeros_like(self._segments(run)[0]))

    def saved_state(self, state: Drift) -> Mapping[str, Any]:
        return {"direction": state.direction, "steps": state.steps}

    def restore_state(self, state: Drift, saved: Mapping[str, Any]) -> None:
        state.direction.copy_(saved["direction"])
        state.steps = saved["steps"]

    def after_step(self, run: Run, state: Drift, batch: Batch) -> None:
        parameters = self._segments(run)[0]
        state.steps += 1
        state.direction.mul_(0.9).add_(parameters, alpha=0.01 / state.steps)
        parameters.add_(state.direction)
        if not batch.last:
            run.averager.exchange(self._segments(run), run.close_window(last=False))

    def end_epoch(self, run: Run, state: Drift) -> None:
        run.averager.exchange(self._segments(run), run.close_window(last=True))

    def _segments(self, run: Run) -> list[Tensor]:
        return run.replica.segments(with_optimizer=True)
