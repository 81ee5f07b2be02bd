"""Workers of unequal speed in virtual time: the real decisions and center, and a model of a number.

Worker r has rows that are all ``goals[r]``, and takes steps on (theta - goal) ** 2 / 2, so that
everything can be computed by hand and nothing depends on the machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparkdl.averager.coordination.actions import Actions, carry_out
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.messages.run_events import RunEvent
from sparkdl.averager.values.center import Center, CenterSpec
from sparkdl.averager.values.center_update import Contributions
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.strategies import Strategy

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
        self._tell(self._coordinator.start, {})
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
