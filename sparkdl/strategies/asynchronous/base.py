"""The base of asynchronous strategies: the changes of windows meet the center one by one."""

from __future__ import annotations

from sparkdl.averager.values.wire_format import Changes, WireFormat
from sparkdl.protocols import Batch
from sparkdl.strategies.base import Needs, Run, Strategy


class ContributesChanges(Strategy[None]):
    """Each worker contributes after steps p, 2p, ... and at the end of an epoch, when all wait."""

    period: int
    """Local steps between two contributions, p >= 1."""

    @property
    def needs(self) -> Needs:
        """Each worker keeps its own optimizer's state."""
        return Needs(exchanges_optimizer_state=False)

    @property
    def wire_format(self) -> WireFormat:
        """Changes, since values would undo what others have added meanwhile."""
        return Changes()

    def after_step(self, run: Run, state: None, batch: Batch) -> None:
        """Contribute after every ``period`` steps; the epoch's tail is ``end_epoch``'s."""
        if run.step_of_epoch % self.period == 0 and not batch.last:
            self._exchange(run, last=False)

    def end_epoch(self, run: Run, state: None) -> None:
        """Contribute the rest, and wait for the epoch to end."""
        self._exchange(run, last=True)

    def _exchange(self, run: Run, *, last: bool) -> None:
        segments = run.replica.segments(with_optimizer=False)
        run.averager.exchange(segments, run.close_window(last=last))
