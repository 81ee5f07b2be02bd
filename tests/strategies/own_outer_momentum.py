"""A synchronous strategy of one's own in one file: the example of docs/writing-a-strategy.md.

Wang et al. 2019, "SlowMo". With an outer momentum m, an outer learning rate a, and x the mean of
the workers' parameters, weighted by examples, after windows that all began with the center c:

    v  <-  m * v + (x - c)          c  <-  c + a * v          every worker goes on from c
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sparkdl.protocols import Batch
from sparkdl.strategies import (
    FULL_PRECISION,
    CenterUpdate,
    Contributions,
    Needs,
    Run,
    Strategy,
    WireFormat,
)


@dataclass(frozen=True)
class SlowMomentum(CenterUpdate):
    """Let the center go on in the direction in which it has moved."""

    momentum: float
    rate: float
    keeps = ("velocity",)

    def step(
        self,
        center: Tensor,
        change: Tensor,
        memory: Mapping[str, Tensor],
        contributions: Contributions,
    ) -> None:
        """The velocity takes up the workers' mean change."""
        velocity = memory["velocity"]
        velocity.mul_(self.momentum).add_(change)
        change.copy_(velocity).mul_(self.rate)


@dataclass(frozen=True)
class OuterMomentum(Strategy[None]):
    """Average after every ``period`` steps and at the end of an epoch, with momentum."""

    period: int = 5
    momentum: float = 0.5
    rate: float = 1.0

    @property
    def needs(self) -> Needs:
        """Each worker keeps its own optimizer's state."""
        return Needs(exchanges_optimizer_state=False)

    @property
    def wire_format(self) -> WireFormat:
        """Values, as they are."""
        return FULL_PRECISION

    @property
    def center_update(self) -> CenterUpdate:
        """The outer optimizer."""
        return SlowMomentum(self.momentum, self.rate)

    def after_step(self, run: Run, state: None, batch: Batch) -> None:
        """Exchange what was trained since the last time."""
        if run.step_of_epoch % self.period == 0 and not batch.last:
            self._exchange(run, last=False)

    def end_epoch(self, run: Run, state: None) -> None:
        """Exchange the rest."""
        self._exchange(run, last=True)

    def _exchange(self, run: Run, *, last: bool) -> None:
        segments = run.replica.segments(with_optimizer=False)
        run.averager.exchange(segments, run.close_window(last=last))
