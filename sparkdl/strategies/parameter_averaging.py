"""Parameter averaging: train alone for a few minibatches, then continue from the mean.

Deeplearning4j's ParameterAveragingTrainingMaster, known as local SGD (Stich 2019, "Local SGD
Converges Fast and Communicates Little"). With period p and workers r = 1..R, after each window of p
local minibatches in which worker r trained on n_r examples:

    center  <-  sum_r n_r * w_r / sum_r n_r         w_r  <-  center

With p = 1 and plain SGD this is synchronous SGD on the union of the workers' batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparkdl.averager.codec import CODECS, Codec
from sparkdl.errors import ConfigError
from sparkdl.protocols import Batch
from sparkdl.strategies.base import Run, Strategy


@dataclass(frozen=True)
class ParameterAveraging(Strategy):
    """Average parameters in the driver after steps p, 2p, ... and once at the end of each epoch.

    Args:
        period: local minibatches between two rounds, >= 1; DL4J's averagingFrequency. 1 is
            synchronous SGD; 5 to 20 trade a little accuracy per epoch for much less waiting.
        average_optimizer_state: whether floating-point optimizer state (momentum, Adam's moments)
            is averaged too; otherwise each replica keeps its own.
        wire_dtype: ``float32`` sends values in the replica's own precision; ``bfloat16`` sends the
            changes since the last center rounded to bfloat16, half the bytes of float32.

    Raises:
        ConfigError: an argument is out of range.
    """

    period: int = 5
    average_optimizer_state: bool = True
    wire_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.period, bool) or not isinstance(self.period, int) or self.period < 1:
            raise ConfigError(f"period must be a whole number >= 1 of steps, got {self.period!r}")
        if not isinstance(self.average_optimizer_state, bool):
            raise ConfigError(
                f"average_optimizer_state must be a bool, got {self.average_optimizer_state!r}"
            )
        if self.wire_dtype not in CODECS:
            raise ConfigError(
                f"wire_dtype must be one of {', '.join(CODECS)}, got {self.wire_dtype!r}"
            )

    @property
    def codec(self) -> Codec:
        """By the name of ``wire_dtype``."""
        return CODECS[self.wire_dtype]()

    @property
    def exchanges_optimizer_state(self) -> bool:
        """As asked for by ``average_optimizer_state``."""
        return self.average_optimizer_state

    def after_step(self, run: Run, batch: Batch) -> None:
        """Average after every ``period`` steps; the epoch's last window is ``end_epoch``'s."""
        if run.step_of_epoch % self.period == 0 and not batch.last:
            self._average(run, last=False)

    def end_epoch(self, run: Run) -> None:
        """Average the tail, 0 to ``period`` steps, and take the epoch's final center."""
        self._average(run, last=True)

    def _average(self, run: Run, *, last: bool) -> None:
        state = run.replica.segments(with_optimizer=self.average_optimizer_state)
        run.averager.exchange(state, run.close_window(last=last))
