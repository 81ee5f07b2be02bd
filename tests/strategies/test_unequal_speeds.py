"""Workers of unequal speed in virtual time: the real decisions and center, and a model of a number.

Worker r has rows that are all ``goals[r]``, and takes steps on (theta - goal) ** 2 / 2, so that
everything can be computed by hand and nothing depends on the machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from every_row import every
from torch import Tensor

from sparkdl.averager.coordination.actions import Actions, carry_out
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.run_events import RunEvent
from sparkdl.averager.values.center import Center, CenterSpec
from sparkdl.averager.values.center_update import Contributions
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.strategies import (
    PBSP,
    SSP,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    DelayedNesterov,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    Softsync,
    Strategy,
)

LAYOUT = (Segment("parameters", torch.float64, 1),)


@dataclass
class Speeds(Actions):
    """One training.

    Attributes:
        strategy: of windows of ``period`` steps.
        goals: of each worker's rows.
        steps: of each worker in an epoch.
        seconds: of each worker for a step.
        period: steps in a window.
        rate: the learning rate.
        rows: in a step.
        theta: the center at the end of each epoch.
        contributions: what each round was formed from.
    """

    strategy: Strategy[Any]
    goals: Sequence[float]
    steps: Sequence[int]
    seconds: Sequence[float]
    period: int = 2
    rate: float = 0.01
    rows: int = 10
    theta: list[float] = field(default_factory=list)
    contributions: list[Contributions] = field(default_factory=list)

    def run(self, epochs: int, start: float = 0.0) -> Speeds:
        """Train."""
        self._format = self.strategy.wire_format
        initial = [torch.tensor([start], dtype=torch.float64)]
        workers = len(self.goals)
        update = self.strategy.center_update
        spec = CenterSpec(layout=LAYOUT, wire_format=self._format, update=update)
        self._center = Center(spec, initial, workers)
        self._coordinator = Coordinator(
            RunSpec(world_size=workers, deadline_s=1e9, policy=self.strategy.round_policy), 0.0
        )
        self._now, self._due = 0.0, list[tuple[float, int]]()
        self._done, self._epoch = [0] * workers, [1] * workers
        self._base = [start] * workers
        self._values = [start] * workers
        self._sent: dict[int, Tensor] = {}
        self._taken: list[int] = []
        self._members = [Member(rank, "host") for rank in range(workers)]
        for member in self._members:
            self._tell(self._coordinator.joined, member)
            self._tell(self._coordinator.rows_found, member, ShardStatistics(1, ()))
        self._tell(self._coordinator.start)
        while len(self.theta) < epochs:
            self._now, rank = heapq.heappop(self._due)
            self._close(rank)
        return self

    def _close(self, rank: int) -> None:
        steps = min(self.period, self.steps[rank] - self._done[rank])
        for _ in range(steps):
            self._values[rank] -= self.rate * (self._values[rank] - self.goals[rank])
        self._done[rank] += steps
        report = WindowReport(
            rank=rank,
            epoch=self._epoch[rank],
            step=self._done[rank],
            examples=steps * self.rows,
            loss_sum=0.0,
            last=self._done[rank] == self.steps[rank],
            step_of_epoch=self._done[rank],
        )
        self._tell(self._coordinator.window_closed, self._members[rank], report)

    def _tell(self, event: Any, *arguments: Any) -> None:
        carry_out(event(self._now, *arguments), self)
        while self._taken:
            self._tell(self._coordinator.taken, self._members[self._taken.pop()])
        total = self._center.sum
        rank = None if total is None else total.turn(0)
        if total is not None and rank in self._sent:
            total.add(rank, 0, self._sent.pop(rank))
            self._tell(self._coordinator.contributed, self._members[rank])

    def open_sum(self, ranks: tuple[int, ...]) -> None:
        self._center.open_sum(ranks)

    def skip(self, rank: int) -> None:
        assert self._center.sum is not None
        self._center.sum.declare(rank, 0)

    def receive(self, member: Member, weight: float, staleness: int) -> None:
        assert self._center.sum is not None
        self._center.sum.declare(member.rank, weight, self._center.scale(staleness))
        self._sent[member.rank] = self._contribution(member.rank)

    def commit(self, contributions: Contributions) -> None:
        self._center.commit(contributions)
        self.contributions.append(contributions)

    def report(self, event: RunEvent) -> None:
        if isinstance(event, EpochSummary):
            self._center.start_epoch()
            self.theta.append(self._center.values[0].item())

    def welcome(self, member: Member) -> None:
        self._begin(member.rank, final=False)

    def reply(self, member: Member, *, final: bool, values: bool, worker_state: bool) -> None:
        self._begin(member.rank, final=final)

    def _begin(self, rank: int, *, final: bool) -> None:
        self._base[rank] = self._values[rank] = self._center.values[0].item()
        if final:
            self._done[rank], self._epoch[rank] = 0, self._epoch[rank] + 1
        steps = min(self.period, self.steps[rank] - self._done[rank])
        heapq.heappush(self._due, (self._now + steps * self.seconds[rank], rank))
        self._taken.append(rank)

    def _contribution(self, rank: int) -> Tensor:
        value, base = (torch.tensor([each[rank]]).double() for each in (self._values, self._base))
        return self._format.encode(value, base, LAYOUT[0])


GOALS, SECONDS, STEPS = (0.0, 0.0, 0.0, 1.0), (1.0, 1.0, 1.0, 3.0), 40
SLOW_MOMENTUM = OuterSGD(1, 0.5)


def averaging(**options: Any) -> ParameterAveraging:
    return ParameterAveraging(2, average_optimizer_state=False, **options)


def ends_at(strategy: Strategy[Any], rate: float) -> float:
    run = Speeds(strategy, GOALS, (STEPS,) * 4, SECONDS, rate=rate)
    return run.run(epochs=int(5 / (rate * STEPS)), start=0.5).theta[-1]


BY_SHARE = [
    averaging(cutoff=1),
    averaging(cutoff=2),
    averaging(cutoff="predicted"),
    OuterOptimizer(2, SLOW_MOMENTUM, cutoff=1),
    OuterOptimizer(2, SLOW_MOMENTUM, cutoff="predicted"),
    AsynchronousSGD(2),
    AsynchronousSGD(2, barrier=SSP(2)),
    AsynchronousSGD(2, barrier=PBSP(1)),
    AsynchronousSGD(2, barrier=Softsync(2)),
    AsynchronousOuterOptimizer(DelayedNesterov(4), 2),
]


@every("strategy", BY_SHARE)
def test_a_slow_workers_rows_count_as_much_as_any_others(strategy: Strategy[Any]) -> None:
    """Steps are small enough for the order of an epoch's windows not to matter."""
    assert ends_at(strategy, rate=0.005) == pytest.approx(0.25, abs=0.03)


@every("strategy", [averaging(), OuterOptimizer(2, SLOW_MOMENTUM)])
def test_with_everyone_in_each_round_they_do_at_any_rate(strategy: Strategy[Any]) -> None:
    for rate in (0.005, 0.05):
        assert ends_at(strategy, rate) == pytest.approx(0.25, abs=0.005)


@every("strategy", BY_SHARE[:-1])
def test_an_epoch_has_as_many_full_rounds_as_windows_however_it_is_divided(
    strategy: Strategy[Any],
) -> None:
    """Also where rows are unequal; the first epoch does not know yet who has how many."""
    run = Speeds(strategy, GOALS, (12, 40, 9, 40), SECONDS).run(1)
    first = len(run.contributions)
    rounds = Speeds(strategy, GOALS, (12, 40, 9, 40), SECONDS).run(2).contributions[first:]
    assert sum(each.share for each in rounds) == pytest.approx(40 / 2, rel=0.02)
