"""Parameters that are divided among workers: by rows, or layers among those of a group."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from every_row import every, every_row
from test_gradient_all_reduce import Noting
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import classification, cnn, make_job, mlp, schema

from sparkdl.errors import ConfigError, WorkerError
from sparkdl.planner.balance import Layer, best_groups, exchange
from sparkdl.replica import Replica
from sparkdl.strategies import GradientAllReduce, Hybrid, Run
from sparkdl.strategies.all_reduce.hybrid import sent_bytes
from sparkdl.strategies.all_reduce.sharded import _parameter_groups, units_of
from sparkdl.strategies.worker_group import Grid
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HYBRID = GradientAllReduce(hybrid=Hybrid("*", 1))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4)
    ).double()


@dataclass(frozen=True)
class Counted(GradientAllReduce):
    """Writes what each worker sends in its steps, in bytes by function."""

    folder: str = ""

    def start(self, run: Run) -> Any:
        state = super().start(run)
        sent = {"all_to_all": 0.0, "all_gather": 0.0, "all_reduce": 0.0}
        there = {name: getattr(dist, name) for name in ("all_gather", "all_reduce")}
        to_all = dist.all_to_all_single

        def exchanged(found: Tensor, given: Tensor, group: Any, **sizes: Any) -> Any:
            own = sizes["input_split_sizes"][dist.get_rank(group)]
            sent["all_to_all"] += (len(given) - own) * given.element_size()
            return to_all(found, given, group=group, **sizes)

        def gathered(found: Any, given: Tensor, group: Any = None) -> Any:
            sent["all_gather"] += (dist.get_world_size(group) - 1) * given.nbytes
            return there["all_gather"](found, given, group=group)

        def summed(given: Tensor, group: Any = None, async_op: bool = False) -> Any:
            size = dist.get_world_size(group)
            if group is not None:  # what the loss is divided by goes to all
                sent["all_reduce"] += 2 * (size - 1) / size * given.nbytes
            return there["all_reduce"](given, group=group, async_op=async_op)

        replaced = {"all_to_all_single": exchanged, "all_gather": gathered, "all_reduce": summed}
        for name, function in replaced.items():
            run.cleanup.callback(setattr, dist, name, getattr(dist, name))
            setattr(dist, name, function)
        state.sent = sent  # type: ignore[attr-defined]
        return state

    def end_epoch(self, run: Run, state: Any) -> None:
        # The strips are put together only now.
        Path(self.folder, str(run.rank)).write_text(json.dumps(state.sent))
        super().end_epoch(run, state)


@every("groups", [1, 2])
def test_a_worker_sends_in_a_step_what_the_formula_says(groups: int, tmp_path: Path) -> None:
    steps, rows, workers = 3, 4, 4
    members = workers // groups
    strategy = Counted(hybrid=Hybrid("*", groups), folder=str(tmp_path))
    job = make_job(net(), strategy=strategy, schema=schema(12), loss=nn.CrossEntropyLoss())
    data = classification([steps * rows] * workers, width=12)
    run_world(job, data.shards(), ranks_as="processes")

    layers = [each for each in net() if isinstance(each, nn.Linear)]
    # The first layer's inputs need no gradients, so these are not sent back.
    back = 8 * (members - 1) * rows * 12
    gradients = 8 * sum(p.numel() for p in net().parameters()) // members
    heads = 32 * (members - 1) * (len(layers) + 1)
    finite = 2 * (members - 1) / members * 4
    expected = {
        "all_to_all": sum(
            8 * 2 * (members - 1) * rows * (each.in_features + each.out_features // members)
            for each in layers
        )
        - back,
        "all_gather": heads,
        "all_reduce": 2 * (groups - 1) / groups * gradients + finite,
    }
    for rank in range(workers):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert found == {name: steps * value for name, value in expected.items()}
    formula = sum(sent_bytes(each, rows, Grid(workers, members)) for each in layers)
    assert formula == sum(expected.values()) + back - heads - finite


@every_row(
    (4096, 4096, 4, 64, 2), (9216, 4096, 32, 4, 1), (64, 16, 256, 8, 8), (2048, 2048, 64, 8, 2)
)
def test_auto_takes_the_groups_that_send_least(
    inputs: int, outputs: int, rows: int, workers: int, groups: int
) -> None:
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    known = Layer("", "", 0, 0, 4 * inputs * outputs, 4 * inputs, splits=True)
    costs = {}
    for each in (each for each in range(1, workers + 1) if workers % each == 0):
        sent, members = exchange(known, rows * workers, workers, each), workers // each
        given_back = 4 * 2 * (members - 1) * rows * outputs / members
        costs[each] = sent.data + sent.model + given_back
        assert sent_bytes(layer, rows, Grid(workers, members)) == pytest.approx(costs[each])
    grid = Hybrid("*").grid([layer], rows, workers)
    assert workers // grid.width == groups
    assert costs[groups] == min(costs.values())
    # The paper's, of any real number, is between the divisors on both sides.
    best = best_groups(known, rows * workers, workers)
    assert groups / 2 <= max(1.0, min(best, workers)) <= groups * 2


def frozen() -> nn.Module:
    model = mlp()
    model[2].bias.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    model[2].weight = model[0].weight
    return model


class Own(nn.Linear):
    """May compute anything."""


def cast(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(6, 3, dtype=dtype)


def normed() -> nn.Module:
    model = mlp()
    nn.utils.weight_norm(model[0])
    return model


def hooked() -> nn.Module:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    return model


@every_row(
    (mlp, "classifier.*", r"no nn.Linear .* like 'classifier.\*'. It has '0', '2'"),
    (mlp, "1", "no nn.Linear"),
    (lambda: nn.Sequential(Own(6, 3)), "0", "no nn.Linear .* It has none"),
    (frozen, "*", "the bias of '2' is frozen"),
    (tied, "2", "the weight of '2' is tied"),
    (hooked, "0", "the weight of '0' has a hook on its gradient"),
    (cast(torch.complex64), "*", "is of torch.complex64"),
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_layers_that_cannot_be_split_are_refused_by_name(
    model: Any, pattern: str, words: str
) -> None:
    replica = Replica(model(), partial(torch.optim.SGD, lr=0.1), nn.CrossEntropyLoss())
    with pytest.raises(ConfigError, match=f"hybrid: .*{words}"):
        GradientAllReduce(hybrid=Hybrid(pattern)).require_fits(replica)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_that_is_computed_is_refused() -> None:
    with pytest.raises(ConfigError, match="the weight of '0' is computed from others"):
        Hybrid("*").named(normed())


def test_an_optimizer_of_whole_parameters_is_refused() -> None:
    replica = Replica(mlp(), partial(torch.optim.Adafactor, lr=0.1), nn.CrossEntropyLoss())
    with pytest.raises(ConfigError, match="Adafactor steps those otherwise"):
        HYBRID.require_fits(replica)


def test_groups_that_do_not_divide_the_workers_are_refused_before_and_by_workers() -> None:
    strategy = GradientAllReduce(hybrid=Hybrid("*", 4))
    words = "4 groups do not divide 6 workers. Use 1, 2, 3, 6 groups"
    with pytest.raises(ConfigError, match=words):
        strategy.require_workers(6)
    with pytest.raises(WorkerError, match="4 groups do not divide 1 workers"):
        run_world(make_job(mlp(), strategy=strategy), classification([8]).shards())
    strategy.require_workers(8)
    GradientAllReduce(hybrid=Hybrid("*")).require_workers(7)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()


class Peeking(Net):
    def forward(self, features: Tensor) -> Tensor:
        return self.two(self.one(features)) + self.two.weight.norm()


class Peeping(Net):
    """Does the same behind autograd's back."""

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.two(self.one(features)) * self.two.weight.detach().norm()
        return outputs


class ByRows(Net):
    """Its order depends on its rows: the first worker's are positive."""

    def forward(self, features: Tensor) -> Tensor:
        first, last = (self.one, self.two) if features[0, 0] > 0 else (self.two, self.one)
        outputs: Tensor = last(first(features))
        return outputs


class LeavesOut(Net):
    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.one(features)
        return outputs


class Drops(Net):
    def forward(self, features: Tensor) -> Tensor:
        self.two(features)
        outputs: Tensor = self.one(features)
        return outputs


class Recomputes(Net):
    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = checkpoint(self.one, self.two(features), use_reentrant=False)
        return outputs


class Penalized(Net):
    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.two(self.one(features.requires_grad_()))
        slope = torch.autograd.grad(outputs.sum(), features, create_graph=True)[0]
        return outputs + slope.square().mean()


@pytest.mark.gate
@every_row(
    (Peeking, "reads the parameters of 'two', .* without calling the layer"),
    (Peeping, "may read the weight of a layer that hybrid splits"),
    (ByRows, "rank 0 calls 'one' .* where rank 1 calls 'two'"),
    (LeavesOut, "'two' takes no part in a loss"),
    (Drops, "'two' takes no part in a loss"),
    (Recomputes, "calls 'one' again, as with torch.utils.checkpoint"),
    (Penalized, "takes gradients itself"),
)
def test_a_model_that_does_more_than_call_its_layers_is_told_so(model: Any, words: str) -> None:
    data = classification([8, 8])
    data.features[:8, 0], data.features[8:, 0] = 1, -1
    with pytest.raises(WorkerError, match=words):
        run_world(make_job(model(), strategy=HYBRID), data.shards(), ranks_as="processes")


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


@every_row(
    (lambda: Scaled().double(), r"'scale' is a scalar: give it the shape \(1,\)"),
    (two_dtypes, "of one dtype, but this model has torch.float32, torch.float64"),
    (transposed, r"'0.weight' has the strides \(1, 8\)"),
    (hooked, "'0.weight' has a hook on its gradient, which no part of it has"),
    (lambda: cnn().to(memory_format=torch.channels_last), "'4.weight' has the strides"),
    (lambda: nn.Linear(6, 3, dtype=torch.complex64), "'weight' is complex"),
)
def test_parameters_that_have_no_rows_to_share_are_refused(model: Any, message: str) -> None:
    replica = Replica(model(), functools.partial(torch.optim.SGD, lr=0.1), nn.CrossEntropyLoss())
    with pytest.raises(ConfigError, match=message):
        SHARDED.require_fits(replica)


@pytest.mark.gate
@every_row(
    (Peeking, "Call the module instead of reading its weight"),
    (Penalized, "takes gradients itself, through a module whose parameters are gathered"),
)
def test_a_model_that_does_more_than_call_its_modules_is_told_so(model: Any, words: str) -> None:
    job = make_job(model(), strategy=SHARDED)
    with pytest.raises(WorkerError, match=words):
        run_world(job, classification([8, 8]).shards(), ranks_as="processes")


@pytest.mark.gate
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
