"""Springs of workers that meet the center one by one: round robin, and Hogwild."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from by_hand import Springs
from every_row import every
from springs import Watched, job, replicas
from torch import Tensor, nn
from toys import relative_error, windows_by_hand
from trainings import EVEN, Point, equal_rows, parabola, slope

from sparkdl.events import WindowReport
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.strategies import ElasticAveraging, Run
from sparkdl.testing import run_world

HOGWILD = ElasticAveraging(period=2, moving_rate=0.2, mode="hogwild")
ROUND_ROBIN = replace(HOGWILD, mode="round_robin")


def round_robin(epochs: int) -> nn.Module:
    """Windows of two minibatches, one worker after the other."""
    hand = Springs(0.2)
    for _, windows in windows_by_hand(EVEN, epochs, period=2):
        for rank, window in windows.items():
            hand.learn(rank, window)
            hand.meet([rank])
    return hand.follow([])


def test_round_robin_workers_meet_the_center_in_the_order_of_ranks() -> None:
    outcome = run_world(job(strategy=ROUND_ROBIN), EVEN.shards())
    assert relative_error(outcome.module, round_robin(epochs=3)) < 1e-12
    assert [row.examples for row in outcome.history] == [sum(EVEN.sizes)] * 3


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
