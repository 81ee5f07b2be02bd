"""A replica's state is a few flat buffers, and model and optimizer go on working on views."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ModelOutput, OwnLoss
from torch import Tensor, nn
from toys import mlp

from sparkdl.errors import ModelError, TrainingError
from sparkdl.losses import ModelLoss
from sparkdl.protocols import Batch
from sparkdl.replica import Replica, align_targets

SGD = partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS: dict[str, Any] = {
    "sgd": SGD,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),
    "adadelta": torch.optim.Adadelta,
}


def batch(seed: int = 0, rows: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return Batch((features,), torch.arange(rows) % 3, last=False)


def replica_of(module: nn.Module, optimizer: Any = SGD) -> Replica:
    return Replica(module, optimizer, nn.CrossEntropyLoss())


def batch_norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def views_of(tensors: list[Tensor], flats: list[Tensor]) -> bool:
    """Whether every tensor lives inside one of the flat buffers."""
    homes = {flat.untyped_storage().data_ptr() for flat in flats}
    return all(tensor.untyped_storage().data_ptr() in homes for tensor in tensors)


def test_the_layout_is_one_segment_a_kind_and_dtype() -> None:
    layout = replica_of(batch_norm_net()).layout(with_optimizer=False)
    assert [(s.kind, s.dtype, s.numel) for s in layout] == [
        ("parameters", torch.float64, 6 * 4 + 4 + 4 + 4 + 4 * 3 + 3),
        ("buffers", torch.float64, 8),
        ("buffers", torch.int64, 1),
    ]
    assert [s.averaged for s in layout] == [True, True, False]


def test_segments_match_the_layout() -> None:
    replica = replica_of(batch_norm_net(), OPTIMIZERS["adam"])
    layout = replica.layout(with_optimizer=True)
    segments = replica.segments(with_optimizer=True)
    assert [(s.dtype, s.numel) for s in layout] == [(t.dtype, t.numel()) for t in segments]


def test_flattening_does_not_change_a_value() -> None:
    module = batch_norm_net()
    before = copy.deepcopy(module.state_dict())
    after = replica_of(module).module.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_buffers_stay_views_of_the_flat_buffers(name: str) -> None:
    replica = replica_of(batch_norm_net(), OPTIMIZERS[name])
    for seed in range(3):
        replica.step(batch(seed))
        flats = replica.segments(with_optimizer=True)
        assert views_of([*replica.module.parameters(), *replica.module.buffers()], flats)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_lives_in_the_flat_buffers_and_is_used_from_there(name: str) -> None:
    replica = replica_of(mlp(), OPTIMIZERS[name])
    for seed in range(3):
        replica.step(batch(seed))
        flats = replica.segments(with_optimizer=True)
        state = [
            value
            for values in replica.optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        assert views_of(state, flats)
    assert [f.data_ptr() for f in flats] == [
        f.data_ptr() for f in replica.segments(with_optimizer=True)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("flatten_first", [False, True])
def test_training_equals_plain_torch(name: str, flatten_first: bool) -> None:
    replica = replica_of(batch_norm_net(), OPTIMIZERS[name])
    oracle = batch_norm_net()
    optimizer = OPTIMIZERS[name](oracle.parameters())
    for seed in range(5):
        if flatten_first and seed:  # once there is state, moving it must not disturb it
            replica.segments(with_optimizer=True)
        loss = replica.step(batch(seed))
        optimizer.zero_grad()
        (features,), targets = batch(seed).features, batch(seed).targets
        expected = nn.functional.cross_entropy(oracle(features), targets)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(
        replica.module.state_dict(), oracle.state_dict(), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trained_and_an_untrained_replica_have_the_same_layout(name: str) -> None:
    trained, untrained = (replica_of(batch_norm_net(), OPTIMIZERS[name]) for _ in range(2))
    trained.step(batch(0))
    trained.step(batch(1))
    assert trained.layout(with_optimizer=True) == untrained.layout(with_optimizer=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_asking_an_untrained_replica_for_its_layout_does_not_move_its_parameters(name: str) -> None:
    replica = replica_of(mlp(), OPTIMIZERS[name])
    replica.layout(with_optimizer=True)
    expected = mlp().state_dict()
    assert all(torch.equal(value, expected[k]) for k, value in replica.module.state_dict().items())


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten())
    return net.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_channels_last_stays_channels_last_and_trains_as_in_plain_torch(name: str) -> None:
    replica, oracle = replica_of(convolutions(), OPTIMIZERS[name]), convolutions()
    optimizer = OPTIMIZERS[name](oracle.parameters())
    strides = [parameter.stride() for parameter in oracle.parameters()]
    images, targets = torch.randn(4, 3, 5, 5), torch.arange(4)
    for _ in range(3):
        replica.step(Batch((images,), targets, last=False))
        flats = replica.segments(with_optimizer=True)
        optimizer.zero_grad()
        nn.functional.cross_entropy(oracle(images), targets).backward()
        optimizer.step()

        parameters = list(replica.module.parameters())
        assert [parameter.stride() for parameter in parameters] == strides
        assert strides[0] == (27, 1, 9, 3)
        moments = [
            value
            for state in replica.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() == 4
        ]
        assert all(value.is_contiguous(memory_format=torch.channels_last) for value in moments)
        assert views_of([*parameters, *moments], flats)
        torch.testing.assert_close(replica.module.state_dict(), oracle.state_dict())
    assert [parameter.stride() for parameter in replica.release().parameters()] == strides


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3).double()
        self.unused = nn.Linear(2, 2).double()

    def forward(self, features: Tensor) -> Tensor:
        return self.used(features)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_that_forward_does_not_use_keeps_its_value_and_its_place(name: str) -> None:
    replica = replica_of(PartlyUsed(), OPTIMIZERS[name])
    before = replica.module.unused.weight.detach().clone()
    layouts = set()
    for seed in range(3):
        replica.step(batch(seed))
        replica.segments(with_optimizer=True)
        layouts.add(replica.layout(with_optimizer=True))
    assert torch.equal(replica.module.unused.weight, before)
    assert layouts == {replica_of(PartlyUsed(), OPTIMIZERS[name]).layout(with_optimizer=True)}


LAZY: dict[str, Any] = {
    **OPTIMIZERS,
    "dampening": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01, t0=2),
}


class LateHead(nn.Module):
    """Uses a second layer from its third minibatch on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 3).double()
        self.late = nn.Linear(6, 3).double()
        self.used = 0

    def forward(self, features: Tensor) -> Tensor:
        self.used += 1
        outputs = self.first(features)
        return outputs + self.late(features) if self.used > 2 else outputs


@pytest.mark.parametrize("name", LAZY)
def test_a_parameter_with_a_late_first_gradient_is_trained_as_in_plain_torch(name: str) -> None:
    replica, oracle = replica_of(LateHead(), LAZY[name]), LateHead()
    optimizer = LAZY[name](oracle.parameters())
    for seed in range(6):
        replica.segments(with_optimizer=True)
        replica.step(batch(seed))
        optimizer.zero_grad()
        (features,), targets = batch(seed).features, batch(seed).targets
        nn.functional.cross_entropy(oracle(features), targets).backward()
        optimizer.step()
        torch.testing.assert_close(
            replica.module.state_dict(), oracle.state_dict(), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("name", LAZY)
def test_state_that_another_replica_has_is_taken_over_with_its_parameter(name: str) -> None:
    late, early = replica_of(LateHead(), LAZY[name]), replica_of(LateHead(), LAZY[name])
    early.module.used = 10
    late.step(batch(0))
    early.step(batch(0))
    mine, other = (one.segments(with_optimizer=True) for one in (late, early))
    for values, others in zip(mine, other, strict=True):
        values.copy_(others)
    late.module.used = 10
    for seed in (1, 2):
        late.step(batch(seed))
        early.step(batch(seed))
        torch.testing.assert_close(
            late.module.state_dict(), early.module.state_dict(), rtol=0, atol=0
        )
    assert views_of(
        [value for state in late.optimizer.state.values() for value in tensors_in(state)],
        late.segments(with_optimizer=True),
    )


def tensors_in(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def test_a_new_optimizer_has_nothing_of_the_one_before() -> None:
    replica, fresh = replica_of(LateHead(), LAZY["adam"]), replica_of(LateHead(), LAZY["adam"])
    replica.step(batch(0))
    replica.segments(with_optimizer=True)
    replica.module.load_state_dict(LateHead().state_dict())
    replica.module.used = 0
    replica.rebuild_optimizer()
    for seed in range(4):
        replica.segments(with_optimizer=True)
        replica.step(batch(seed))
        fresh.step(batch(seed))
    torch.testing.assert_close(
        replica.module.state_dict(), fresh.module.state_dict(), rtol=0, atol=0
    )


@pytest.mark.parametrize("flatten_first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_without_its_state_steps_like_a_new_one_where_its_schedule_stands(
    name: str, flatten_first: bool
) -> None:
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    replica = Replica(
        mlp(),
        OPTIMIZERS[name],
        nn.CrossEntropyLoss(),
        scheduler=schedule,
        scheduler_every="step",
    )
    for seed in range(3):
        replica.step(batch(seed))
    if flatten_first:
        replica.segments(with_optimizer=True)
    oracle = copy.deepcopy(replica.module)

    replica.reset_optimizer_state()
    for seed in range(3, 5):
        replica.step(batch(seed))

    optimizer = OPTIMIZERS[name](oracle.parameters())
    optimizer.param_groups[0]["lr"] *= 0.5**3
    plain = Replica(oracle, lambda parameters: optimizer, nn.CrossEntropyLoss())
    for seed in range(3, 5):
        plain.step(batch(seed))
        optimizer.param_groups[0]["lr"] *= 0.5
    for mine, other in zip(replica.module.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert replica.schedule.steps == 5


def test_writing_to_the_segments_moves_the_model() -> None:
    replica = replica_of(batch_norm_net(), OPTIMIZERS["adam"])
    replica.step(batch())
    for segment in replica.segments(with_optimizer=True):
        segment.fill_(2)
    assert all(bool((v == 2).all()) for v in replica.module.state_dict().values())
    assert all(
        bool((value == 2).all())
        for values in replica.optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )


class Reassigns(nn.Module):
    """Assigns its buffer anew in every forward instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(6))
        self.seen: Tensor
        self.mean: Tensor

    def forward(self, features: Tensor) -> Tensor:
        self.seen = self.seen + len(features)
        self.mean = features.mean(dim=0).float()
        return self.net(features)


def test_a_buffer_that_the_model_assigns_anew_is_taken_back_into_the_flat_buffer() -> None:
    replica = replica_of(Reassigns())
    module = replica.module
    assert isinstance(module, Reassigns)
    for rounds in range(1, 4):
        replica.step(batch(rounds))
        segments = replica.segments(with_optimizer=False)
        assert module.seen.item() == 5 * rounds
        assert segments[1].tolist() == [5.0 * rounds, *module.mean.tolist()]
        assert views_of([module.seen, module.mean], segments)


class GivesOtherMemory(torch.optim.SGD):
    """Steps as many a tutorial does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data = parameter.data - 0.1 * parameter.grad


def test_parameters_that_were_given_other_memory_are_taken_back_into_the_flat_buffer() -> None:
    replica = replica_of(mlp(6), partial(GivesOtherMemory, lr=0.1))
    plain = mlp(6)
    for seed in range(3):
        replica.step(batch(seed))
        (flat,) = replica.segments(with_optimizer=False)
        plain.zero_grad()
        nn.functional.cross_entropy(plain(batch(seed).features[0]), batch(seed).targets).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
        assert torch.equal(flat, nn.utils.parameters_to_vector(plain.parameters()))
        assert views_of([*replica.module.parameters()], [flat])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 6, bias=False).double()
        self.second = nn.Linear(6, 6, bias=False).double()
        self.second.weight = self.first.weight
        scale = torch.ones(1, dtype=torch.float64)
        self.register_buffer("scale", scale)
        self.register_buffer("same_scale", scale)

    def forward(self, features: Tensor) -> Tensor:
        return self.second(self.first(features)) * self.scale


def test_tied_weights_stay_tied_and_travel_once() -> None:
    replica = replica_of(Tied())
    module = replica.module
    assert isinstance(module, Tied)
    replica.step(batch())
    layout = replica.layout(with_optimizer=False)
    assert [segment.numel for segment in layout] == [36, 1]
    assert module.first.weight is module.second.weight
    replica.segments(with_optimizer=False)[1].fill_(3)
    assert module.scale.item() == module.same_scale.item() == 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_parameters_neither_travel_nor_change_nor_have_optimizer_state(name: str) -> None:
    module = mlp()
    module[0].requires_grad_(False)
    alone, replica = mlp()[2], replica_of(module, OPTIMIZERS[name])
    kinds = [
        (segment.kind, segment.numel)
        for segment in Replica(alone, OPTIMIZERS[name], nn.MSELoss()).layout(with_optimizer=True)
    ]
    assert [(s.kind, s.numel) for s in replica.layout(with_optimizer=True)] == kinds
    values = {key: value.clone() for key, value in module[0].state_dict().items()}
    for seed in range(3):
        replica.step(batch(seed))
    assert [(s.kind, s.numel) for s in replica.layout(with_optimizer=True)] == kinds
    assert all(torch.equal(values[key], now) for key, now in module[0].state_dict().items())
    assert set(replica.optimizer.state) <= set(module[2].parameters())
    assert not module[0].weight.requires_grad
    assert views_of([module[2].weight, module[2].bias], replica.segments(with_optimizer=False))


def test_a_replica_without_anything_to_train_is_refused_before_its_optimizer_is_built() -> None:
    with pytest.raises(ModelError, match="Sequential has no parameter that requires a gradient"):
        replica_of(mlp().requires_grad_(False))


def test_what_is_frozen_after_the_replica_was_built_still_travels() -> None:
    replica = replica_of(mlp(), OPTIMIZERS["adam"])
    layout = replica.layout(with_optimizer=True)
    replica.module[0].requires_grad_(False)
    replica.step(batch())
    replica.rebuild_optimizer()
    assert replica.layout(with_optimizer=True) == layout


def test_what_is_unfrozen_after_the_replica_was_built_is_an_error_at_the_next_exchange() -> None:
    module = mlp()
    module[0].requires_grad_(False)
    replica = replica_of(module)
    replica.segments(with_optimizer=True)
    module[0].bias.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"'0\.bias' required no gradient when the model was b"):
        replica.segments(with_optimizer=True)


def test_dtypes_travel_in_segments_of_their_own() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).double()})
    module["c"] = nn.Linear(3, 3).half()
    layout = Replica(module, SGD, nn.MSELoss()).layout(with_optimizer=False)
    assert [(s.dtype, s.numel) for s in layout] == [
        (torch.float32, 6),
        (torch.float64, 6),
        (torch.float16, 12),
    ]
    assert [s.center_dtype for s in layout] == [torch.float32, torch.float64, torch.float32]


def test_gradients_of_one_step_do_not_leak_into_the_next() -> None:
    replica = replica_of(mlp())
    replica.forward_backward(batch())
    first = [p.grad.clone() for p in replica.module.parameters() if p.grad is not None]
    replica.forward_backward(batch())
    second = [p.grad for p in replica.module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if b is not None)


def test_the_loss_of_a_step_is_detached() -> None:
    assert not replica_of(mlp()).step(batch()).requires_grad


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 6))
def test_a_regression_targets_shape_follows_outputs_of_one_column(rows: int) -> None:
    outputs = torch.zeros(rows, 1)
    assert align_targets(outputs, torch.zeros(rows)).shape == (rows, 1)


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(4), torch.zeros(4)),
        (torch.zeros(4, 1), torch.zeros(4, 1)),
        (torch.zeros(4, 2), torch.zeros(4)),
    ],
)
def test_other_targets_keep_their_shape(outputs: Tensor, targets: Tensor) -> None:
    assert align_targets(outputs, targets) is targets


def test_a_loss_with_weights_of_its_own_works() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    replica = Replica(mlp(), SGD, loss)
    (features,) = batch().features
    expected = loss(mlp()(features), batch().targets)
    assert replica.step(batch()).item() == pytest.approx(expected.item())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu_state_is_flat_on_the_device_and_layouts_agree(name: str) -> None:
    trained = Replica(batch_norm_net(), OPTIMIZERS[name], nn.CrossEntropyLoss(), "cuda")
    untrained = Replica(batch_norm_net(), OPTIMIZERS[name], nn.CrossEntropyLoss(), "cuda")
    trained.step(batch())
    assert trained.layout(with_optimizer=True) == untrained.layout(with_optimizer=True)
    assert all(p.is_cuda for p in trained.module.parameters())
    assert all(s.is_cuda for s in trained.segments(with_optimizer=False))


def test_gradients_are_clipped_by_their_norm_before_the_step() -> None:
    module = nn.Linear(3, 2).double()
    expected = copy.deepcopy(module)
    replica = Replica(module, partial(torch.optim.SGD, lr=1.0), nn.MSELoss(), clip_norm=0.01)
    features, targets = torch.ones(4, 3).double(), torch.full((4, 2), 9.0).double()

    replica.step(Batch((features,), targets, last=True))

    nn.functional.mse_loss(expected(features), targets).backward()
    norm = torch.cat([p.grad.flatten() for p in expected.parameters()]).norm()
    assert norm > 1
    for mine, other in zip(module.parameters(), expected.parameters(), strict=True):
        step = other.grad * (0.01 / norm)
        assert torch.allclose(mine, other - step, rtol=0, atol=1e-8)


def test_bf16_computes_under_autocast_and_keeps_the_parameters_dtype() -> None:
    seen: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(features)
            seen.append(outputs.dtype)
            return outputs

    optimizer = partial(torch.optim.SGD, lr=0.1)
    for precision in ("float32", "bf16"):
        module = Watched(3, 2)
        replica = Replica(module, optimizer, nn.CrossEntropyLoss(), precision=precision)
        replica.step(Batch((torch.randn(4, 3),), torch.tensor([0, 1, 0, 1]), last=True))
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert seen == [torch.float32, torch.bfloat16]


class Heads(nn.Module):
    """Two heads, as what ``pack`` makes of them; features by two names."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(6, 3).double(), nn.Linear(6, 2).double()
        self.pack = pack

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.pack(self.first(left), self.second(right))


PACKED: dict[
    str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]
] = {
    "tuple": (lambda a, b: (a, b), lambda o: (o[0], o[1])),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda o: (o["a"], o["b"])),
    "ModelOutput": (lambda a, b: ModelOutput(a=a, b=b), lambda o: (o.a, o.b)),
}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("as_kwargs", [False, True], ids=["arguments", "keywords"])
def test_a_loss_is_given_all_that_the_model_returns_and_all_labels(
    kind: str, as_kwargs: bool
) -> None:
    pack, unpack = PACKED[kind]

    def loss(outputs: Any, targets: tuple[Tensor, Tensor]) -> Tensor:
        first, second = unpack(outputs)
        return nn.functional.cross_entropy(first, targets[0]) + second.sub(targets[1]).abs().mean()

    left, right = torch.randn(2, 5, 6, dtype=torch.float64)
    targets = torch.arange(5) % 3, torch.randn(5, 2, dtype=torch.float64)
    oracle = Heads(lambda a, b: (a, b))
    a, b = oracle(left, right)
    expected = nn.functional.cross_entropy(a, targets[0]) + b.sub(targets[1]).abs().mean()
    torch.optim.SGD(oracle.parameters(), lr=0.1).zero_grad()
    expected.backward()

    replica = Replica(Heads(pack), SGD, loss, features_as_kwargs=as_kwargs)
    # By name the order says nothing.
    features: Any = {"right": right, "left": left} if as_kwargs else (left, right)
    batch = Batch(features, targets, last=False)
    total, rows = replica.evaluate([batch])
    assert total / rows == pytest.approx(expected.item(), rel=1e-12)
    assert replica.step(batch).item() == pytest.approx(expected.item(), rel=1e-12)
    for mine, other in zip(replica.module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, other - 0.1 * other.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("features_as", ["arguments", "keywords"])
def test_a_model_that_computes_its_own_loss_trains_as_torch_would(
    as_tuple: bool, features_as: str
) -> None:
    torch.manual_seed(5)
    model, oracle = OwnLoss(as_tuple=as_tuple).double(), OwnLoss().double()
    oracle.load_state_dict(model.state_dict())
    features, scale = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    labels = torch.arange(5) % 3
    logits = oracle.head(oracle.body(features).tanh() * scale[:, None])
    expected = nn.functional.cross_entropy(logits, labels)
    expected.backward()

    by_name = features_as == "keywords"
    replica = Replica(model, SGD, ModelLoss(), features_as_kwargs=by_name)
    given: Any = {"scale": scale, "features": features} if by_name else (features, scale)
    batch = Batch(given, labels, last=False)
    total, rows = replica.evaluate([batch])
    assert total / rows == pytest.approx(expected.item(), rel=1e-12)
    replica.step(batch)
    for mine, other in zip(replica.module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, other - 0.1 * other.grad, rtol=1e-12, atol=0)


def test_several_labels_reach_a_model_of_its_own_loss_by_their_names() -> None:
    class Distance(nn.Linear):
        def forward(self, x: Tensor, near: Tensor, far: Tensor) -> Any:  # type: ignore[override]
            (y,) = super().forward(x).T
            return {"loss": (y - near).abs().mean() + 10 * (y - far).abs().mean()}

    near, far = torch.randn(2, 5)
    x = torch.randn(5, 2)
    replica = Replica(Distance(2, 1), SGD, ModelLoss(("far", "near")))
    y = nn.functional.linear(x, replica.module.weight, replica.module.bias)[:, 0].detach()
    loss = replica.forward_backward(Batch((x,), (far, near), last=False))
    torch.testing.assert_close(loss, (y - near).abs().mean() + 10 * (y - far).abs().mean())


def test_a_features_dict_is_one_argument_unless_it_is_wanted_as_keywords() -> None:
    class Sum(nn.Linear):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(inputs["a"] + inputs["b"])

    a, b = torch.randn(2, 5, 3)
    batch = Batch({"a": a, "b": b}, torch.zeros(5, dtype=torch.int64), last=False)
    by_name = Replica(Sum(3, 2), SGD, nn.CrossEntropyLoss())
    expected = nn.functional.linear(a + b, by_name.module.weight, by_name.module.bias)
    torch.testing.assert_close(by_name.outputs(batch), expected)
    by_keyword = Replica(Sum(3, 2), SGD, nn.CrossEntropyLoss(), features_as_kwargs=True)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        by_keyword.outputs(batch)


class GrowsLate(torch.optim.SGD):
    """Keeps a second copy of the parameters from a step on."""

    def __init__(self, parameters: Any, *, grows_at: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["steps"] = 0
        self.grows_at = grows_at

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        group = self.param_groups[0]
        group["steps"] += 1
        if group["steps"] >= self.grows_at:
            for parameter in group["params"]:
                self.state[parameter].setdefault("slow", parameter.detach().clone())


def test_optimizer_state_that_grows_after_it_was_counted_is_refused_by_name() -> None:
    replica = replica_of(mlp(), partial(GrowsLate, grows_at=3))
    numel = sum(parameter.numel() for parameter in replica.module.parameters())
    replica.count_optimizer_state()
    replica.step(batch(0))
    replica.segments(with_optimizer=True)
    replica.step(batch(1))
    replica.step(batch(2))
    replica.segments(with_optimizer=False)
    for _ in range(2):
        with pytest.raises(TrainingError, match=f"GrowsLate .*0 values of 'slow'.*{numel} now"):
            replica.segments(with_optimizer=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_counting_the_state_leaves_no_trace_in_the_training(name: str) -> None:
    replica, oracle = (replica_of(batch_norm_net(), OPTIMIZERS[name]) for _ in range(2))
    replica.count_optimizer_state()
    for seed in range(3):
        replica.step(batch(seed))
        oracle.step(batch(seed))
    for mine, other in zip(
        replica.segments(with_optimizer=True), oracle.segments(with_optimizer=True), strict=True
    ):
        assert torch.equal(mine, other)


def test_counting_the_state_is_no_step_for_an_optimizer_that_counts_them_itself() -> None:
    replica = replica_of(mlp(), partial(GrowsLate, grows_at=9))
    replica.count_optimizer_state()
    assert replica.optimizer.param_groups[0]["steps"] == 0


class OneStateForAll(torch.optim.SGD):
    """Keeps a sum over its steps with the first parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        state = self.state[parameters[0]]
        if any(parameter.grad is not None for parameter in parameters):
            state["steps"] = state.get("steps", torch.zeros(())) + 1


def test_state_that_lies_with_one_parameter_takes_no_steps_for_the_others() -> None:
    replica = replica_of(mlp(6), partial(OneStateForAll, lr=0.1))
    replica.count_optimizer_state()
    for steps in (1, 2):
        replica.step(batch())
        assert [each.item() for each in replica.segments(with_optimizer=True)[1:]] == [steps]


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
