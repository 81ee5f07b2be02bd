"""Parameter averaging: train alone for a few minibatches, then continue from the mean.

Deeplearning4j's ParameterAveragingTrainingMaster, known as local SGD (Stich 2019, "Local SGD
Converges Fast and Communicates Little"). The mean is formed in the driver, or among the workers
(``aggregation="executors"``), which costs the driver nothing but needs all workers at once, or
on each host first (``"hierarchical"``). With a cut-off (``cutoff``), a round has the workers that
are fast enough, and those that were too slow for the round before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from sparkdl.averager.round_policy import RoundPolicy
from sparkdl.averager.values.wire_format import PARAMETER_CHANGES, WIRE_FORMATS, WireFormat
from sparkdl.errors import ConfigError
from sparkdl.replica import Replica
from sparkdl.strategies.arguments import (
    BOOL,
    CUTOFF,
    STEPS,
    Cutoff,
    argument,
    cutoff_policy,
    one_of,
    or_none,
    require_everyone,
)
from sparkdl.strategies.base import Needs, PeriodicStrategy, Run, Strategy
from sparkdl.strategies.worker_group import REDUCTION, ColorTrees, WorkerGroup, require_no_gpu


@dataclass(frozen=True)
class ParameterAveraging(PeriodicStrategy[WorkerGroup | None]):
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
            receives one copy at the end of each epoch: for many workers or large models. If one
            is lost, all are restarted from the driver's last copy. ``hierarchical`` averages among
            the workers of each host first, and each host contributes once to the driver's round:
            for many workers on few hosts. A loss restarts all here too.
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

    period: int = argument(5, STEPS)
    average_optimizer_state: bool = argument(True, BOOL)
    wire_dtype: Literal["float32", "bfloat16"] = argument("float32", one_of(*WIRE_FORMATS))
    aggregation: Literal["driver", "executors", "hierarchical"] = argument(
        "driver", one_of("driver", "executors", "hierarchical")
    )
    commit_every: int | None = argument(None, or_none(STEPS))
    cutoff: Cutoff = argument("none", CUTOFF)
    reduction: ColorTrees | None = argument(None, REDUCTION)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregation != "executors" and self.commit_every is not None:
            raise ConfigError(
                "commit_every is for aggregation='executors'; the driver has every round's center"
            )
        if self.aggregation == "executors" and self.wire_dtype != "float32":
            raise ConfigError(
                f"wire_dtype={self.wire_dtype!r} is for aggregation='driver'; among executors "
                "values travel in the replica's own precision"
            )
        if self.aggregation != "executors" and self.reduction is not None:
            raise ConfigError(
                f"reduction is for aggregation='executors', not {self.aggregation!r}: drop it"
            )
        require_everyone(
            self.cutoff,
            {
                f"aggregation={self.aggregation!r}": self.aggregation != "driver",
                f"wire_dtype={self.wire_dtype!r}": self.wire_dtype != "float32",
            },
        )

    @property
    def wire_format(self) -> WireFormat:
        """According to ``wire_dtype``; changes, if some may be from an older center."""
        return WIRE_FORMATS[self.wire_dtype] if self.cutoff == "none" else PARAMETER_CHANGES

    @property
    def round_policy(self) -> RoundPolicy:
        """According to the cut-off."""
        return cutoff_policy(self.cutoff)

    @property
    def needs(self) -> Needs:
        """Only the driver, if the mean is formed there."""
        return Needs(
            exchanges_optimizer_state=self.average_optimizer_state,
            collective=self.aggregation != "driver",
        )

    @property
    def lasting(self) -> Strategy[Any]:
        """How sums are formed changes rounding only."""
        return self if self.reduction is None else replace(self, reduction=None)

    def require_fits(self, replica: Replica) -> None:
        """Check that trees are for this device."""
        require_no_gpu(self.reduction, replica)

    def start(self, run: Run) -> WorkerGroup | None:
        """Join the group that forms the mean, if it is not formed in the driver."""
        self.require_fits(run.replica)
        if self.aggregation == "driver":
            return None
        within_host = self.aggregation == "hierarchical"
        return WorkerGroup(run, run.batch_size, within_host=within_host, trees=self.reduction)

    def exchange(self, run: Run, state: WorkerGroup | None, *, last: bool) -> None:
        """Form the mean, among executors also in the windows for which this worker has no rows."""
        segments = run.replica.segments(with_optimizer=self.average_optimizer_state)
        if state is None:
            run.averager.exchange(segments, run.close_window(last=last))
        elif self.aggregation == "hierarchical":
            self._exchange_by_host(run, state, segments, last=last)
        else:
            every = self.commit_every
            for window in state.rounds(run, self.period, every, lambda: segments, last=last):
                state.average(segments, state.weights_of(run, window), run.window())

    def _exchange_by_host(
        self, run: Run, group: WorkerGroup, segments: list[Tensor], *, last: bool
    ) -> None:
        """Have the host form a mean and contribute it; if ``last``, as often as it has windows."""
        while True:
            window = range(group.steps, group.steps + self.period)
            ends = last and window.stop >= group.steps_an_epoch
            group.require_announced(run, group.examples_of(window))
            weights = group.weights_of(run, window)
            group_weight = sum(weights) if group.collective.index == 0 else 0
            mine = run.window()
            report = run.close_window(last=ends, group_weight=group_weight)
            if any(weights):
                group.average(segments, weights, mine)
            group.exchange(run, segments, report)
            group.steps = 0 if ends else window.stop
            if ends or not last:
                return
