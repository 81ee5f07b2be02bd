"""A replica: its parameters, buffers and first values."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every, every_row
from models import decayed
from replicas import OPTIMIZERS, batch, batch_norm_net, replica_of, train_plainly
from torch import Tensor, nn
from toys import classification, make_job, mlp, relative_error, schema, sgd_on_union

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError, ModelError
from sparkdl.process.randomness import random_state
from sparkdl.replica import initial
from sparkdl.replica.buffers import ModuleState, tensors_of
from sparkdl.replica.optimizer_state import takes_names
from sparkdl.strategies import GradientAllReduce, ParameterAveraging
from sparkdl.testing import run_world


@every("name", OPTIMIZERS)
@every("flatten_first", [False, True])
def test_training_equals_plain_torch(name: str, flatten_first: bool) -> None:
    replica = replica_of(batch_norm_net(), OPTIMIZERS[name])
    oracle = batch_norm_net()
    optimizer = OPTIMIZERS[name](oracle.parameters())
    for seed in range(5):
        if flatten_first and seed:  # once there is state, moving it must not disturb it
            replica.segments(with_optimizer=True)
        loss = replica.step(batch(seed))
        assert not loss.requires_grad
        features, targets = batch(seed).features[0], batch(seed).targets
        expected = train_plainly(oracle, optimizer, features, targets)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    states = replica.module.state_dict(), oracle.state_dict()
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-12)


@every("fails", [False, True])
def test_layers_kept_in_evaluation_mode_stay_in_it_and_others_train_on_after_evaluating(
    fails: bool,
) -> None:
    replica = replica_of(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), mlp()).double())
    replica.module[1].eval()  # type: ignore[index]
    before = [each.training for each in replica.module.modules()]

    def watch(*_: object) -> None:
        if fails:
            raise ArithmeticError

    with pytest.raises(ArithmeticError) if fails else nullcontext():
        replica.evaluate([batch()], watch)
    assert [each.training for each in replica.module.modules()] == before


def test_a_model_may_differentiate_itself_where_it_is_evaluated() -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp(6)

        def forward(self, features: Tensor) -> Tensor:
            with torch.enable_grad():
                places = features.requires_grad_()
                (slope,) = torch.autograd.grad(self.layer(places).sum(), places)
            return slope[:, :3]

    loss, weight = replica_of(Slope()).evaluate([batch()])
    places = batch().features[0].requires_grad_()
    (slope,) = torch.autograd.grad(mlp(6)(places).sum(), places)
    expected = nn.functional.cross_entropy(slope[:, :3], batch().targets)
    assert loss / weight == pytest.approx(expected.item())


def test_a_replica_without_anything_to_train_is_refused_before_its_optimizer_is_built() -> None:
    with pytest.raises(ModelError, match="Sequential has no parameter that requires a gradient"):
        replica_of(mlp().requires_grad_(False))


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
    replica = make_job(drawn, **changes).replica()
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
    module = initial.initialized(lazy, FLOATS)
    assert not initial.has_lazy_parameters(module)
    assert module[0].weight.shape == (8, 6)
    assert all(each.training for each in module.modules())
    assert module[1].num_batches_tracked == 0
    torch.manual_seed(5)
    again = initial.initialized(lazy, FLOATS)
    assert all(map(torch.equal, module.parameters(), again.parameters()))
    kept = initial.initialized(lambda: nn.Sequential(lazy(), nn.Dropout().eval()), FLOATS)
    assert [each.training for each in kept] == [True, False]


INSTANCE = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3))


@every("given", [lazy, partial(copy.deepcopy, INSTANCE)])
def test_a_lazy_model_trains_on_every_worker_from_the_same_values(given: Any) -> None:
    model = partial(initial.initialized, given, FLOATS)
    job = make_job(model, schema=FLOATS, strategy=ParameterAveraging(2), epochs=2)
    shards = classification([12, 8]).shards()
    first, second = (run_world(job, shards).module for _ in range(2))
    assert first[0].weight.shape == (8, 6)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


class Scaled(nn.Module):
    """Multiplies by a table of ones, which is zeros before the first forward pass if it is kept."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.net, self.kept, self.longest = mlp(), kept, 0
        self.register_buffer("table", torch.zeros(3, 1).double(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        if not self.kept or len(features) > self.longest:
            self.longest = len(features)
            self.table = torch.ones(len(features), 1).double()
        return self.net(features * self.table[: len(features)])


def test_a_cache_that_fits_one_replica_only_is_worth_as_much_as_none() -> None:
    shards = classification([12, 3]).shards()
    ended = []
    for kept in (True, False):
        job = make_job(partial(Scaled, kept), strategy=ParameterAveraging(1), epochs=3)
        ended.append(run_world(job, shards).module.state_dict())
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in ended[1])


class Holds(nn.Module):
    """Has one of each kind of attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(2)
        self.plain, self.names, self.recent = torch.zeros(2), {"a"}, deque([1, 2], maxlen=2)
        self.by_name = {"mean": torch.ones(2)}


def contents(module: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors_of(module)]


def never() -> list[Tensor]:
    raise AssertionError("nothing was written to")


def test_tensors_written_to_in_place_hold_again_what_they_held_as_often_as_they_are() -> None:
    module = Holds()
    state, held = ModuleState(module), contents(module)
    for _ in range(2):
        module.layer(torch.randn(8, 2))
        module.plain += 1
        module.by_name["mean"].mul_(3)
        state.put_back(lambda: held)
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(module), held, strict=True))


def test_attributes_and_what_they_hold_are_the_very_ones_that_they_were() -> None:
    """Also of a module that was made in inference mode; what is new goes."""
    with torch.inference_mode():
        in_inference = Holds()
    for module in (Holds(), in_inference):
        state, before, recent = ModuleState(module), tensors_of(module), module.recent
        module.layer.running_mean = torch.full((2,), 9.0)
        module.plain = module.plain + 1
        module.by_name["mean"] = torch.zeros(2)
        module.names.add("b")
        module.recent.append(3)
        module.cache = torch.zeros(3)
        module.register_buffer("other", torch.zeros(3))
        state.put_back(never)
        assert all(a is b for a, b in zip(tensors_of(module), before, strict=True))
        assert (module.names, list(module.recent)) == ({"a"}, [1, 2])
        assert module.recent is recent
        assert not hasattr(module, "cache")
        assert not hasattr(module, "other")


def test_a_lazy_layer_with_loaded_weights_runs_as_often_as_it_is_put_back() -> None:
    module, trained = nn.Sequential(nn.LazyLinear(3)), nn.Sequential(nn.Linear(4, 3))
    module.load_state_dict(trained.state_dict())
    state, features = ModuleState(module), torch.randn(2, 4)
    for _ in range(2):
        assert torch.equal(module(features), trained(features))
        state.put_back(never)


Named = Iterable[tuple[str, nn.Parameter]]


def adam_of_groups(named_parameters: Named) -> torch.optim.Optimizer:
    """Other hyperparameters for the last layer, which is decayed, in the order of the names."""
    named = sorted(named_parameters)
    first, last = ([p for name, p in named if name.startswith(layer)] for layer in ("0.", "2."))
    groups = [{"params": first, "weight_decay": 0.0}, {"params": last, "lr": 0.03}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.5)


def summing(named_parameters: Named) -> torch.optim.Optimizer:
    """Has state before its first step, and keeps the names."""
    return torch.optim.Adagrad(list(named_parameters), lr=0.05, initial_accumulator_value=0.1)


def by_dimensions(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Decays matrices only, and takes no names."""
    values = list(parameters)
    matrices, vectors = ([p for p in values if (p.ndim > 1) == wide] for wide in (True, False))
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "lr": 0.03}], lr=0.01
    )


class Made:
    """Something else that is called with names."""

    def __call__(self, named_parameters: Named, lr: float = 0.1) -> torch.optim.Optimizer:
        return decayed(named_parameters, lr)


@every_row(
    (decayed, True),
    (partial(decayed, lr=0.1), True),
    (Made(), True),
    (lambda named_parameters: None, True),
    (torch.optim.SGD, False),
    (partial(torch.optim.AdamW, lr=0.1), False),
    (lambda parameters, named_parameters=None: None, False),
    (lambda *named_parameters: None, False),
    (print, False),
)
def test_the_first_argument_says_whether_names_are_wanted(build: Any, wants: bool) -> None:
    assert takes_names(build) == wants


@pytest.mark.nightly_variants(daily=2)
@pytest.mark.parametrize(
    ("strategy", "build"),
    [
        (ParameterAveraging(1), decayed),
        (GradientAllReduce(), adam_of_groups),
        (GradientAllReduce(shard_optimizer=True), by_dimensions),
        *(
            (GradientAllReduce(**{f"shard_{what}": True}), build)
            for what in ("optimizer", "parameters")
            for build in (decayed, adam_of_groups, summing)
        ),
    ],
    ids=lambda each: getattr(each, "__name__", repr(each)),
)
def test_each_group_is_trained_as_in_one_process(strategy: Any, build: Any) -> None:
    data = classification([16, 16])
    job = make_job(mlp(), optimizer=build, strategy=strategy, epochs=3, deadline_s=120.0)
    ranks_as: Any = "processes" if strategy.needs.collective else "threads"
    trained = run_world(job, data.shards(), ranks_as=ranks_as).module
    names = [name for name, _ in mlp().named_parameters()]

    def of_one_process(values: Iterable[nn.Parameter]) -> Any:
        named = zip(names, values, strict=True)
        return build(list(named) if takes_names(build) else [value for _, value in named])

    oracle = sgd_on_union(mlp(), data, of_one_process, epochs=3)
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
