"""An asynchronous strategy of one's own in one file: nobody waits, and stale changes count less.

Zhang et al. 2016, "Staleness-aware async-SGD". With x_r the parameters of worker r after a window
that began with the center c_r, and s how often the center c was updated since then:

    c  <-  c + a * (x_r - c_r) / (1 + s)          worker r alone goes on from c
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sparkdl.protocols import Batch, Segment
from sparkdl.strategies import (
    CHANGES,
    CenterUpdate,
    Contributions,
    Needs,
    Nobody,
    RoundPolicy,
    Run,
    Strategy,
    WireFormat,
)


@dataclass(frozen=True)
class StaleCountLess(CenterUpdate):
    """The center moves by part of each change, the smaller the staler it is."""

    rate: float
    by_share = False  # staleness says how much a change counts

    def updates(self, segment: Segment) -> bool:
        """Buffers too: whole changes of each worker would add up to more than any of them saw."""
        return True

    def step(
        self,
        center: Tensor,
        change: Tensor,
        memory: Mapping[str, Tensor],
        contributions: Contributions,
    ) -> None:
        """Part of the change."""
        change.mul_(self.rate / (1 + contributions.staleness))


@dataclass(frozen=True)
class EachForItself(Strategy[None]):
    """Exchange with the center after every ``period`` steps, each worker for itself."""

    period: int = 1
    rate: float = 1.0

    @property
    def needs(self) -> Needs:
        """Each worker keeps its own optimizer's state."""
        return Needs(exchanges_optimizer_state=False)

    @property
    def wire_format(self) -> WireFormat:
        """What has changed: values would undo what others have added meanwhile."""
        return CHANGES

    @property
    def center_update(self) -> CenterUpdate:
        """By staleness."""
        return StaleCountLess(self.rate)

    @property
    def round_policy(self) -> RoundPolicy:
        """Nobody is waited for."""
        return Nobody()

    def after_step(self, run: Run, state: None, batch: Batch) -> None:
        """Exchange what was trained since the last time."""
        if run.step_of_epoch % self.period == 0 and not batch.last:
            self._exchange(run, last=False)

    def end_epoch(self, run: Run, state: None) -> None:
        """Exchange the rest, and wait for the epoch's end."""
        self._exchange(run, last=True)

    def _exchange(self, run: Run, *, last: bool) -> None:
        segments = run.replica.segments(with_optimizer=False)
        run.averager.exchange(segments, run.close_window(last=last))
