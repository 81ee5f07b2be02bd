"""OuterOptimizer against plain torch, over whole runs, and in its limits."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from every_row import every
from torch import nn
from toys import (
    _average_optimizers,
    _train_by_hand,
    batches_by_hand,
    classification,
    mlp,
    relative_error,
)
from trainings import ADAGRAD, ADAM, DATA, MOMENTUM, SGD, SIZES, SLOW_MOMENTUM, job

from sparkdl.events import WindowReport
from sparkdl.strategies import OuterOptimizer, OuterSGD, ParameterAveraging
from sparkdl.testing import run_world


def by_hand(
    epochs: int,
    period: Any = lambda epoch: 2,
    outer: OuterSGD = SLOW_MOMENTUM,
    inner: Any = SGD,
    inner_state: str = "keep",
) -> nn.Module:
    """Plain torch in one process, the outer optimizer too."""
    center = mlp().train()
    step_center = torch.optim.SGD(
        center.parameters(), outer.learning_rate, outer.momentum, nesterov=outer.nesterov
    )
    replicas = [copy.deepcopy(center) for _ in SIZES]
    optimizers = [inner(replica.parameters()) for replica in replicas]
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(DATA, rank, epoch, 4) for rank in range(len(SIZES))]
        for start in range(0, max(map(len, plans)), period(epoch)):
            weights = {}
            for rank, plan in enumerate(plans):
                if window := plan[start : start + period(epoch)]:
                    _train_by_hand(replicas[rank], optimizers[rank], window)
                    weights[rank] = sum(len(targets) for _, targets in window)
            trained = [list(replicas[rank].parameters()) for rank in weights]
            for parameter, mine in zip(
                center.parameters(), zip(*trained, strict=True), strict=True
            ):
                mean = np.average([p.detach().numpy() for p in mine], 0, list(weights.values()))
                parameter.grad = parameter.detach() - torch.from_numpy(mean)
            step_center.step()
            for replica in replicas:
                replica.load_state_dict(center.state_dict())
            if inner_state == "average":
                _average_optimizers(optimizers, weights)
            if inner_state == "reset":
                optimizers = [inner(replica.parameters()) for replica in replicas]
    return center


@every(
    ("inner_state", "inner"),
    [
        *(("keep", MOMENTUM), ("average", MOMENTUM), ("reset", MOMENTUM)),
        *(("keep", ADAM), ("average", ADAM), ("reset", ADAGRAD)),
    ],
)
def test_it_is_the_algorithm_by_hand_on_unequal_shards(inner_state: Any, inner: Any) -> None:
    outer = OuterSGD(0.7, 0.5)
    strategy = OuterOptimizer(2, outer, inner_state)
    outcome = run_world(job(strategy=strategy, optimizer=inner), DATA.shards())
    oracle = by_hand(3, outer=outer, inner=inner, inner_state=inner_state)
    # Adam counts its steps in float32, of which the mean is one too.
    assert relative_error(outcome.module, oracle) < 1e-8


def test_each_inner_state_gives_another_model() -> None:
    """Else the oracle above would show nothing."""
    ends = [by_hand(1, inner=MOMENTUM, inner_state=each) for each in ("keep", "average", "reset")]
    for first, second in pairwise([*ends, ends[0]]):
        assert relative_error(first, second) > 1e-3


def test_the_period_changes_with_the_epoch() -> None:
    strategy = OuterOptimizer(((1, 1), (2, 4)), SLOW_MOMENTUM)
    outcome = run_world(job(strategy=strategy), DATA.shards())
    oracle = by_hand(3, period=lambda epoch: 1 if epoch == 1 else 4)
    assert relative_error(outcome.module, oracle) < 1e-12


@every(
    ("period", "ends"),
    [
        (4, {0: [4, 8, 10], 1: [4, 8, 9], 2: [4, 6]}),
        (3, {0: [3, 6, 9, 10], 1: [3, 6, 9], 2: [3, 6]}),
        (500, {0: [10], 1: [9], 2: [6]}),
        (((1, 4), (2, 3)), {0: [3, 6, 9, 10], 1: [3, 6, 9], 2: [3, 6]}),
        (((1, 500), (2, 4), (9, 1)), {0: [4, 8, 10], 1: [4, 8, 9], 2: [4, 6]}),
    ],
)
def test_rounds_come_after_every_period_and_at_the_end_of_an_epoch(
    period: Any, ends: dict[int, list[int]]
) -> None:
    windows: list[WindowReport] = []

    def on_event(event: object) -> None:
        if isinstance(event, WindowReport) and event.epoch == 2:
            windows.append(event)

    run_world(job(strategy=OuterOptimizer(period), epochs=2), DATA.shards(), on_event=on_event)
    seen = {rank: [w.step_of_epoch for w in windows if w.rank == rank] for rank in range(3)}
    assert seen == ends
    assert sum(window.examples for window in windows) == sum(SIZES)


# Limits


@every("nesterov", [True, False])
def test_at_period_one_it_is_sgd_with_that_momentum_on_the_union_batch(nesterov: bool) -> None:
    strategy = OuterOptimizer(1, OuterSGD(0.7, 0.9, nesterov))
    outcome = run_world(job(strategy=strategy), DATA.shards())
    oracle = copy.deepcopy(mlp())
    sgd = torch.optim.SGD(oracle.parameters(), 0.1 * 0.7, 0.9, nesterov=nesterov)
    for epoch in range(1, 4):
        plans = [batches_by_hand(DATA, rank, epoch, 4) for rank in range(3)]
        for step in range(max(map(len, plans))):
            parts = [plan[step] for plan in plans if step < len(plan)]
            union = tuple(np.concatenate(part) for part in zip(*parts, strict=True))
            _train_by_hand(oracle, sgd, [union])  # type: ignore[list-item]
    assert relative_error(outcome.module, oracle) < 1e-10


# What is no parameter, what changes by itself


def normalized() -> nn.Module:
    torch.manual_seed(2)
    linear = nn.Linear(6, 5, bias=False)  # BatchNorm would take it out again
    return nn.Sequential(linear, nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def test_buffers_become_the_workers_mean() -> None:
    """In the first round, to which both strategies come with the same replicas."""
    data = classification([40, 32, 20])  # no minibatch of one row
    states = [
        run_world(job(normalized(), strategy=strategy, epochs=1), data.shards()).module.state_dict()
        for strategy in (OuterOptimizer(500), ParameterAveraging(500))
    ]
    differ = {key for key in states[0] if not torch.equal(states[0][key], states[1][key])}
    assert differ == {name for name, _ in normalized().named_parameters()}


def test_bfloat16_ends_close_to_float32() -> None:
    exact, rounded = (
        run_world(
            job(strategy=OuterOptimizer(2, OuterSGD(0.7, 0.5), wire_dtype=wire_dtype)),
            DATA.shards(),
        ).module
        for wire_dtype in ("float32", "bfloat16")
    )
    start = mlp()
    moved = max(
        float((p - q).detach().abs().max())
        for p, q in zip(exact.parameters(), start.parameters(), strict=True)
    )
    for mine, other in zip(rounded.parameters(), exact.parameters(), strict=True):
        # The velocity carries what a round has rounded no further than 1 / (1 - momentum) times.
        assert float((mine - other).detach().abs().max()) <= moved / 32
    assert relative_error(rounded, exact) > 0
