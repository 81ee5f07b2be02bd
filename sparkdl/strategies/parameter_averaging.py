"""Parameter averaging: train alone for a few minibatches, then continue from the mean.

Deeplearning4j's ParameterAveragingTrainingMaster, known as local SGD (Stich 2019, "Local SGD
Converges Fast and Communicates Little"). The mean is formed in the driver, or among the workers
(``aggregation="executors"``), which costs the driver nothing but needs a gang-scheduled start, or
on each host first (``"hierarchical"``). With a cut-off (``cutoff``), a round has the workers that
are fast enough, and those that were too slow for the round before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from sparkdl.arguments import convert_numbers
from sparkdl.averager.policies.round_policy import RoundPolicy
from sparkdl.averager.values.wire_format import WIRE_FORMATS, ParameterChanges, WireFormat
from sparkdl.errors import ConfigError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies.arguments import (
    Cutoff,
    cutoff_policy,
    require_bools,
    require_cutoff,
    require_one_of,
    require_period,
    require_steps,
)
from sparkdl.strategies.base import Needs, Run, Strategy
from sparkdl.strategies.color_trees import ColorTrees, require_no_gpu, require_trees
from sparkdl.strategies.worker_group import WorkerGroup


@dataclass(frozen=True)
class ParameterAveraging(Strategy["Aggregation"]):
    """Average parameters after steps p, 2p, ... and once at the end of each epoch.

    Rule:
        After each window of p local minibatches, where worker r of R trained on n_r examples::

            center  <-  sum_r n_r * w_r / sum_r n_r         w_r  <-  center

        With p = 1 and plain SGD this is synchronous SGD on the union of the workers' batches; where
        the loss divides by something else than rows, such as class weights, n_r is that. By
        hosts h, and with a cut-off where worker r began with the center c_r, it is::

            w_h     <-  sum_(r on h) n_r * w_r / n_h
            center  <-  sum_h n_h * w_h / sum_h n_h

            center  <-  center + sum_r n_r * (w_r - c_r) / N

        with N the examples of a full round, of everyone's windows.

    Phases:
        1. Each worker trains for ``period`` steps by itself, or for those left in its epoch.
        2. It sends its parameters, buffers and, if that is averaged, its optimizer's state.
        3. They are added in the order of ranks; the round waits for all that have rows left, except
           those that ``cutoff`` does without.
        4. All are sent the mean, and go on from it. The one at an epoch's end is validated.

    When:
        To begin with: it is simple, takes few messages, gives the same bits each time, and a lost
        worker costs only its own window. It pays off where exchanging gradients takes longer than a
        step.

    When not:
        Where the link carries gradients in less time than a step, as ``GradientAllReduce`` then
        learns more from each row, above all with Adam: at one learning rate, the mean of normalized
        steps is shorter than a normalized step on the mean gradient. Nor for windows of hundreds of
        steps, where the mean forgets too much: ``OuterOptimizer`` is made for them.

    Args:
        period: local minibatches between two rounds, >= 1; DL4J's averagingFrequency, whose 5 is
            the default here; DL4J advises 5 to 10. 1 is synchronous SGD; more trades a little
            accuracy per epoch for less waiting, far more than 20 a lot of it.
        average_optimizer_state: whether floating-point optimizer state (momentum, Adam's moments)
            is averaged too, as in DL4J (saveUpdater); otherwise each replica keeps its own, and a
            round has half the bytes with momentum, a third with Adam.
        wire_dtype: ``float32`` sends values in the replica's own precision; ``bfloat16`` sends the
            changes since the last center rounded to bfloat16, half the bytes of float32. Use it
            where rounds wait for the driver's link.
        aggregation: ``driver`` averages in the driver; a lost worker affects no other.
            ``executors`` averages among the workers over NCCL (gloo on CPUs), and the driver
            receives one copy at the end of each epoch: for many workers or large models. The
            workers then need a gang-scheduled start, in Spark's barrier mode; if one is lost, all
            are restarted from the driver's last copy. ``hierarchical`` averages among the workers
            of each host first, and each host contributes once to the driver's round: for many
            workers on few hosts. It needs a gang-scheduled start too.
        commit_every: with ``executors``, steps after which the driver takes an extra copy, rounded
            up to whole periods, and so the most that are repeated after the loss of a worker. None
            for copies at the ends of epochs only, which is enough if an epoch takes minutes.
        cutoff: which workers rounds in the driver do without. ``none`` waits for everyone, and
            gives the same bits each time. A number k of backup workers waits for all but the k
            slowest of each round (Chen et al. 2016 took 4 of 100), whose contributions join the
            next. ``predicted`` chooses k in each round, from how long workers took before. Use it
            where different workers are slow at different times. One that is always slow sets the
            length of an epoch all the same, as every row is trained on, and ends it with rounds of
            its own, which are what the center has seen last; nor is there much to gain with few
            workers, where each is a large part of a round.
        reduction: with ``executors``, None for gloo's ring, or for what NCCL chooses;
            ``ColorTrees()`` adds up along trees, on CPUs.

    Raises:
        ConfigError: an argument is out of range, or some do not go together.
    """

    period: int = 5
    average_optimizer_state: bool = True
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    aggregation: Literal["driver", "executors", "hierarchical"] = "driver"
    commit_every: int | None = None
    cutoff: Cutoff = "none"
    reduction: ColorTrees | None = None

    def __post_init__(self) -> None:
        convert_numbers(self)
        require_period(self.period)
        require_bools(self, "average_optimizer_state")
        require_one_of("wire_dtype", self.wire_dtype, WIRE_FORMATS)
        require_one_of("aggregation", self.aggregation, AGGREGATIONS)
        require_steps("commit_every", self.commit_every)
        if self.aggregation != "executors" and self.commit_every is not None:
            raise ConfigError(
                "commit_every is for aggregation='executors'; the driver has every round's center"
            )
        if self.aggregation == "executors" and self.wire_dtype != "float32":
            raise ConfigError(
                f"wire_dtype={self.wire_dtype!r} is for aggregation='driver'; among executors "
                "values travel in the replica's own precision"
            )
        require_trees(self.reduction)
        if self.aggregation != "executors" and self.reduction is not None:
            raise ConfigError(
                f"reduction is for aggregation='executors', not {self.aggregation!r}: drop it"
            )
        require_cutoff(
            self.cutoff,
            {
                f"aggregation={self.aggregation!r}": self.aggregation != "driver",
                f"wire_dtype={self.wire_dtype!r}": self.wire_dtype != "float32",
            },
        )

    @property
    def wire_format(self) -> WireFormat:
        """According to ``wire_dtype``; changes, if some may be from an older center."""
        return WIRE_FORMATS[self.wire_dtype]() if self.cutoff == "none" else ParameterChanges()

    @property
    def round_policy(self) -> RoundPolicy:
        """According to the cut-off."""
        return cutoff_policy(self.cutoff)

    @property
    def needs(self) -> Needs:
        """Only the driver, if the mean is formed there."""
        among_workers = not AGGREGATIONS[self.aggregation].in_driver
        return Needs(
            exchanges_optimizer_state=self.average_optimizer_state,
            collective=among_workers,
            gang_start=among_workers,
            equal_steps=among_workers,
            resumes_alone=not among_workers,
        )

    @property
    def lasting(self) -> Strategy[Any]:
        """How sums are formed changes rounding only."""
        return self if self.reduction is None else replace(self, reduction=None)

    def require_fits(self, replica: Replica) -> None:
        """Check that trees are for this device."""
        require_no_gpu(self.reduction, replica)

    def start(self, run: Run) -> Aggregation:
        """Set up the place where the mean is formed."""
        self.require_fits(run.replica)
        return AGGREGATIONS[self.aggregation](run, self)

    def rows_changed(self, run: Run, state: Aggregation) -> None:
        """Find out how many windows all workers have now."""
        state.rows_changed(run)

    def after_step(self, run: Run, state: Aggregation, batch: Batch) -> None:
        """Average after every ``period`` steps; the epoch's last window is ``end_epoch``'s."""
        if run.step_of_epoch % self.period == 0 and not batch.last:
            state.average(run, self._segments(run))

    def end_epoch(self, run: Run, state: Aggregation) -> None:
        """Average the tail, 0 to ``period`` steps, and take the epoch's final center."""
        state.finish(run, self._segments(run))

    def _segments(self, run: Run) -> list[Tensor]:
        return run.replica.segments(with_optimizer=self.average_optimizer_state)


class Aggregation(ABC):
    """Where the mean is formed; one object for each time that a worker joins.

    Args:
        run: the worker's; where it needs the others, all must make one at the same time.
        strategy: what is averaged, and when.
    """

    in_driver: ClassVar[bool] = False
    """Whether the worker needs no others."""

    @abstractmethod
    def __init__(self, run: Run, strategy: ParameterAveraging) -> None: ...

    def rows_changed(self, run: Run) -> None:  # noqa: B027 - not all need to know
        """Note that the workers have other rows."""

    @abstractmethod
    def average(self, run: Run, segments: list[Tensor]) -> None:
        """Take part in the next round.

        Args:
            run: this worker's.
            segments: its replica's state, overwritten by the mean.
        """

    @abstractmethod
    def finish(self, run: Run, segments: list[Tensor]) -> None:
        """Take part in all remaining rounds of the epoch."""


class InDriver(Aggregation):
    """Each worker contributes to the driver's rounds."""

    in_driver = True

    def __init__(self, run: Run, strategy: ParameterAveraging) -> None:
        pass

    def average(self, run: Run, segments: list[Tensor]) -> None:
        """Contribute the window."""
        run.averager.exchange(segments, run.close_window(last=False))

    def finish(self, run: Run, segments: list[Tensor]) -> None:
        """Contribute the last window."""
        run.averager.exchange(segments, run.close_window(last=True))


class AmongExecutors(Aggregation):
    """The workers form the mean, including those that have used up their rows in an epoch."""

    def __init__(self, run: Run, strategy: ParameterAveraging) -> None:
        self._group = WorkerGroup(run, run.batch_size, trees=strategy.reduction)
        self._period = strategy.period
        self._commit_every = strategy.commit_every

    def rows_changed(self, run: Run) -> None:
        """Find out how many windows all workers have now."""
        self._group.agree(run)

    def average(self, run: Run, segments: list[Tensor]) -> None:
        """Form the mean, and commit it if that is due."""
        group = self._group
        window = range(group.steps, group.steps + self._period)
        group.average(segments, group.weights_of(run, window), run.window())
        group.steps = window.stop
        group.heartbeat(run)
        group.commit_if_due(run, self._commit_every, lambda: segments)

    def finish(self, run: Run, segments: list[Tensor]) -> None:
        """Take part in all remaining rounds, and commit the last mean."""
        while not self._group.done:
            self.average(run, segments)
        self._group.commit(run, segments, last=True)


class ByHost(Aggregation):
    """Each host forms a mean and contributes it, as often as it has windows."""

    def __init__(self, run: Run, strategy: ParameterAveraging) -> None:
        self._group = WorkerGroup(run, run.batch_size, within_host=True)
        self._period = strategy.period

    def rows_changed(self, run: Run) -> None:
        """Find out how many windows the host has now."""
        self._group.agree(run)

    def average(self, run: Run, segments: list[Tensor], *, last: bool = False) -> None:
        """Take part in the next round; the epoch's ``last`` one ends with its final center."""
        group = self._group
        window = range(group.steps, group.steps + self._period)
        examples = group.examples_of(window)
        group.require_announced(run, examples)
        weights = group.weights_of(run, window)
        group_weight = sum(weights) if group.collective.index == 0 else 0
        mine = run.window()
        report = run.close_window(last=last, group_weight=group_weight)
        if any(weights):
            group.average(segments, weights, mine)
        group.exchange(run, segments, report)
        group.steps = 0 if last else window.stop

    def finish(self, run: Run, segments: list[Tensor]) -> None:
        """Take part in all remaining rounds of the host."""
        group = self._group
        while group.steps + self._period < group.steps_an_epoch:
            self.average(run, segments)
        self.average(run, segments, last=True)


AGGREGATIONS: dict[str, type[Aggregation]] = {
    "driver": InDriver,
    "executors": AmongExecutors,
    "hierarchical": ByHost,
}
"""Implementations, by the value of ``aggregation`` in ``ParameterAveraging``."""
