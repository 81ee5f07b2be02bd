"""What a strategy is, and what it sees of a worker's run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sparkdl.averager.center_update import CenterUpdate, ReplaceByMean
from sparkdl.averager.codec import Codec
from sparkdl.averager.progress import Position
from sparkdl.averager.round_policy import All, RoundPolicy
from sparkdl.collective import Collective
from sparkdl.errors import ConfigError
from sparkdl.events import WindowReport
from sparkdl.protocols import Batch, CenterExchange
from sparkdl.replica import Replica


@dataclass
class Run:
    """One worker's training in progress: its replica, its line to the averager, its counters."""

    rank: int
    replica: Replica
    averager: CenterExchange
    rows: int = 0
    """Rows of this worker in an epoch, known once it has read them."""
    batch_size: int = 1
    """Rows a minibatch; the last of an epoch may have fewer."""
    collective: Collective | None = None
    """The group of all workers, for strategies that need one."""
    memory: Any = None
    """What the strategy keeps on this worker between calls."""
    epoch: int = 0
    """Epoch counted from 1; 0 before the first."""
    step: int = 0
    """Optimizer steps since the start."""
    step_of_epoch: int = 0
    """Optimizer steps since the start of the epoch."""
    examples: int = 0
    """Rows trained on since the last round."""
    loss_sum: float | Tensor = 0.0
    """Sum of the loss over those rows; on a GPU a float64 scalar there."""

    def start_at(self, position: Position) -> None:
        """Begin, or begin again, behind the last committed window."""
        self.step = position.step
        self.step_of_epoch = position.step_of_epoch
        self.examples = 0
        self.loss_sum = 0.0

    def start_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Count a new epoch, of which some steps may have been taken already."""
        self.epoch = epoch
        self.step_of_epoch = first_step

    def train(self, batch: Batch) -> None:
        """Take one optimizer step and count it."""
        self.count_step()
        self.count(batch, self.replica.step(batch))

    def count_step(self) -> None:
        """Count an optimizer step that begins: an error in it is reported with its own number."""
        self.step += 1
        self.step_of_epoch += 1

    def count(self, batch: Batch, loss: Tensor) -> None:
        """Count a minibatch that was trained on, with its mean loss."""
        self.examples += batch.examples
        # Reading a number from a GPU at every step would stall it; on CPUs a tensor is slower.
        self.loss_sum += batch.examples * (loss.double() if loss.is_cuda else loss.item())

    def close_window(self, *, last: bool, stands_for: int | None = None) -> WindowReport:
        """Sum up the minibatches since the last round, and start counting anew.

        Args:
            last: whether it is the epoch's last window.
            stands_for: rows of those who have formed the contribution together.

        Raises:
            TrainingError: with the last one, if frozen parameters have changed.
        """
        if last:
            # Before the epoch counts: its end may become a checkpoint.
            self.replica.frozen.require_unchanged()
        report = replace(self.window(), last=last, stands_for=stands_for)
        self.examples = 0
        self.loss_sum = 0.0
        return report

    def window(self) -> WindowReport:
        """Sum up the minibatches since the last round, which go on."""
        return WindowReport(
            rank=self.rank,
            epoch=self.epoch,
            step=self.step,
            examples=self.examples,
            loss_sum=float(self.loss_sum),
            last=False,
            step_of_epoch=self.step_of_epoch,
        )


def require_steps(name: str, steps: object) -> None:
    """Check that an argument is None or a whole number of steps >= 1.

    Raises:
        ConfigError: it is not.
    """
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ConfigError(f"{name} must be None or a whole number >= 1 of steps, got {steps!r}")


class Strategy(ABC):
    """How replicas agree. Held by the driver and, as a copy, by every worker."""

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """How values travel between workers and averager."""

    @property
    def center_update(self) -> CenterUpdate:
        """What the workers' contributions do to the center."""
        return ReplaceByMean()

    @property
    def round_policy(self) -> RoundPolicy:
        """Who is waited for before the center is updated; a new object each time."""
        return All()

    @property
    @abstractmethod
    def exchanges_optimizer_state(self) -> bool:
        """Whether the optimizer's state is part of what replicas agree on."""

    @property
    def checkpointable(self) -> bool:
        """Whether center, optimizer and random numbers are all that a worker has to remember."""
        return True

    @property
    def minibatches_a_step(self) -> int:
        """Minibatches of one worker in an optimizer step."""
        return 1

    @property
    def needs_collective(self) -> bool:
        """Whether the workers exchange among themselves, and so all have to run at once."""
        return False

    def start(self, run: Run) -> None:  # noqa: B027 - not every strategy has to prepare
        """Called on every worker once, when its replica holds the initial center."""

    def rows_changed(self, run: Run) -> None:  # noqa: B027 - as above
        """Called on every worker at the start of an epoch for which its rows were dealt anew."""

    def finish(self, run: Run) -> None:  # noqa: B027 - as above
        """Called on every worker once, before it leaves the others, also after an error."""

    def train_epoch(self, run: Run, batches: Iterable[Batch]) -> None:
        """Train on an epoch's minibatches, making the replicas agree on the way and at the end."""
        for batch in batches:
            run.train(batch)
            self.after_step(run, batch)
        self.end_epoch(run)

    def after_step(self, run: Run, batch: Batch) -> None:  # noqa: B027 - as above
        """Called on every worker after each optimizer step."""

    @abstractmethod
    def end_epoch(self, run: Run) -> None:
        """Called on every worker once an epoch, after its last step, also if it had none."""
