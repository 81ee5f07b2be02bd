"""Values that a training begins with, and those that it never changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every, every_row
from torch import Tensor, nn
from toys import DTYPES, classification, make_job, mlp

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import as_builder
from sparkdl.errors import ConfigError, ModelError, TrainingError
from sparkdl.replica.frozen import BLOCK_BYTES, FrozenParameters
from sparkdl.replica.initial import WarmStart
from sparkdl.strategies import ElasticAveraging, GradientAllReduce, ParameterAveraging
from sparkdl.testing import run_world


class Backbone(nn.Module):
    """One frozen parameter and one that is trained."""

    def __init__(self, values: Tensor, name: str = "codes") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.head = nn.Parameter(torch.zeros(3))


def fingerprint_of(values: Tensor, name: str = "codes") -> str:
    return FrozenParameters(Backbone(values, name)).fingerprint


def numbers(count: int = 12, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator, dtype=torch.float64) * 100
    return values.to(torch.uint8 if dtype is torch.bool else dtype).to(dtype)


LARGE = BLOCK_BYTES // 4 + 5
"""Values of four bytes: one block, and a few beside it."""


@every("place", [0, 1, BLOCK_BYTES // 4 - 1, BLOCK_BYTES // 4, LARGE - 1])
def test_a_single_bit_makes_another_fingerprint(place: int) -> None:
    values, other = numbers(LARGE), numbers(LARGE)
    other.view(torch.int32)[place] ^= 1
    assert fingerprint_of(values) == fingerprint_of(values.clone())
    assert fingerprint_of(values) != fingerprint_of(other)


@every(
    "change",
    [
        lambda values: values.flip(0),
        lambda values: values.view(2, -1),
        lambda values: values.double(),
        lambda values: values.view(torch.int32),
        lambda values: values * -1,
        lambda values: values[:-1],
    ],
)
def test_other_parameters_have_another_fingerprint(change: Callable[[Tensor], Tensor]) -> None:
    values = numbers()
    assert fingerprint_of(values) != fingerprint_of(change(values))
    assert fingerprint_of(values) != fingerprint_of(values, "other_name")


@every("dtype", [*DTYPES, torch.complex64, torch.complex128])
def test_every_dtype_has_one_and_where_the_values_lie_makes_no_difference(
    dtype: torch.dtype,
) -> None:
    values = numbers(24, dtype).view(2, 3, 2, 2)
    elsewhere = torch.cat([values.view(-1)[:1], values.view(-1)])[1:].view(2, 3, 2, 2)
    last = values.to(memory_format=torch.channels_last)
    assert fingerprint_of(values) == fingerprint_of(elsewhere) == fingerprint_of(last)
    apart = torch.stack([values.view(-1)[:1], values.view(-1)[1:2]], dim=1)[:, 0]
    assert fingerprint_of(values.view(-1)[:1]) == fingerprint_of(apart)


def test_a_parameter_in_the_memory_of_one_that_is_trained_is_refused() -> None:
    module = Backbone(numbers(12))
    module.head = nn.Parameter(module.get_parameter("codes").data)
    with pytest.raises(ModelError, match=r"'codes' requires no gradient, but shares .* with 'h"):
        FrozenParameters(module)


GLANCE, LOOK = FrozenParameters.glance, FrozenParameters.require_unchanged


@every_row(
    (lambda p: p.mul_(0.99), GLANCE, r"'codes'.*values have changed.*register_buffer"),
    (lambda p: p.detach()[3].fill_(7), GLANCE, r"'codes'.*have changed.*register_buffer"),
    (lambda p: p.requires_grad_(True), GLANCE, r"'codes' required no gradient.*but does now"),
    # these leave no trace
    (lambda p: p.data.mul_(0.99), LOOK, r"'codes'.*values have changed"),
    (lambda p: setattr(p, "data", p.data * 2), LOOK, r"'codes'.*values have changed"),
)
def test_a_change_is_noticed_if_it_leaves_no_trace_by_a_look_at_all_values(
    change: Callable[[nn.Parameter], None], check: Callable[[FrozenParameters], None], words: str
) -> None:
    module = Backbone(numbers())
    frozen = FrozenParameters(module)
    frozen.glance()
    with torch.no_grad():
        change(module.get_parameter("codes"))
    for _ in range(2):
        with pytest.raises(TrainingError, match=words):
            check(frozen)


def test_the_same_values_are_allowed_also_in_another_place_or_made_for_inference() -> None:
    """As models do that clip all their weights, or keep a row of an embedding at zero."""
    with torch.inference_mode():
        values = numbers()
    FrozenParameters(Backbone(values)).require_unchanged()
    module = Backbone(numbers())
    codes, frozen = module.get_parameter("codes"), FrozenParameters(module)
    with torch.no_grad():
        codes.clamp_(-1e6, 1e6)
        frozen.glance()
        codes[0].copy_(codes[0].clone())
        frozen.glance()
    codes.data = numbers()
    frozen.require_unchanged()


class Quantized(Tensor):
    """Eight-bit codes with a scale, in tensors of their own, as quantized weights are kept."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Quantized:
        made: Quantized = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{call} of quantized weights")


def test_weights_that_are_kept_in_several_tensors_count_by_all_of_them() -> None:
    def module(code: int = 3, scale: float = 0.5) -> nn.Module:
        codes = torch.full((4,), code, dtype=torch.int8)
        return Backbone(Quantized(codes, torch.tensor(scale)))

    prints = [FrozenParameters(each).fingerprint for each in (module(), module(4), module(3, 0.6))]
    assert len(set(prints)) == 3
    assert prints[0] == FrozenParameters(module()).fingerprint
    frozen = FrozenParameters(changed := module())
    changed.get_parameter("codes").codes[1] = 5  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="'codes'"):
        frozen.require_unchanged()


SHARDS = classification([12, 8]).shards()


def normed(seed: int) -> nn.Module:
    """With buffers, one of them of integers, and a layer that stays as it is."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)
    model = nn.Sequential(*layers).double()
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
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    job = make_job(build, strategy=strategy, epochs=2, optimizer=momentum)
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


def bias_of_float32(width: int, outputs: int) -> nn.Module:
    layer = nn.Linear(width, outputs).double()
    layer.bias.data = layer.bias.data.float()
    return layer


@every_row(
    (
        nn.Linear(8, 5).double(),
        r"'2.weight' is float64 \[3, 8\] .*, and float64 \[5, 8\] in",
    ),
    (
        bias_of_float32(8, 3),
        r"'2.bias' is float64 \[3\] .* train, and float32 \[3\] in warm_",
    ),
    (
        nn.Linear(8, 3, bias=False).double(),
        r"'2.bias' is float64 \[3\] .*, and not there in warm_start \(1 tensors",
    ),
    (None, r"'mean' is not there in the model to train, and float32 \[\] in warm_start"),
)
def test_another_model_is_refused_with_the_first_tensor_that_differs(
    last: nn.Module | None, words: str
) -> None:
    other = mlp()
    if last is None:
        other.register_buffer("mean", torch.zeros(()))
    else:
        other[2] = last
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
