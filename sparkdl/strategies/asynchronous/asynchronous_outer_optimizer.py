"""Asynchronous DiLoCo: each worker steps the center when it is ready, with delayed momentum.

Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling" (arXiv 2401.09135). If
momentum stepped with every contribution, it would step once per worker instead of once per round,
each time on the change of one worker. Delayed Nesterov lets it step at every N-th only. With one
worker and N = 1 this is DiLoCo. The paper's c is 0: no momentum between two of its steps. Its other
half is left out: dynamic local updates (DyLU), which give slow workers shorter windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from sparkdl.averager.policies.round_policy import Nobody, RoundPolicy
from sparkdl.averager.values.center_update import CenterUpdate, Contributions
from sparkdl.replica import Replica
from sparkdl.strategies.arguments import (
    FRACTION,
    POSITIVE,
    STEPS,
    CheckedFields,
    argument,
    instance,
    warn_of_inner_momentum,
    whole,
)
from sparkdl.strategies.asynchronous.asynchronous_sgd import ContributesChanges


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
        self,
        center: Tensor,
        change: Tensor,
        memory: Mapping[str, Tensor],
        contributions: Contributions,
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

    @property
    def round_policy(self) -> RoundPolicy:
        """Each worker alone with the center."""
        return Nobody()
