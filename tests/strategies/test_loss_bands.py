"""What strategies learn that do not give the same bits: over ten seeds, a band of losses.

The band's ends are losses of plain torch and numpy in one process, whose workers are always in
step: every update is of everyone, and moves the center by their mean change times a factor. For a
strategy whose center moves as far in an epoch whoever comes first, both ends are one; where that
depends on the schedule, one end is of who moves least and the other of who moves most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toys import Data, batches_by_hand, classification, make_job, mlp

from sparkdl.averager.values.center import Center
from sparkdl.averager.values.center_update import Contributions
from sparkdl.strategies import (
    ASP,
    PBSP,
    PSSP,
    SSP,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    DelayedNesterov,
    ElasticAveraging,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    Softsync,
    Strategy,
)
from sparkdl.testing import run_world

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

WORKERS, EPOCHS, PERIOD, SEEDS = 4, 4, 2, range(10)
DATA = [classification([40] * WORKERS, seed=seed) for seed in SEEDS]
"""Ten steps an epoch, of batches of 4: five windows."""
Vector = np.ndarray
Move = Callable[[Vector, list[Vector]], tuple[Vector, list[Vector]]]
"""(center, what each worker has come to) -> center, and what each worker goes on from"""


def mean(factor: float) -> Move:
    """Parameter averaging, but for the factor."""
    return heavy_ball(factor, 0.0)


def nesterov(rate: float, momentum: float) -> Move:
    """As DiLoCo's outer optimizer."""
    return momentum_steps(rate, momentum, looks_ahead=True)


def heavy_ball(rate: float, momentum: float) -> Move:
    """As SlowMo's."""
    return momentum_steps(rate, momentum, looks_ahead=False)


def momentum_steps(rate: float, momentum: float, *, looks_ahead: bool) -> Move:
    """An outer step on the mean change."""
    velocity: Any = 0.0

    def move(center: Vector, own: list[Vector]) -> tuple[Vector, list[Vector]]:
        nonlocal velocity
        change = np.mean(own, axis=0) - center
        velocity = momentum * velocity + change
        center = center + rate * (change + momentum * velocity if looks_ahead else velocity)
        return center, [center] * WORKERS

    return move


def springs(rate: float) -> Move:
    """Zhang et al.'s elastic averaging; what replicas give up at once, and not a step later."""

    def move(center: Vector, own: list[Vector]) -> tuple[Vector, list[Vector]]:
        pulls = [rate * (each - center) for each in own]
        return center + sum(pulls), [each - pull for each, pull in zip(own, pulls, strict=True)]

    return move


def in_step(data: Data, seed: int, move: Move) -> nn.Module:
    """Train in windows of ``PERIOD`` minibatches of everyone."""
    module = mlp(seed=seed).train()
    center = flat(module)
    own = [center] * WORKERS
    for epoch in range(1, EPOCHS + 1):
        plans = [batches_by_hand(data, rank, epoch, 4) for rank in range(WORKERS)]
        for start in range(0, len(plans[0]), PERIOD):
            windows = [plan[start : start + PERIOD] for plan in plans]
            own = [trained(module, *each) for each in zip(own, windows, strict=True)]
            center, own = move(center, own)
    put(module, center)
    return module


def trained(
    module: nn.Module, values: Vector, window: list[tuple[np.ndarray, np.ndarray]]
) -> Vector:
    put(module, values)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for features, targets in window:
        optimizer.zero_grad()
        outputs = module(torch.from_numpy(features))
        nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
        optimizer.step()
    return flat(module)


def flat(module: nn.Module) -> Vector:
    return nn.utils.parameters_to_vector(module.parameters()).detach().numpy().copy()


def put(module: nn.Module, values: Vector) -> None:
    nn.utils.vector_to_parameters(torch.from_numpy(values.copy()), module.parameters())


def loss_of(module: nn.Module, data: Data) -> float:
    """On all rows."""
    with torch.no_grad():
        outputs = module.eval()(torch.from_numpy(data.features))
        return float(nn.functional.cross_entropy(outputs, torch.from_numpy(data.targets)))


@cache
def losses_in_step(make: Callable[..., Move], *arguments: float) -> list[float]:
    return [loss_of(in_step(DATA[seed], seed, make(*arguments)), DATA[seed]) for seed in SEEDS]


def losses(strategy: Strategy[Any], seeds: range = SEEDS) -> list[float]:
    found = []
    for seed in seeds:
        job = make_job(mlp(seed=seed), strategy=strategy, epochs=EPOCHS)
        outcome = run_world(job, DATA[seed].shards())
        assert [row.examples for row in outcome.history] == [40 * WORKERS] * EPOCHS
        found.append(loss_of(outcome.module, DATA[seed]))
    return found


@dataclass(frozen=True)
class Band:
    """Of a strategy, the losses in step of who moves the center least, and of who does most.

    Attributes:
        strategy: of windows of ``PERIOD`` steps.
        slow: makes the one in step that learns least, or as much.
        fast: makes the one that learns most, if that is another.
    """

    strategy: Strategy[Any]
    slow: tuple[Any, ...]
    fast: tuple[Any, ...] | None = None

    def holds(self, found: list[float]) -> bool:
        """Whether losses of the first seeds are within 5 % of it on average, and each in 15 %."""
        ends = (losses_in_step(*each)[: len(found)] for each in (self.fast or self.slow, self.slow))
        least, most = map(np.array, ends)
        together = 0.95 * least.mean() <= np.mean(found) <= 1.05 * most.mean()
        return bool(together and (0.85 * least <= found).all() and (found <= 1.15 * most).all())


def by_staleness(barrier: Any) -> AsynchronousSGD:
    """Whose changes may add up to more than the mean of everyone's."""
    return AsynchronousSGD(PERIOD, scale_by_staleness=True, barrier=barrier)


OUTER = OuterSGD(0.7, 0.5, nesterov=False)
BANDS = {
    # Whoever comes first, what all bring adds up to their mean.
    "ASP": Band(AsynchronousSGD(PERIOD, barrier=ASP()), (mean, 1.0)),
    "SSP(1)": Band(AsynchronousSGD(PERIOD, barrier=SSP(1)), (mean, 1.0)),
    "PBSP(1)": Band(AsynchronousSGD(PERIOD, barrier=PBSP(1)), (mean, 1.0)),
    "PSSP(1, 1)": Band(AsynchronousSGD(PERIOD, barrier=PSSP(1, 1)), (mean, 1.0)),
    "Softsync(2)": Band(AsynchronousSGD(PERIOD, barrier=Softsync(2)), (mean, 1.0)),
    # If all are as fast a change counts for one in as many as there are workers; more, where some
    # are not met by the others in between.
    "ASP, by staleness": Band(by_staleness(ASP()), (mean, 1.0), (mean, 2.0)),
    "Softsync(2), by staleness": Band(by_staleness(Softsync(2)), (mean, 1.0), (mean, 2.0)),
    "elastic": Band(ElasticAveraging(PERIOD, 0.05, mode="asynchronous"), (springs, 0.05)),
    "delayed Nesterov": Band(
        AsynchronousOuterOptimizer(DelayedNesterov(WORKERS, 0.7, 0.5), PERIOD),
        (nesterov, 0.7, 0.5),
    ),
    "cutoff=1": Band(
        ParameterAveraging(PERIOD, average_optimizer_state=False, cutoff=1), (mean, 1.0)
    ),
    "cutoff=1, outer": Band(OuterOptimizer(PERIOD, OUTER, cutoff=1), (heavy_ball, 0.7, 0.5)),
    "predicted": Band(
        ParameterAveraging(PERIOD, average_optimizer_state=False, cutoff="predicted"),
        (mean, 1.0),
    ),
    "predicted, outer": Band(
        OuterOptimizer(PERIOD, OUTER, cutoff="predicted"), (heavy_ball, 0.7, 0.5)
    ),
}


@pytest.mark.parametrize("name", BANDS)
def test_over_ten_seeds_losses_stay_in_a_band(name: str) -> None:
    band = BANDS[name]
    assert band.holds(losses(band.strategy))


def moved_by(factors: Sequence[float]) -> Callable[[Center, Contributions], None]:
    """A commit that moves the center by these multiples of what it should, one after another."""
    commit, coming = Center.commit, cycle(factors)

    def wrong(center: Center, contributions: Contributions) -> None:
        before = [values.clone() for values in center.values]
        commit(center, contributions)
        factor = next(coming)
        for values, old in zip(center.values, before, strict=True):
            values.sub_(old).mul_(factor).add_(old)

    return wrong


@pytest.mark.parametrize("factors", [(0.0, 1.0), (2.0,)], ids=["half are lost", "rate is double"])
@pytest.mark.parametrize("name", BANDS)
def test_updates_that_are_lost_or_too_large_leave_the_band(
    name: str, factors: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    band = BANDS[name]
    monkeypatch.setattr(Center, "commit", moved_by(factors))
    assert not band.holds(losses(band.strategy, SEEDS[:5]))
