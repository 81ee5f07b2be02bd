"""Optimizers of parameters by their names: each strategy trains as one process does with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every
from models import decayed
from torch import nn
from toys import classification, make_job, mlp, relative_error, sgd_on_union

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError
from sparkdl.replica.optimizer_state import takes_names
from sparkdl.strategies import GradientAllReduce, ParameterAveraging
from sparkdl.testing import run_world

Named = Iterable[tuple[str, nn.Parameter]]


def adam_of_groups(named_parameters: Named) -> torch.optim.Optimizer:
    """Other hyperparameters for the last layer, which is decayed, in the order of the names."""
    named = sorted(named_parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if name.startswith("0.")], "weight_decay": 0.0},
            {"params": [p for name, p in named if name.startswith("2.")], "lr": 0.03},
        ],
        lr=0.01,
        weight_decay=0.5,
    )


def summing(named_parameters: Named) -> torch.optim.Optimizer:
    """Has state before its first step, and keeps the names."""
    return torch.optim.Adagrad(list(named_parameters), lr=0.05, initial_accumulator_value=0.1)


class Made:
    """Something else that is called with names."""

    def __call__(self, named_parameters: Named, lr: float = 0.1) -> torch.optim.Optimizer:
        return decayed(named_parameters, lr)


@every(
    ("build", "wants"),
    [
        (decayed, True),
        (partial(decayed, lr=0.1), True),
        (Made(), True),
        (lambda named_parameters: None, True),
        (torch.optim.SGD, False),
        (partial(torch.optim.AdamW, lr=0.1), False),
        (lambda parameters, named_parameters=None: None, False),
        (lambda *named_parameters: None, False),
        (print, False),
    ],
)
def test_the_first_argument_says_whether_names_are_wanted(build: Any, wants: bool) -> None:
    assert takes_names(build) == wants


@pytest.mark.slow_variants(fast=2)
@pytest.mark.parametrize(
    ("strategy", "build"),
    [
        (ParameterAveraging(1), decayed),
        (GradientAllReduce(), adam_of_groups),
        (GradientAllReduce(shard_optimizer=True), decayed),
        (GradientAllReduce(shard_optimizer=True), adam_of_groups),
        (GradientAllReduce(shard_optimizer=True), summing),
        (GradientAllReduce(shard_parameters=True), decayed),
        (GradientAllReduce(shard_parameters=True), adam_of_groups),
        (GradientAllReduce(shard_parameters=True), summing),
    ],
    ids=lambda each: getattr(each, "__name__", repr(each)),
)
def test_each_group_is_trained_as_in_one_process(strategy: Any, build: Any) -> None:
    data = classification([16, 16])
    job = make_job(mlp(), optimizer=build, strategy=strategy, epochs=3, deadline_s=120.0)
    ranks_as: Any = "processes" if strategy.needs.collective else "threads"
    trained = run_world(job, data.shards(), ranks_as=ranks_as).module
    oracle = sgd_on_union(
        mlp(),
        data,
        epochs=3,
        batch_size=4,
        dtype=torch.float64,
        optimizer_of=lambda module: build(module.named_parameters()),
    )
    assert relative_error(trained, oracle) < 1e-9


def test_names_are_those_of_the_module_and_only_of_what_is_trained() -> None:
    seen: list[list[str]] = []

    def noting(named_parameters: Named) -> torch.optim.Optimizer:
        named = list(named_parameters)
        seen.append([name for name, _ in named])
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    model = mlp()
    model[0].requires_grad_(False)
    run_world(make_job(model, optimizer=noting), classification([8]).shards())
    assert set(map(tuple, seen)) == {("2.weight", "2.bias")}


def test_a_checkpoint_is_of_the_same_parameters_in_the_same_groups(tmp_path: Path) -> None:
    def other(named_parameters: Named) -> torch.optim.Optimizer:
        named = [(f"{name}.weight", p) for name, p in named_parameters if name != "2.bias"]
        return decayed([*named, *((n, p) for n, p in named_parameters if n == "2.bias")])

    job, shards = make_job(mlp(), optimizer=decayed), classification([8, 8]).shards()
    policy = CheckpointPolicy(path=str(tmp_path))
    run_world(job, shards, checkpoints=policy)
    longer = replace(job, epochs=3)
    resumed = run_world(longer, shards, checkpoints=policy)
    straight = run_world(longer, shards)
    assert all(map(torch.equal, resumed.module.parameters(), straight.module.parameters()))
    told = r"parameters of parameter group 0: was 0\.weight, 2\.weight, is now 0\.weight, 0\.bias"
    with pytest.raises(ConfigError, match=told):
        run_world(replace(job, optimizer=other), shards, checkpoints=policy)
