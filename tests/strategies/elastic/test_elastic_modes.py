"""Springs of workers that meet the center one by one: round robin, and Hogwild."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from decided import do
from every_row import every
from oracles import pulled
from replayed import recorded_decisions
from springs import DATA, SIZES, ByHand, job
from test_elastic_stability import Point, parabola
from torch import Tensor, nn
from toys import batches_by_hand, relative_error

from sparkdl.events import WindowReport
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies import ElasticAveraging, Run
from sparkdl.testing import run_world
from sparkdl.testing.simulation import random_plan, simulate_strategy

HOGWILD = ElasticAveraging(period=2, moving_rate=0.2, mode="hogwild")
ROUND_ROBIN = replace(HOGWILD, mode="round_robin")
ASYNCHRONOUS = replace(HOGWILD, mode="asynchronous")


def laps(windows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Whose turn it is, and in which lap, until all have had so many windows."""
    for lap in range(max(windows, default=0)):
        yield from ((rank, lap) for rank in range(len(windows)) if lap < windows[rank])


def round_robin(epochs: int) -> nn.Module:
    """Windows of two minibatches, one worker after the other."""
    hand = ByHand(0.2)
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(DATA, rank, epoch, 4) for rank in range(3)]
        for rank, lap in laps([-(-len(plan) // 2) for plan in plans]):
            hand.train(rank, plans[rank][2 * lap : 2 * lap + 2])
            hand.meet([rank])
    return hand.outcome()


def test_round_robin_workers_meet_the_center_in_the_order_of_ranks() -> None:
    outcome = run_world(job(strategy=ROUND_ROBIN), DATA.shards())
    assert relative_error(outcome.module, round_robin(epochs=3)) < 1e-12
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3


def test_a_made_up_round_robin_run_without_faults_keeps_the_order() -> None:
    """Whatever messages and windows take: 40 schedules of one to four workers."""
    for seed in range(40):
        plan = replace(random_plan(seed), faults=())
        with recorded_decisions() as decisions:
            simulate_strategy(replace(ROUND_ROBIN, period=1), plan, pulled(0.2))
        told = [each.event for each in decisions if isinstance(each, do.report)]
        windows = [event for event in told if isinstance(event, WindowReport)]
        # One without rows has a last window all the same.
        expected = [rank for rank, _ in laps([max(count, 1) for count in plan.windows])]
        for epoch in range(1, plan.epochs + 1):
            assert [each.rank for each in windows if each.epoch == epoch] == expected


class LateClones:
    """A center and so many workers that do all alike, each of which reads it before they write.

    Args:
        workers: how many they are.
        rate: the moving rate.
        run: of the one that trains.
    """

    def __init__(self, workers: int, rate: float) -> None:
        self.center = 1.0
        self.said: list[tuple[str, int]] = []
        self.run: Run | None = None
        self._gain = workers * rate
        self._read, self._on_its_way = 1.0, 1.0

    def begin_exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        self.said.append(("begin", window.step))
        self._on_its_way = self.center
        self.center += self._gain * (float(segments[0]) - self._read)

    def end_exchange(self, segments: Sequence[Tensor], local: float) -> None:
        assert self.run is not None
        self.said.append(("end", self.run.step))
        self._read = self._on_its_way
        segments[0].fill_(self._read)

    def exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        self.said.append(("last", window.step))
        segments[0].fill_(self.center)


def train(strategy: ElasticAveraging, lr: float, workers: int, steps: int) -> LateClones:
    clones = LateClones(workers, strategy.moving_rate or 0.0)
    replica = Replica(Point(1.0), partial(torch.optim.SGD, lr=lr), parabola)
    clones.run = run = Run(0, replica, clones)  # type: ignore[arg-type]
    row = torch.ones(1, 6, dtype=torch.float64), torch.zeros(1)
    batches = (Batch((row[0],), row[1], last=step == steps - 1) for step in range(steps))
    strategy.train_epoch(run, strategy.start(run), batches)
    return clones


def test_hogwild_workers_wait_for_no_round_trip_but_an_epoch_s_last() -> None:
    said = train(HOGWILD, 0.1, workers=1, steps=7).said
    between = [("begin", 2), ("end", 4), ("begin", 4), ("end", 6), ("begin", 6), ("end", 7)]
    assert said == [*between, ("last", 7)]


def edge(lr: float, workers: int) -> float:
    """The moving rate at which late clones on a parabola come apart, of their linear map.

    Of a worker's place, the center, and the center a round before, which is what has been read.
    """
    stable, unstable = 0.0, 1.0
    while unstable - stable > 1e-9:
        rate = (stable + unstable) / 2
        gain = workers * rate
        step = np.array([[1 - lr - rate, 0.0, rate], [gain, 1.0, -gain], [0.0, 1.0, 0.0]])
        if max(abs(np.linalg.eigvals(step))) < 1:
            stable = rate
        else:
            unstable = rate
    return stable


@every(("lr", "workers"), [(0.1, 2), (0.5, 3)])
def test_hogwild_springs_break_where_their_linear_map_does(lr: float, workers: int) -> None:
    rate = edge(lr, workers)
    for part, stable in ((0.98, True), (1.02, False)):
        strategy = ElasticAveraging(1, part * rate, mode="hogwild")
        assert (abs(train(strategy, lr, workers, 1500).center) < 1.0) is stable


def test_hogwild_springs_ring_without_any_learning_beyond_the_rate_that_is_refused() -> None:
    for workers in (1, 2, 5):
        assert edge(1e-7, workers) == pytest.approx(1 / workers, rel=1e-5)
