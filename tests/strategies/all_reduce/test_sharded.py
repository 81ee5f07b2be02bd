"""Which modules are gathered together, and what cannot be sharded."""

from __future__ import annotations

import functools
import os
import sys
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from every_row import every
from test_gradient_all_reduce import Noting
from torch import Tensor, nn
from toys import classification, cnn, make_job, mlp

from sparkdl.errors import ConfigError, WorkerError
from sparkdl.replica import Replica
from sparkdl.strategies import GradientAllReduce
from sparkdl.strategies.all_reduce.sharded import _parameter_groups, units_of
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SHARDED = GradientAllReduce(0.0001, shard_parameters=True)


class Blocks(nn.Module):
    """Four blocks of 2 kB in a list, between an embedding and the head that shares its matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)}) for _ in range(4)
        )
        self.attention = nn.MultiheadAttention(16, 2)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(16, 100)
        self.head.weight = self.embedding.weight


def names(module: nn.Module, unit_bytes: float) -> list[str]:
    known = {each: name for name, each in module.named_modules()}
    return [known[each] for each in units_of(module, unit_bytes)]


def test_units_are_as_large_as_they_may_be_and_share_no_parameter() -> None:
    linears = [f"blocks.{block}.{each}" for block in range(4) for each in "ab"]
    assert names(Blocks(), 1 << 20) == []  # all are too small a part of a unit
    assert names(Blocks(), 8 << 10) == [*linears, "attention"]
    assert names(Blocks(), 1 << 10) == [*linears, "attention"]  # torch's is not divided


def test_a_module_around_units_is_one_if_enough_is_left_for_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(4, 4), nn.Linear(64, 64)), nn.Linear(2, 2)
    )
    assert names(model, 17_000) == ["0.0", "0.2"]
    model[0].append(nn.Linear(16, 16))
    assert names(model, 17_000) == ["0.0", "0.2", "0.3"]
    model[0].scale = nn.Parameter(torch.zeros(1000))
    assert names(model, 17_000) == ["0.0", "0.2", "0.3", "0"]


def test_modules_that_a_hugging_face_model_keeps_whole_are_units() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(Inner(), Inner())
    assert names(model, 300) == ["0.one", "0.two", "1.one", "1.two"]
    model._no_split_modules = ["Inner"]
    assert names(model, 300) == ["0", "1"]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(6, 3)

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layer(features) * self.scale
        return outputs


def two_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3).double(), nn.Linear(3, 3))


def transposed() -> nn.Module:
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(6, 8).double().t())
    return model


@every(
    ("model", "message"),
    [
        (lambda: Scaled().double(), r"'scale' is a scalar: give it the shape \(1,\)"),
        (two_dtypes, "of one dtype, but this model has torch.float32, torch.float64"),
        (transposed, r"'0.weight' has the strides \(1, 8\)"),
        (lambda: cnn().to(memory_format=torch.channels_last), "'4.weight' has the strides"),
        (lambda: nn.Linear(6, 3, dtype=torch.complex64), "'weight' is complex"),
    ],
)
def test_parameters_that_have_no_rows_to_share_are_refused(model: Any, message: str) -> None:
    replica = Replica(model(), functools.partial(torch.optim.SGD, lr=0.1), nn.CrossEntropyLoss())
    with pytest.raises(ConfigError, match=message):
        SHARDED.require_fits(replica)


class Peeking(nn.Module):
    """Reads a weight without calling its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, features: Tensor) -> Tensor:
        return features @ self.layer.weight.t()


class Penalized(nn.Module):
    """Adds the square of its own slope to its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layers(features.requires_grad_())
        slope = torch.autograd.grad(outputs.sum(), features, create_graph=True)[0]
        return outputs + slope.square().mean()


@every(
    ("model", "words"),
    [
        (Peeking, "Call the module instead of reading its weight"),
        (Penalized, "takes gradients itself, through a module whose parameters are gathered"),
    ],
)
def test_a_model_that_does_more_than_call_its_modules_is_told_so(model: Any, words: str) -> None:
    job = make_job(model(), strategy=SHARDED)
    with pytest.raises(WorkerError, match=words):
        run_world(job, classification([8, 8]).shards(), ranks_as="processes")


def test_a_worker_without_rows_is_told_of() -> None:
    job = make_job(mlp(), strategy=SHARDED)
    with pytest.raises(WorkerError, match="shard_parameters need a minibatch from every worker"):
        run_world(job, classification([8, 0]).shards(), ranks_as="processes")


def test_each_worker_keeps_its_rows_of_the_optimizers_state(tmp_path: Any) -> None:
    job = make_job(
        mlp(),
        strategy=SHARDED,
        optimizer=functools.partial(Noting, folder=str(tmp_path), lr=0.01),
    )
    run_world(job, classification([12, 12, 12]).shards(), ranks_as="processes")
    (tmp_path / str(os.getpid())).unlink()  # the driver tries steps
    kept = sorted(int(path.read_text()) for path in tmp_path.iterdir())
    # Of 8 and 3 rows, three workers have 3, 3, 2 and 1, 1, 1.
    assert kept == [2 * (6 + 1) + 8 + 1, 3 * (6 + 1) + 8 + 1, 3 * (6 + 1) + 8 + 1]


def test_a_unit_of_torch_2_11_has_one_group_or_none() -> None:
    for groups, state in [
        (["a", "b"], SimpleNamespace(_fsdp_param_groups=["a", "b"])),
        (["a"], SimpleNamespace(_fsdp_param_group="a")),
        ([], SimpleNamespace(_fsdp_param_group=None)),
    ]:
        unit = nn.Module()
        unit._get_fsdp_state = lambda state=state: state  # type: ignore[method-assign]
        assert _parameter_groups(unit) == groups
