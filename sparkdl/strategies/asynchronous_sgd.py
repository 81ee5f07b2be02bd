"""Asynchronous SGD: each worker adds what it has learned to the center while others train.

DOWNPOUR (Dean et al. 2012, "Large Scale Distributed Deep Networks"), in which each change counts by
the part of a full round's rows that it was trained on: those of everyone add up to their mean, and
each row counts as much as any other. ``scale_by_staleness`` is the rule of Zhang et al. 2016
("Staleness-aware Async-SGD for Distributed Deep Learning", arXiv 1511.05950) in place of that. The
paper counts staleness from 1, including the update itself: its lambda / tau.
``asynchronous_barriers`` says who is waited for.

With ``BSP()`` and ``rate=1`` this is ``ParameterAveraging(period, average_optimizer_state=False)``
except for rounding: here changes are added to the center, there values are averaged.

Asynchronous DiLoCo: each worker steps the center when it is ready, with delayed momentum.

Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling" (arXiv 2401.09135). If
momentum stepped with every contribution, it would step once per worker instead of once per round,
each time on the change of one worker. Delayed Nesterov lets it step at every N-th only. With one
worker and N = 1 this is DiLoCo. The paper's c is 0: no momentum between two of its steps. Its other
half is left out: dynamic local updates (DyLU), which give slow workers shorter windows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from sparkdl.averager.round_policy import Nobody, RoundPolicy
from sparkdl.averager.values.center_update import CenterUpdate, Contributions, Kept
from sparkdl.averager.values.wire_format import CHANGES
from sparkdl.protocols import Segment
from sparkdl.replica import Replica
from sparkdl.strategies.arguments import (
    BOOL,
    FRACTION,
    POSITIVE,
    STEPS,
    CheckedFields,
    argument,
    instance,
    warn_of_inner_momentum,
    whole,
)
from sparkdl.strategies.asynchronous_barriers import ASP, Barrier
from sparkdl.strategies.base import Needs, PeriodicStrategy, Run


class ContributesChanges(PeriodicStrategy[None]):
    """Each worker contributes after steps p, 2p, ... and at the end of an epoch, when all wait.

    The base of asynchronous strategies: the changes of windows meet the center one by one.
    """

    needs = Needs(exchanges_optimizer_state=False)
    wire_format = CHANGES  # since values would undo what others have added meanwhile

    def exchange(self, run: Run, state: None, *, last: bool) -> None:
        """Contribute the window; after the ``last``, wait for the epoch to end."""
        segments = run.replica.segments(with_optimizer=False)
        run.averager.exchange(segments, run.close_window(last=last))


@dataclass(frozen=True)
class ScaledChange(CenterUpdate):
    """The center moves by part of the mean change.

    Args:
        rate: the part.
        by_staleness: whether stale changes count less, in place of each by its share of a full
            round.
    """

    rate: float
    by_staleness: bool

    @property
    def by_share(self) -> bool:
        """Unless staleness says how much a change counts."""
        return not self.by_staleness

    def updates(self, segment: Segment) -> bool:
        """Buffers too: the workers' whole changes would add up to more than any of them saw."""
        return True

    def scale(self, staleness: int) -> float:
        """One over the number of updates since then, this one included."""
        return 1 / (1 + staleness) if self.by_staleness else 1.0

    def step(
        self, center: Tensor, change: Tensor, memory: Kept, contributions: Contributions
    ) -> None:
        """Apply part of the change."""
        change.mul_(self.rate)


@dataclass(frozen=True)
class AsynchronousSGD(ContributesChanges):
    """Exchange changes with the center after every ``period`` steps, each worker when it is ready.

    Rule:
        With x_r the parameters of worker r after a window of p steps on n_r examples, which began
        with the center c_r, and s_r how often the center c has been updated since::

            c  <-  c + rate * sum_r n_r * (x_r - c_r) / N
            c  <-  c + rate * sum_r n_r * (x_r - c_r) / (1 + s_r) / sum_r n_r      by staleness
            x_r <- c

        where the sums are over one worker, or with the barrier ``BSP`` over all of them, and with
        ``Softsync`` over the first n; N is the examples that a window of each worker has.

    Phases:
        1. A worker trains for ``period`` steps by itself, or for those left in its epoch.
        2. It sends how far it has moved from the center that it was sent.
        3. The driver adds that to the center, one worker after another, as they come.
        4. The worker is sent the center and goes on from it, when its barrier lets it.
        5. When the epoch ends, all wait for each other, and validate the center.

    When:
        Where workers differ in speed, or are lost and come back often, and waiting for the slowest
        in each round costs more than stale changes do. Each row weighs the same however slow its
        worker is. What the slowest trains alone at the end of an epoch is what the center has seen
        last, though: lower the learning rate towards the end of the fit, or use ``SSP``.

    When not:
        For accuracy at equal rows, where synchronous averaging is better, nor if a fit must give
        the same bits twice.

    Each ``EpochSummary`` says how stale changes were: ``mean_staleness``, ``max_staleness``.

    Args:
        period: local minibatches between two exchanges, >= 1; tau in DOWNPOUR. 1 is the classic
            algorithm; 5 as in ``ParameterAveraging`` saves traffic. DOWNPOUR gets worse from 16 to
            64 (Zhang, Choromanska & LeCun 2015), where averaging does not.
        rate: how much of a change moves the center, > 0. With 1, a change from every worker moves
            it by their mean, as in parameter averaging; the number of workers makes it DOWNPOUR,
            where each moves it by the whole change.
        scale_by_staleness: whether an update moves the center by the mean of the changes in it,
            each divided by 1 + how often others have updated the center since, however few rows
            there are in it (Zhang et al. 2016). Not where some workers are slower than others, as
            the last windows of the slowest, alone and never stale, then count several times; and n
            changes that meet the center one after another are divided by 1, 2, ..., n, which adds
            up to more than their mean.
        barrier: who is waited for: with ``ASP()`` nobody; with ``SSP(s)`` the slowest, if it is
            more than s windows behind; with ``PBSP(beta)`` and ``PSSP(beta, s)`` the slowest of a
            random sample; with ``Softsync(n)`` n contributions; with ``BSP()`` everyone.

    Raises:
        ConfigError: an argument is out of range.
    """

    period: int = argument(5, STEPS)
    rate: float = argument(1.0, POSITIVE)
    scale_by_staleness: bool = argument(False, BOOL)
    barrier: Barrier = argument(
        ASP(),
        instance(Barrier, "ASP(), BSP(), SSP(s), PBSP(beta), PSSP(beta, s) or Softsync(n)"),
    )

    @property
    def center_update(self) -> CenterUpdate:
        """Scaled by rate and staleness."""
        return ScaledChange(self.rate, self.scale_by_staleness)

    @property
    def round_policy(self) -> RoundPolicy:
        """The barrier's."""
        return self.barrier.policy(self.period)


@dataclass(frozen=True)
class DelayedNesterov(CheckedFields, CenterUpdate):
    """Every contribution moves the center; momentum steps with every ``buffer``-th.

    Args:
        buffer: N, >= 1; the number of workers in the paper.
        learning_rate: > 0; 0.7 as in DiLoCo.
        momentum: in [0, 1). The paper has DiLoCo's 0.9, for windows that are a small part of a long
            training; 0.5 is for fits whose windows move far compared with changes that are a round
            old.

    Raises:
        ConfigError: an argument is out of range.
    """

    buffer: int = field(metadata=whole(1, "contributions"))
    learning_rate: float = argument(0.7, POSITIVE)
    momentum: float = argument(0.5, FRACTION)
    keeps = ("velocity", "gathered")
    by_share = False

    def scale(self, staleness: int) -> float:
        """One over N, however stale; for buffers too, whose change every worker sends."""
        return 1 / self.buffer

    def moves_alone(self, round: int) -> bool:
        """Where momentum is due; a contribution without rows counts, as one of zero."""
        return round % self.buffer == 0

    def step(
        self, center: Tensor, change: Tensor, memory: Kept, contributions: Contributions
    ) -> None:
        """Apply part of the change and, if momentum is due, of all changes since its last."""
        velocity, gathered = memory["velocity"], memory["gathered"]
        gathered.add_(change)
        if contributions.round % self.buffer == 0:
            velocity.mul_(self.momentum).add_(gathered)
            gathered.zero_()
            change.add_(velocity, alpha=self.momentum)
        change.mul_(self.learning_rate)


@dataclass(frozen=True)
class AsynchronousOuterOptimizer(ContributesChanges):
    """Train ``period`` steps alone, then step the center, whatever the other workers do.

    Rule:
        With d how far a worker has moved in a window of ``period`` steps from the center that it
        was sent, the k-th contribution does::

            g  <-  g + d / N                            c  <-  c + learning_rate * d / N
            if N divides k:  v  <-  momentum * v + g    c  <-  c + learning_rate * momentum * v
                             g  <-  0

        where one without rows counts as d = 0. Every contribution counts 1/N, whatever its rows.

    Phases:
        1. A worker trains for ``period`` steps by itself, or for those left in its epoch.
        2. It sends how far it has moved from the center that it was sent.
        3. The driver takes the step above for one worker after another, as they come.
        4. The worker is sent the center, and goes on from it.
        5. When the epoch ends, all wait for each other, and validate the center.

    When:
        Where windows are hundreds of steps long, as for ``OuterOptimizer``, and workers differ so
        much in speed that waiting for the slowest costs more than stale changes do.

    When not:
        Where they are equally fast: rounds of everyone learn more from the same rows, and give the
        same bits each time. Nor where a fit has few windows: momentum has to build up first.

    Args:
        outer: what moves the center; ``buffer`` as many as there are workers.
        period: local steps between two contributions, >= 1; 50 to 500 in the papers.

    Raises:
        ConfigError: an argument is out of range.
    """

    outer: DelayedNesterov = field(metadata=instance(DelayedNesterov, "a DelayedNesterov(buffer)"))
    period: int = argument(500, STEPS)

    def require_fits(self, replica: Replica) -> None:
        """Warn if outer momentum is multiplied by the workers' own."""
        outer = self.outer
        warn_of_inner_momentum(replica, outer.learning_rate, outer.momentum, may_reset=False)

    @property
    def center_update(self) -> CenterUpdate:
        """The outer optimizer."""
        return self.outer

    round_policy = Nobody()
