"""Learning rates that change: on every worker those that torch's scheduler alone would give."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from every_row import every, every_row
from hypothesis import given, settings
from replicas import train_plainly
from torch import nn
from torch.optim import lr_scheduler
from toys import (
    batches_by_hand,
    classification,
    held_out,
    held_out_schema,
    make_job,
    mlp,
    relative_error,
)

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError, DisconnectedError, WorkerError
from sparkdl.feed.feed import FeedOptions
from sparkdl.replica.schedule import Schedule
from sparkdl.reshuffle.server import exchange_plan
from sparkdl.strategies import GradientAllReduce, ParameterAveraging
from sparkdl.testing import run_world
from sparkdl.worker import Job, loop


def warmup_then_cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=3),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 9]),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=7),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=40),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "warmup": warmup_then_cosine,
}


def momentum() -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    groups: list[dict[str, Any]] = [
        {"params": [p], "lr": lr} for p, lr in zip(parameters, (0.1, 0.2), strict=True)
    ]
    return torch.optim.SGD(groups, momentum=0.9)


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


@pytest.mark.parametrize("build", SCHEDULERS.values(), ids=SCHEDULERS)
@settings(max_examples=15)
@given(places=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4))
def test_a_schedule_can_be_taken_to_any_place_to_the_bit(
    build: Any, places: list[tuple[int, int]]
) -> None:
    optimizer, oracle = momentum(), momentum()
    schedule, plain = Schedule(optimizer, build, "step"), build(oracle)
    for epoch, step in places:
        schedule.start_at(epoch, 9 * (epoch - 1) + step)
    epoch, step = places[-1]
    for _ in range(9 * (epoch - 1) + step):
        oracle.step()
        plain.step()
    assert hyperparameters(optimizer) == hyperparameters(oracle)
    optimizer.step()
    schedule.after_step()
    oracle.step()
    plain.step()
    assert hyperparameters(optimizer) == hyperparameters(oracle)


CYCLIC: Any = partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1)
CYCLES = [SCHEDULERS["OneCycleLR"], CYCLIC]
# Every epoch that is not better by three tenths halves the rate, so that some are and some are not.
PLATEAU: Any = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.3)
ONE_WORKER: list[Any] = [
    ParameterAveraging(1),
    GradientAllReduce(),
    GradientAllReduce(shard_optimizer=True),
    GradientAllReduce(shard_parameters=True),
]


# torch's own, on importing the sharded optimizer
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@every(
    ("strategy", "scheduler", "unit", "momentum", "epochs"),
    [
        *((strategy, SCHEDULERS["warmup"], "step", 0.9, 3) for strategy in ONE_WORKER),
        (ParameterAveraging(1), SCHEDULERS["warmup"], "epoch", 0.9, 3),
        *((strategy, PLATEAU, "epoch", 0.9, 10) for strategy in ONE_WORKER[:2]),
        *((ParameterAveraging(3), cycle, "step", 0.0, 2) for cycle in CYCLES),
    ],
)
def test_one_worker_trains_as_plain_torch_would(
    strategy: Any, scheduler: Any, unit: Any, momentum: float, epochs: int
) -> None:
    """Also by a schedule that follows the training loss, or that turns momentum on."""
    data, oracle, losses = classification([22]), mlp(), []
    build = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    optimizer = build(oracle.parameters())
    schedule = scheduler(optimizer)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for features, targets in batches_by_hand(data, 0, epoch, 4):
            total += len(targets) * train_plainly(oracle, optimizer, features, targets).item()
            if unit == "step":
                schedule.step()
        losses.append(total / 22)
        if unit == "epoch":
            schedule.step(*losses[-1:] if scheduler is PLATEAU else ())
    if scheduler is PLATEAU:
        rates_by_torch(losses, 0.1)
    changes = {"optimizer": build, "strategy": strategy, "scheduler": scheduler}
    job = make_job(mlp(), **changes, scheduler_every=unit, epochs=epochs)
    trained = run_world(job, data.shards()).module
    for mine, other in zip(trained.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


class Recording(torch.optim.SGD):
    """Notes the learning rate of each step that has gradients, by the thread that takes it."""

    def __init__(self, parameters: Any, rates: dict[str, list[float]], lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.rates = rates

    def step(self, closure: Any = None) -> Any:
        if any(p.grad is not None and p.grad.any() for p in self.param_groups[0]["params"]):
            rates = self.rates.setdefault(threading.current_thread().name, [])
            rates.append(round(self.param_groups[0]["lr"], 9))
        return super().step(closure)


def test_a_learning_rate_that_is_a_tensor_is_that_of_plain_torch_and_stays_the_users() -> None:
    rate = torch.tensor(0.1)
    adam = partial(torch.optim.Adam, lr=rate, fused=True)
    data, by = classification([20]), warmup_then_cosine
    job = make_job(mlp(), optimizer=adam, scheduler=by, scheduler_every="step", epochs=2)
    outcome = run_world(job, data.shards())
    assert rate == torch.tensor(0.1)
    oracle = mlp().train()
    optimizer = adam(oracle.parameters())
    schedule = by(optimizer)
    for epoch in (1, 2):
        for features, targets in batches_by_hand(data, 0, epoch, 4):
            train_plainly(oracle, optimizer, torch.from_numpy(features), torch.from_numpy(targets))
            schedule.step()
    assert relative_error(outcome.module, oracle) < 1e-9


BY_STEP = [round(1 / (1 + step), 9) for step in range(19)]
ANEW = FeedOptions(reshuffle_every=2)


@every_row(
    ([20, 9], 2, FeedOptions(), BY_STEP[:10], [*BY_STEP[:3], *BY_STEP[5:8]]),
    # two epochs of 5 and 1 minibatches, then three of 3 each
    ([20, 4], 5, ANEW, BY_STEP, [BY_STEP[0], BY_STEP[5], *BY_STEP[10:]]),
)
def test_workers_with_fewer_rows_catch_up_at_the_end_of_each_epoch_and_no_rate_comes_twice(
    sizes: list[int], epochs: int, feed: FeedOptions, first: list[float], second: list[float]
) -> None:
    rates: dict[str, list[float]] = {}
    schedule: Any = {"scheduler": SCHEDULERS["LambdaLR"], "scheduler_every": "step"}
    recording = partial(Recording, rates=rates, lr=1.0)
    job = make_job(mlp(), optimizer=recording, **schedule, epochs=epochs, feed=feed)
    run_world(job, classification(sizes).shards())
    assert rates == {"sparkdl-rank-0": first, "sparkdl-rank-1": second}


@pytest.mark.parametrize("drop_last", [False, True])
@given(
    rows=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    every=st.integers(0, 3),
    epochs=st.integers(1, 6),
)
def test_the_steps_before_an_epoch_are_those_of_the_worker_with_the_most_rows(
    drop_last: bool, rows: list[int], every: int, epochs: int
) -> None:
    options = FeedOptions(reshuffle_every=every, drop_last=drop_last)
    job = make_job(mlp(), feed=options, strategy=GradientAllReduce(accumulate=2))
    shards, steps = list(rows), 0
    for epoch in range(1, epochs + 1):
        if options.reshuffles(epoch):
            shards = exchange_plan(shards, len(shards), seed=1, epoch=epoch).sum(axis=0).tolist()
        assert job.steps_before(epoch, rows) == steps
        minibatches = [n // 4 if drop_last else math.ceil(n / 4) for n in shards]
        steps += math.ceil(max(minibatches) / 2)


def rates_by_torch(losses: list[float], lr: float) -> list[float]:
    """The learning rate of each epoch, if these are the losses of the epochs."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, rates = PLATEAU(optimizer), []
    for loss in losses:
        rates.append(round(optimizer.param_groups[0]["lr"], 9))
        scheduler.step(loss)
    assert len(set(rates)) > 1, f"{rates} would not tell one schedule from another"
    return rates


def validating(sizes: list[int], **changes: Any) -> tuple[Job, list[Any]]:
    """A job whose workers hold every third of their rows out, and its rows."""
    job = make_job(mlp(), schema=held_out_schema(), scheduler=PLATEAU, **changes)
    return job, held_out(sizes).shards()


def test_all_workers_follow_the_loss_on_all_held_out_rows_through_lost_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates: dict[str, list[float]] = {}
    job, shards = validating(
        [24, 12], optimizer=partial(Recording, rates=rates, lr=1.0), epochs=6, max_failures=5
    )
    validate, lost = loop._validate, []

    def lose_connection(run: Any, feed: Any, epoch: int) -> Any:
        if run.rank == 1 and epoch in (2, 5) and epoch not in lost:
            lost.append(epoch)
            raise DisconnectedError("the test says so")
        return validate(run, feed, epoch)

    monkeypatch.setattr(loop, "_validate", lose_connection)
    history = run_world(job, shards).history
    assert lost == [2, 5]
    assert [epoch.validation_examples for epoch in history] == [12] * 6
    by_epoch = rates_by_torch([epoch.validation_loss or 0.0 for epoch in history], 1.0)
    assert rates["sparkdl-rank-0"] == [rate for rate in by_epoch for _ in range(4)]
    assert rates["sparkdl-rank-1"] == [rate for rate in by_epoch for _ in range(2)]


@every(("scheduler", "epochs"), [(PLATEAU, 1), (PLATEAU, 4), *((each, 1) for each in CYCLES)])
def test_a_schedule_that_follows_losses_or_turns_momentum_on_can_be_resumed(
    scheduler: Any, epochs: int, tmp_path: Path
) -> None:
    if scheduler is PLATEAU:
        momentum = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
        job, shards = validating([24, 12], optimizer=momentum, epochs=6)
    else:
        job = make_job(mlp(), scheduler=scheduler, scheduler_every="step", epochs=2)
        job, shards = replace(job, strategy=ParameterAveraging(2)), classification([14, 9]).shards()
    straight = run_world(job, shards)
    if scheduler is PLATEAU:
        rates_by_torch([epoch.validation_loss or 0.0 for epoch in straight.history], 1.0)
    checkpoints = CheckpointPolicy(path=str(tmp_path))
    run_world(replace(job, epochs=epochs), shards, checkpoints=checkpoints)
    resumed = run_world(job, shards, checkpoints=checkpoints)
    for mine, other in zip(resumed.module.parameters(), straight.module.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_schedule_that_follows_losses_takes_no_step_after_each_of_the_optimizers() -> None:
    with pytest.raises(ConfigError, match="schedulerEvery='epoch'"):
        Schedule(momentum(), PLATEAU, "step")


def test_what_is_no_scheduler_is_named() -> None:
    job = make_job(mlp(), scheduler=lambda optimizer: 3)
    with pytest.raises((ConfigError, WorkerError), match="but it returned a int"):
        run_world(job, classification([8]).shards())
