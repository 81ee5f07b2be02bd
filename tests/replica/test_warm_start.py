"""A training that begins with a model's values is as if its model had been built with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every
from torch import nn
from toys import classification, make_job, mlp

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import as_builder
from sparkdl.errors import ConfigError, ModelError
from sparkdl.replica.initial import WarmStart
from sparkdl.strategies import ElasticAveraging, GradientAllReduce, ParameterAveraging
from sparkdl.testing import run_world

SHARDS = classification([12, 8]).shards()


def normed(seed: int) -> nn.Module:
    """With buffers, one of them of integers, and a layer that stays as it is."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)
    ).double()
    model[3].requires_grad_(False)
    for buffer in model.buffers():
        buffer.add_(seed)
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, its = one.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)


@pytest.mark.nightly_variants(every=4)
@pytest.mark.parametrize(
    "strategy",
    [ParameterAveraging(2), ElasticAveraging(mode="synchronous"), GradientAllReduce()],
    ids=repr,
)
@pytest.mark.parametrize("build", [normed(1), partial(normed, 1)], ids=["instance", "function"])
def test_it_is_as_if_the_model_had_been_built_with_those_values(strategy: Any, build: Any) -> None:
    job = make_job(
        build, strategy=strategy, epochs=2, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    )
    job = replace(job, deadline_s=120.0)
    ranks_as: Any = "processes" if strategy.needs.collective else "threads"
    warm_start = WarmStart(normed(2))
    model = job.model()
    warm_start.require_fits(model)
    warm = replace(job, model=warm_start.builder(job.model, model))
    trained = run_world(warm, SHARDS, ranks_as=ranks_as, warm_start=warm_start).module
    oracle = run_world(replace(job, model=as_builder(normed(2))), SHARDS, ranks_as=ranks_as).module
    assert same(trained, oracle)
    assert torch.equal(trained.get_parameter("3.weight"), normed(2).get_parameter("3.weight"))


class Anchored(torch.optim.SGD):
    """Is drawn back to the values with which it was built."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.anchors = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter, anchor in zip(self.param_groups[0]["params"], self.anchors, strict=True):
            parameter.lerp_(anchor, 0.5)


def test_an_optimizer_that_remembers_where_it_began_began_there() -> None:
    job = make_job(mlp(), epochs=2, optimizer=partial(Anchored, lr=0.1))
    trained = run_world(job, SHARDS, warm_start=WarmStart(mlp(seed=8))).module
    oracle = run_world(replace(job, model=as_builder(mlp(seed=8))), SHARDS).module
    assert same(trained, oracle)


def test_a_resumed_training_has_its_checkpoint_and_the_same_beginning(tmp_path: Path) -> None:
    job, policy = make_job(mlp(), epochs=1), CheckpointPolicy(path=str(tmp_path))
    begun, longer = WarmStart(mlp(seed=8)), replace(job, epochs=3)
    run_world(job, SHARDS, checkpoints=policy, warm_start=begun)
    resumed = run_world(longer, SHARDS, checkpoints=policy, warm_start=begun).module
    assert same(resumed, run_world(longer, SHARDS, warm_start=begun).module)
    for other in (None, WarmStart(mlp(seed=9))):
        with pytest.raises(ConfigError, match=r"warm start: was 83 values \(SHA-256 .*, is now"):
            run_world(longer, SHARDS, checkpoints=policy, warm_start=other)


def test_what_happens_to_the_model_later_has_no_effect() -> None:
    model = mlp(seed=8)
    begun, before = WarmStart(model), copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    after = mlp()
    begun.apply(after)
    assert same(after, before)


def _shape(model: Any) -> None:
    model[2] = nn.Linear(8, 5).double()


def _dtype(model: Any) -> None:
    model[2].bias.data = model[2].bias.data.float()


def _missing(model: Any) -> None:
    model[2].bias = None


def _more(model: Any) -> None:
    model.register_buffer("mean", torch.zeros(()))


@every(
    ("change", "words"),
    [
        (_shape, r"'2.weight' is float64 \[3, 8\] in the model to train, and float64 \[5, 8\] in"),
        (_dtype, r"'2.bias' is float64 \[3\] in the model to train, and float32 \[3\] in warm_st"),
        (_missing, r"'2.bias' is float64 \[3\] .*, and not there in warm_start \(1 tensors"),
        (_more, r"'mean' is not there in the model to train, and float32 \[\] in warm_start"),
    ],
)
def test_another_model_is_refused_with_the_first_tensor_that_differs(
    change: Callable[[nn.Module], None], words: str
) -> None:
    other = mlp()
    change(other)
    with pytest.raises(ModelError, match=words):
        WarmStart(other).require_fits(mlp())


def with_cache(rows: int) -> nn.Module:
    model = mlp()
    model.register_buffer("table", torch.full((rows, 6), float(rows)), persistent=False)
    model.register_buffer("mask", torch.ones(6) if rows > 1 else None, persistent=False)
    if rows > 1:  # as a forward pass would
        model.register_buffer("late", torch.ones(6), persistent=False)
    return model


def test_caches_stay_as_they_were_built() -> None:
    warm_start, model = WarmStart(with_cache(4)), with_cache(1)
    with torch.no_grad():
        model[0].weight.zero_()
    warm_start.require_fits(model)
    warm_start.apply(model)
    assert torch.equal(model[0].weight, mlp()[0].weight)
    assert model.table.tolist() == [[1.0] * 6]
    assert model.mask is None
    assert not hasattr(model, "late")
