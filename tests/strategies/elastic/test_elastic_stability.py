"""Springs by themselves: what leaves a replica arrives in the center, and where they break."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_keyword import center_of
from every_row import every
from springs import DATA, ByHand, Watched, in_step, job, replicas
from torch import Tensor, nn
from toys import Data

from sparkdl.events import WindowReport
from sparkdl.protocols import Batch, Segment
from sparkdl.replica import Replica
from sparkdl.strategies import Contributions, ElasticAveraging, Run
from sparkdl.testing import run_world


class Point(nn.Module):
    """A number, times each row's first feature."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        return self.place * features[:, 0]


def slope(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def parabola(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * outputs.square().mean()


def equal_rows(*values: float, steps: int) -> Data:
    """So many rows of each rank, all of its value."""
    features = np.repeat(np.array(values), steps)[:, None] * np.ones(6)
    return Data(features, np.zeros(len(features), np.int64), (steps,) * len(values))


@every("momentum", [0.0, 0.7])
@every("mode", ["synchronous", "asynchronous", "hogwild", "round_robin"])
def test_what_leaves_the_replicas_arrives_in_the_center(mode: Any, momentum: float) -> None:
    """On slopes of 1, -2, 5 each step takes that times the learning rate from the sum of all."""
    data, strategy = equal_rows(1.0, -2.0, 5.0, steps=9), Watched(2, 0.3, momentum, mode)
    sloping = job(Point(4.0), loss=slope, strategy=strategy, batch_size=1)
    center = run_world(sloping, data.shards()).module.place.item()
    found = replicas()
    assert all(each["due"] for each in found)
    kept = sum(each["own.0"] - each["pull.0"] for each in found)
    if momentum:
        kept -= momentum * sum(each["velocity.0"] for each in found)
    # A step goes as far as all before, each momentum times as far as the one after it.
    steps = sum((1 - momentum**step) / (1 - momentum) for step in range(1, 9 * 3 + 1))
    moved = 0.1 * (1 - 2 + 5) * steps
    assert center + float(kept) == pytest.approx(4 * 4.0 - moved, rel=1e-12)
    assert len({float(each["own.0"]) for each in found}) == 3


def test_next_to_no_pull_leaves_the_replicas_to_themselves() -> None:
    run_world(job(strategy=Watched(2, moving_rate=1e-14)), DATA.shards())
    hand = ByHand(0.0)
    in_step(hand, epochs=3)
    for rank, each in enumerate(replicas()):
        # ``own.0`` lies as the parameters do.
        assert np.allclose(each["own.0"].numpy(), hand.own[rank], rtol=1e-9, atol=1e-12)


def test_a_whole_pull_swaps_worker_and_center() -> None:
    """On a slope of 1 each of the two takes every second step: 0, -0.1, -0.1, -0.2, -0.2, ..."""
    data = equal_rows(1.0, steps=7)
    strategy = ElasticAveraging(1, moving_rate=1)
    swapping = job(Point(0.0), loss=slope, strategy=strategy, batch_size=1, epochs=1)
    assert run_world(swapping, data.shards()).module.place.item() == pytest.approx(-0.4)


class Clones:
    """A center and so many workers that do all alike, of which one trains.

    Args:
        strategy: theirs.
        start: where all begin.
        workers: how many they are.
    """

    def __init__(self, strategy: ElasticAveraging, start: float, workers: int) -> None:
        layout = (Segment("parameters", torch.float64, 1),)
        values = [torch.tensor([start], dtype=torch.float64)]
        update = strategy.center_update
        self.center = center_of(layout, values, workers, strategy.wire_format, update)
        self._ranks = range(workers)

    def exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        total = self.center.open_sum(self._ranks)
        for rank in self._ranks:
            total.declare(rank, window.weight)
            total.add(rank, 0, segments[0])
        self.center.commit(Contributions((window.weight,) * len(self._ranks), len(self._ranks)))
        segments[0].copy_(self.center.values[0])


def distance(rate: float, lr: float, workers: int = 1) -> float:
    """How far from the bottom of a parabola the center is after 400 steps, from 1 at the start."""
    strategy = ElasticAveraging(1, moving_rate=rate)
    clones = Clones(strategy, 1.0, workers)
    replica = Replica(Point(1.0), partial(torch.optim.SGD, lr=lr), parabola)
    run = Run(0, replica, clones, world_size=workers)  # type: ignore[arg-type]
    row = torch.ones(1, 6, dtype=torch.float64), torch.zeros(1)
    steps = (Batch((row[0],), row[1], last=step == 399) for step in range(400))
    strategy.train_epoch(run, strategy.start(run), steps)
    return abs(float(clones.center.values[0]))


@every("lr", [0.5, 1.2])
def test_the_edge_of_stability_is_the_paper_s(lr: float) -> None:
    """(4 - 2 eta) / (4 - eta) for one worker; bisected to 1 %."""
    stable, unstable = 0.0, 1.0
    assert distance(unstable, lr) > 1.0
    while unstable - stable > 0.01:
        middle = (stable + unstable) / 2
        if distance(middle, lr) < 1.0:
            stable = middle
        else:
            unstable = middle
    assert (stable + unstable) / 2 == pytest.approx((4 - 2 * lr) / (4 - lr), rel=0.02)


def test_the_edge_of_stability_of_three_in_step() -> None:
    """(4 - 2 eta) / (2 + 2 p - p eta), where an eigenvalue of what they do together passes -1.

    With s the workers' common place, (s, c) <- ((1 - eta - a) s + a c, p a s + (1 - p a) c).
    """
    edge = (4 - 2 * 0.5) / (2 + 2 * 3 - 3 * 0.5)
    assert distance(0.98 * edge, 0.5, workers=3) < 1e-2
    assert distance(1.015 * edge, 0.5, workers=3) > 1e1
