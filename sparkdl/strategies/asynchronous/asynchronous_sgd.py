"""Asynchronous SGD: each worker adds what it has learned to the center while others train.

DOWNPOUR (Dean et al. 2012, "Large Scale Distributed Deep Networks"), in which each change counts by
the part of a full round's rows that it was trained on: those of everyone add up to their mean, and
each row counts as much as any other. ``scale_by_staleness`` is the rule of Zhang et al. 2016
("Staleness-aware Async-SGD for Distributed Deep Learning", arXiv 1511.05950) in place of that. The
paper counts staleness from 1, including the update itself: its lambda / tau. ``barriers`` says who
is waited for.

With ``BSP()`` and ``rate=1`` this is ``ParameterAveraging(period, average_optimizer_state=False)``
except for rounding: here changes are added to the center, there values are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sparkdl.averager.policies.round_policy import RoundPolicy
from sparkdl.averager.values.center_update import CenterUpdate, Contributions
from sparkdl.averager.values.wire_format import CHANGES, WireFormat
from sparkdl.protocols import Segment
from sparkdl.strategies.arguments import BOOL, POSITIVE, STEPS, argument, instance
from sparkdl.strategies.asynchronous.barriers import ASP, Barrier
from sparkdl.strategies.base import Needs, PeriodicStrategy, Run


class ContributesChanges(PeriodicStrategy[None]):
    """Each worker contributes after steps p, 2p, ... and at the end of an epoch, when all wait.

    The base of asynchronous strategies: the changes of windows meet the center one by one.
    """

    @property
    def needs(self) -> Needs:
        """Each worker keeps its own optimizer's state."""
        return Needs(exchanges_optimizer_state=False)

    @property
    def wire_format(self) -> WireFormat:
        """Changes, since values would undo what others have added meanwhile."""
        return CHANGES

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
        self,
        center: Tensor,
        change: Tensor,
        memory: Mapping[str, Tensor],
        contributions: Contributions,
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
