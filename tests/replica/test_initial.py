"""The first values of a model, and models whose layers learn their shapes from a batch of zeros."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import numpy as np
import torch
from every_row import every
from torch import Tensor, nn
from toys import classification, make_job, schema

from sparkdl.driver import first_replica
from sparkdl.process.randomness import random_state
from sparkdl.replica import initial
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world

FLOATS = schema(dtype=torch.float32)


def drawn() -> nn.Module:
    """From all three streams of random numbers."""
    module = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)).double()
    with torch.no_grad():
        module[0].bias.copy_(torch.from_numpy(np.random.normal(size=64)))
        for index in range(3):
            module[2].bias[index] = random.random()
    module.register_buffer("mask", torch.rand(3).to(torch.bfloat16))
    return module


def state_of(**changes: object) -> list[Tensor]:
    replica = first_replica(make_job(drawn, **changes))
    return [values.clone() for values in replica.segments(with_optimizer=False)]


def test_a_seed_alone_decides_the_first_values_and_the_callers_streams_go_on() -> None:
    some = state_of()
    torch.rand(2), np.random.rand(), random.random()
    before = random_state(torch.device("cpu"))
    assert all(map(torch.equal, state_of(), some))
    assert not all(map(torch.equal, state_of(seed=12), some))
    after = random_state(torch.device("cpu"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 3))


def test_lazy_layers_learn_their_shapes_and_nothing_else_from_a_batch_of_zeros() -> None:
    assert initial.has_lazy_parameters(lazy())
    torch.manual_seed(5)
    module = initial.Initialized(lazy, FLOATS)()
    assert not initial.has_lazy_parameters(module)
    assert module[0].weight.shape == (8, 6)
    assert all(each.training for each in module.modules())
    assert module[1].num_batches_tracked == 0
    torch.manual_seed(5)
    again = initial.Initialized(lazy, FLOATS)()
    assert all(map(torch.equal, module.parameters(), again.parameters()))
    kept = initial.Initialized(lambda: nn.Sequential(lazy(), nn.Dropout().eval()), FLOATS)()
    assert [each.training for each in kept] == [True, False]


INSTANCE = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3))


@every("given", [lazy, partial(copy.deepcopy, INSTANCE)])
def test_a_lazy_model_trains_on_every_worker_from_the_same_values(given: Any) -> None:
    model = initial.Initialized(given, FLOATS)
    job = make_job(model, schema=FLOATS, strategy=ParameterAveraging(2), epochs=2)
    shards = classification([12, 8]).shards()
    first, second = (run_world(job, shards).module for _ in range(2))
    assert first[0].weight.shape == (8, 6)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
