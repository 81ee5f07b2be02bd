"""The base of strategies, and what they see and keep of a worker's run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from sparkdl.averager.round_policy import All, RoundPolicy
from sparkdl.averager.run_events import Position
from sparkdl.averager.values.center_update import CenterUpdate, ReplaceByMean
from sparkdl.averager.values.wire_format import WireFormat
from sparkdl.collective import Collective
from sparkdl.collective.peers import Peers
from sparkdl.events import WindowReport
from sparkdl.phases import PhaseClock
from sparkdl.protocols import Batch, CenterExchange
from sparkdl.replica import Replica
from sparkdl.strategies.arguments import CheckedFields
from sparkdl.worker_callback import StepCalls


@dataclass
class Run:
    """One worker's training in progress: its replica, its end of the averager, its counters."""

    rank: int
    replica: Replica
    averager: CenterExchange
    world_size: int = 1
    """Workers of the run, known before the strategy starts."""
    rows: int = 0
    """Rows of this worker in an epoch, known once it has read them."""
    batch_size: int = 1
    """Rows per minibatch; the last of an epoch may have fewer."""
    collective: Collective | None = None
    """The group of all workers, for strategies that need one."""
    agree: Callable[[Run], None] | None = None
    """Has the members of a strategy's group agree on their rows again, once these have changed."""
    peers: Peers | None = None
    """The other workers, one by one, for strategies that need them."""
    cleanup: ExitStack = field(default_factory=ExitStack)
    """Closed when this worker leaves the others, even after an error, in ``start`` or later."""
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
    counted: float | Tensor | None = None
    """Sum of what the loss was divided by, likewise; None where that was the rows."""
    weighed: tuple[int, float] = (0, 0.0)
    """Of ``examples`` and ``counted``, what ``take_weight`` has seen."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What the strategy has measured, by name, for the history; sent with the next window."""
    state: Any = None
    """The strategy's, as ``start`` returned it; None while it has none."""
    calls: StepCalls | None = None
    """Calls the callbacks on this worker, if there are any."""
    clock: PhaseClock = field(default_factory=PhaseClock)
    """Counts where this worker's time goes; during an epoch it counts as computing unless an
    exchange or the feed says otherwise."""

    def start_at(self, position: Position) -> None:
        """Begin, or begin again, after the last committed window."""
        self.step = position.step
        self.step_of_epoch = position.step_of_epoch
        self._begin_window()
        if self.calls is not None:
            self.calls.restart()

    def start_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Count a new epoch, some of whose steps may have been taken already."""
        self.epoch = epoch
        self.step_of_epoch = first_step

    def train(self, batch: Batch) -> None:
        """Take one optimizer step and count it."""
        self.count_step()
        self.count(batch, self.replica.step(batch))
        self.end_step()

    def count_step(self) -> None:
        """Count an optimizer step as it begins, so that an error in it carries its number."""
        self.step += 1
        self.step_of_epoch += 1
        if self.calls is not None:
            self.calls.before(self.epoch, self.step, self.step_of_epoch)

    def end_step(self) -> None:
        """Called after each optimizer step, once its minibatches have been counted."""
        if self.calls is not None:
            self.calls.after()

    def count(self, batch: Batch, loss: Tensor) -> None:
        """Count the minibatch that the replica has last seen, with its mean loss."""
        self.examples += batch.examples
        if self.calls is not None:
            self.calls.count(batch.examples, loss, self.replica.divisor)
        # Reading a number from a GPU at every step would stall it; on CPUs a tensor is slower.
        mean = loss.double() if loss.is_cuda else loss.item()
        divisor = self.replica.divisor
        if divisor is None:
            self.loss_sum += batch.examples * mean
            return
        counts = divisor if loss.is_cuda else divisor.item()
        self.loss_sum += counts * mean
        self.counted = counts if self.counted is None else self.counted + counts

    def close_window(self, *, last: bool, group_weight: float | None = None) -> WindowReport:
        """Sum up the minibatches since the last round, and start counting again.

        Args:
            last: whether it is the epoch's last window.
            group_weight: the weight of all who have formed the contribution together, or 1 where
                all contributions count equally.

        Raises:
            TrainingError: frozen parameters have changed, found at the last window.
        """
        if last:
            # Checked before the epoch counts, as its end may become a checkpoint.
            self.replica.frozen.require_unchanged()
        report = replace(
            self.window(), last=last, group_weight=group_weight, measured=self.measured
        )
        self._begin_window()
        return report

    def _begin_window(self) -> None:
        self.examples, self.loss_sum, self.counted = 0, 0.0, None
        self.weighed, self.measured = (0, 0.0), {}

    def take_weight(self) -> float:
        """How much what was trained on since the last round, or the last call, counts."""
        window, (examples, counted) = self.window(), self.weighed
        self.weighed = window.examples, window.counted or 0.0
        return replace(
            window,
            examples=window.examples - examples,
            counted=None if window.counted is None else window.counted - counted,
        ).weight

    def window(self) -> WindowReport:
        """Sum up the minibatches since the last round, and keep counting."""
        return WindowReport(
            rank=self.rank,
            epoch=self.epoch,
            step=self.step,
            examples=self.examples,
            loss_sum=float(self.loss_sum),
            last=False,
            counted=None if self.counted is None else float(self.counted),
            step_of_epoch=self.step_of_epoch,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a strategy needs from the run around it; all other differences follow from this."""

    exchanges_optimizer_state: bool
    """Whether the optimizer's state is part of what replicas agree on, and so of the center."""
    collective: bool = False
    """Whether the workers exchange among themselves, over NCCL or gloo. If one is lost, all are
    restarted; otherwise it may come back by itself."""
    peers: bool = False
    """Whether a worker visits others, one at a time, while all train, and no one waits for a lost
    one."""
    joint_batch_norm: bool = False
    """Whether BatchNorm layers normalize over all workers' minibatches together."""
    checkpointable: bool = True
    """Whether a training can be resumed from the center, the optimizers, random numbers and
    ``saved_state`` alone."""
    shards_replica: bool = False
    """Whether each worker keeps only its part of the trained parameters once it has the center."""
    minibatches_a_step: int = 1
    """Minibatches of one worker in an optimizer step."""
    steps_ahead: int = 0
    """How many steps a worker may be ahead of a commit when it saves its state for it.
    ``train_epoch`` then begins with those minibatches again, which must not be trained on."""
    leads_schedule: bool = False
    """Whether it advances schedules by step further than the optimizer's steps, by a factor of at
    most the number of workers."""


State = TypeVar("State")


class Strategy(CheckedFields, ABC, Generic[State]):
    """How replicas agree. Held by the driver and, as a copy, by every worker.

    ``State`` is what it keeps on a worker between calls, as returned by ``start``.
    """

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What it needs from the run around it."""

    @property
    @abstractmethod
    def wire_format(self) -> WireFormat:
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
    def lasting(self) -> Strategy[Any]:
        """Itself without settings that change no result, which a training may go on without."""
        return self

    @property
    def fragments(self) -> int:
        """How many parts the state is split into, exchanged one per round; 1 not to split it.

        Which part's turn it is follows from the number of rounds in the epoch. With more than one,
        a replica holds the center only when an epoch begins, and ``round_policy`` must have
        everyone in a round.
        """
        return 1

    def require_fits(self, replica: Replica) -> None:
        """Called before any worker is started: check that a replica can be trained like this.

        Args:
            replica: as every worker builds it; must not be changed.

        Raises:
            ConfigError: it cannot; the message says what to change.
        """

    def require_workers(self, num_workers: int) -> None:
        """Called before any worker is started: check that this many can train like this.

        Args:
            num_workers: how many there will be.

        Raises:
            ConfigError: they cannot; the message says what to change.
        """

    def start(self, run: Run) -> State:
        """Called on every worker when its replica holds the center, before its first minibatch.

        It is called each time the worker joins: again after its connection was lost, on a run that
        continues at its position, and in the new processes after a restart of all. What must be
        undone goes into ``run.cleanup``, which also covers a failure halfway through this method.
        """
        return None  # type: ignore[return-value]

    def saved_state(self, state: State) -> Mapping[str, Any]:
        """The part of the state a worker needs to go on from a commit: tensors, numbers and text.

        It becomes part of the worker's state in checkpoints, and of what is kept for restarting all
        workers. A worker that comes back alone starts without it. By default it is what the state's
        ``saved`` returns, if it has that.
        """
        found: Mapping[str, Any] = getattr(state, "saved", dict)()
        return found

    def restore_state(self, state: State, saved: Mapping[str, Any]) -> None:
        """Called after ``start`` with what ``saved_state`` returned, if there is any.

        By default the state's ``restore`` is called with it.
        """
        cast(Any, state).restore(saved)

    def train_epoch(self, run: Run, state: State, batches: Iterable[Batch]) -> None:
        """Train on an epoch's minibatches, making the replicas agree on the way and at the end."""
        for batch in batches:
            run.train(batch)
            self.after_step(run, state, batch)
        self.end_epoch(run, state)

    def after_step(self, run: Run, state: State, batch: Batch) -> None:
        """Called on every worker after each optimizer step."""

    @abstractmethod
    def end_epoch(self, run: Run, state: State) -> None:
        """Called on every worker once per epoch, after its last step, even if it had none."""


class PeriodicStrategy(Strategy[State]):
    """Workers exchange after steps p, 2p, ... and at the end of an epoch."""

    period: int
    """Local steps between two exchanges, p >= 1."""

    def after_step(self, run: Run, state: State, batch: Batch) -> None:
        """Exchange after every ``period`` steps; the epoch's last window is ``end_epoch``'s."""
        if run.step_of_epoch % self.period == 0 and not batch.last:
            self.exchange(run, state, last=False)

    def end_epoch(self, run: Run, state: State) -> None:
        """Exchange the tail, 0 to ``period`` steps, and take the epoch's final center."""
        self.exchange(run, state, last=True)

    @abstractmethod
    def exchange(self, run: Run, state: State, *, last: bool) -> None:
        """Take part in the next round, or in all that are left in the epoch.

        Args:
            run: the worker's.
            state: as ``start`` returned it.
            last: whether this worker has taken its last step of the epoch.
        """


class StepsAhead:
    """Counts the steps of one worker that trains on while a round is under way.

    Its state is saved when it learns that the round was committed, and is by then some steps ahead.
    So whoever resumes from it must skip the minibatches of those steps.

    Args:
        run: the worker's.

    Attributes:
        steps: since the round began; counted by whoever begins one.
    """

    def __init__(self, run: Run) -> None:
        self.steps = 0
        self._run = run
        self._to_skip = 0

    def saved(self) -> dict[str, Any]:
        """For ``restore``: the steps, and what belongs to the window that they are part of."""
        run = self._run
        window = run.window()
        counted = {"loss_sum": window.loss_sum, "counted": window.counted}
        return {"ahead": self.steps, "examples": run.examples, **counted}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``; ``skip`` must follow before the worker trains."""
        self._to_skip = saved["ahead"]
        self._run.examples, self._run.loss_sum = saved["examples"], saved["loss_sum"]
        self._run.counted = saved.get("counted")

    def skip(self, batches: Iterator[Batch]) -> Batch | None:
        """Count the minibatches already trained on; returns the last, if there are any."""
        batch = None
        for _ in range(self._to_skip):
            batch = next(batches)
            self._run.count_step()
            self._run.replica.schedule.after_step()
        self._to_skip = 0
        return batch
