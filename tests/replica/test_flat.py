"""Parameters and buffers are views of a few flat buffers, and stay so whatever a model does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from every_row import every, every_row
from replicas import (
    OPTIMIZERS,
    SGD,
    batch,
    batch_norm_net,
    replica_of,
    state_of,
    train_plainly,
    views_of,
)
from torch import Tensor, nn
from toys import mlp

from sparkdl.errors import ModelError, TrainingError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica


@every("name", OPTIMIZERS)
def test_everything_stays_a_view_of_the_same_flat_buffers_and_is_used_from_there(name: str) -> None:
    replica = replica_of(batch_norm_net(), OPTIMIZERS[name])
    for seed in range(3):
        replica.step(batch(seed))
        flats = replica.segments(with_optimizer=True)
        module, state = replica.module, state_of(replica.optimizer)
        assert views_of([*module.parameters(), *module.buffers(), *state], flats)
    again = replica.segments(with_optimizer=True)
    assert [flat.data_ptr() for flat in flats] == [flat.data_ptr() for flat in again]


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten())
    return net.to(memory_format=torch.channels_last)


@every("name", OPTIMIZERS)
def test_channels_last_stays_channels_last_and_trains_as_in_plain_torch(name: str) -> None:
    replica, oracle = replica_of(convolutions(), OPTIMIZERS[name]), convolutions()
    optimizer = OPTIMIZERS[name](oracle.parameters())
    strides = [parameter.stride() for parameter in oracle.parameters()]
    images, targets = torch.randn(4, 3, 5, 5), torch.arange(4)
    for _ in range(3):
        replica.step(Batch((images,), targets, last=False))
        flats = replica.segments(with_optimizer=True)
        train_plainly(oracle, optimizer, images, targets)

        parameters = list(replica.module.parameters())
        assert [parameter.stride() for parameter in parameters] == strides
        assert strides[0] == (27, 1, 9, 3)
        moments = [value for value in state_of(replica.optimizer) if value.dim() == 4]
        assert all(value.is_contiguous(memory_format=torch.channels_last) for value in moments)
        assert views_of([*parameters, *moments], flats)
        torch.testing.assert_close(replica.module.state_dict(), oracle.state_dict())
    assert [parameter.stride() for parameter in replica.release().parameters()] == strides


def test_writing_to_the_segments_moves_the_model() -> None:
    replica = replica_of(batch_norm_net(), OPTIMIZERS["adam"])
    replica.step(batch())
    for segment in replica.segments(with_optimizer=True):
        segment.fill_(2)
    assert all(bool((v == 2).all()) for v in replica.module.state_dict().values())
    assert all(bool((value == 2).all()) for value in state_of(replica.optimizer))


class WritesInForward(nn.Module):
    """Writes to a buffer and a parameter after autograd has saved others of the same dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(6)
        self.scaled = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))
        self.clipped = nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.scaled(self.norm(features))
        with torch.no_grad():
            self.clipped.weight.clamp_(-0.2, 0.2)
        return self.clipped(hidden)


@every("name", OPTIMIZERS)
def test_a_model_that_writes_in_its_forward_pass_trains_as_in_plain_torch(name: str) -> None:
    replica, oracle = replica_of(WritesInForward(), OPTIMIZERS[name]), WritesInForward()
    optimizer = OPTIMIZERS[name](oracle.parameters())
    features, targets = torch.randn(5, 6), torch.arange(5) % 3
    for _ in range(3):
        replica.step(Batch((features,), targets, last=False))
        train_plainly(oracle, optimizer, features, targets)
    torch.testing.assert_close(replica.module.state_dict(), oracle.state_dict())


class Reassigns(nn.Module):
    """Assigns its buffer again in every forward instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(6))

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


class Changes(nn.Module):
    """Has another buffer, or part, of some name after every forward."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        self.net, self.given = mlp(), [name, value]
        self.register_buffer("table", torch.zeros(2, 6))
        self.register_buffer("twin", self.get_buffer("table"))

    def forward(self, features: Tensor) -> Tensor:
        name, value = self.given
        if isinstance(value, nn.Module):
            self.add_module(name, value)
        else:
            self.register_buffer(name, value)
        return self.net(features)


@every_row(
    ("table", torch.zeros(5, 6), r"'table' was float32 \(2, 6\)", r"float32 \(5, 6\)"),
    ("table", torch.zeros(2, 6).double(), r"'table' was float32", r"float64 \(2, 6\)"),
    ("table", None, "'table'", "missing"),
    ("late", torch.zeros(3), "'late' was missing", r"float32 \(3,\)"),
    ("norm", nn.BatchNorm1d(6), "'norm.running_mean' was missing", r"float32 \(6,\)"),
    ("table", torch.ones(2, 6), "'twin' was the same tensor as another buffer", "a .* own"),
)
def test_a_buffer_that_cannot_be_averaged_any_more_is_named(
    name: str, value: Any, was: str, found: str
) -> None:
    replica = replica_of(Changes(name, value))
    replica.step(batch())
    with pytest.raises(TrainingError, match=f"{was} .*, and is {found} now"):
        replica.segments(with_optimizer=False)


class KeepsCaches(nn.Module):
    """Has buffers that no state dict has: one of them keeps its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("table", torch.zeros(1, 6), persistent=False)
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("dropped", torch.zeros(3), persistent=False)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        rows = len(self.get_buffer("table")) + 1
        self.register_buffer("table", torch.ones(rows, 6), persistent=False)
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool), persistent=False)
        self.register_buffer("dropped", None, persistent=False)
        self.seen = self.seen + 1
        return self.net(features)


def test_caches_are_left_to_each_replica() -> None:
    replica = replica_of(KeepsCaches())
    layout = replica.layout(with_optimizer=False)
    assert [segment.kind for segment in layout] == ["parameters"]
    for steps in range(1, 4):
        replica.step(batch(steps))
        segments = replica.segments(with_optimizer=False)
        assert replica.layout(with_optimizer=False) == layout
        segments[0].zero_()
    released = replica.release()
    caches = dict(released.named_buffers())
    shapes = {name: tuple(each.shape) for name, each in caches.items()}
    assert shapes == {"table": (4, 6), "mask": (6,), "seen": ()}
    assert caches["seen"] == 3


class Remembers(nn.Module):
    """Buffers that take each other's places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        for index, name in enumerate(("now", "before", "even", "odd", "one", "other")):
            self.register_buffer(name, torch.full((6,), float(index)))

    def forward(self, features: Tensor) -> Tensor:
        self.before, self.now = self.now, features.mean(dim=0).float()
        self.even, self.odd = self.odd, self.even
        self.one = self.other = features.amax(dim=0).float()
        return self.net(features)


def test_buffers_may_take_each_others_places_as_in_plain_torch() -> None:
    replica, oracle = replica_of(Remembers()), Remembers()
    for seed in range(3):
        replica.step(batch(seed))
        oracle(*batch(seed).features)
        segments = replica.segments(with_optimizer=False)
        expected = dict(oracle.named_buffers(remove_duplicate=False))
        torch.testing.assert_close(dict(replica.module.named_buffers()), expected)
        assert segments[1].tolist() == torch.cat(list(expected.values())).tolist()


SPARSE = torch.eye(3).to_sparse()


@every(
    ("value", "words"),
    [
        (SPARSE, "the buffer 'codes' has the layout .*sparse_coo"),
        (nn.Parameter(SPARSE, False), "the parameter 'codes' has the layout .*sparse_coo"),
        *(
            (torch.zeros(3).to(dtype), f"the buffer 'codes' is of {dtype}, and torch")
            for dtype in (torch.float8_e4m3fn, torch.uint16, torch.uint64)
        ),
    ],
)
def test_a_tensor_that_is_sparse_or_that_torch_cannot_unpickle_is_refused_by_its_name(
    value: Tensor, words: str
) -> None:
    module = mlp()
    if isinstance(value, nn.Parameter):
        module.register_parameter("codes", value)
    else:
        module.register_buffer("codes", value)
    with pytest.raises(ModelError, match=words):
        replica_of(module)


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


class Swaps(nn.Module):
    """Has two layers change places in each forward by exchanging their memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(6, 6, bias=False).double()
        self.second = nn.Linear(6, 6, bias=False).double()

    def forward(self, features: Tensor) -> Tensor:
        first, second = self.first.weight, self.second.weight
        first.data, second.data = second.data, first.data
        return self.second(self.first(features))


def test_parameters_may_take_each_others_places_as_in_plain_torch() -> None:
    replica, plain = replica_of(Swaps()), Swaps()
    optimizer = SGD(plain.parameters())
    for seed in range(3):
        replica.step(batch(seed))
        train_plainly(plain, optimizer, batch(seed).features[0], batch(seed).targets)
        (flat,) = replica.segments(with_optimizer=False)
        torch.testing.assert_close(flat, nn.utils.parameters_to_vector(plain.parameters()))
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


def test_dtypes_travel_in_segments_of_their_own() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).double()})
    module["c"] = nn.Linear(3, 3).half()
    layout = Replica(module, SGD, nn.MSELoss()).layout(with_optimizer=False)
    assert [(s.dtype, s.numel, s.center_dtype) for s in layout] == [
        (torch.float32, 6, torch.float32),
        (torch.float64, 6, torch.float64),
        (torch.float16, 12, torch.float32),
    ]


def test_what_is_frozen_after_the_replica_was_built_still_travels() -> None:
    replica = replica_of(mlp(), OPTIMIZERS["adam"])
    layout = replica.layout(with_optimizer=True)
    replica.module[0].requires_grad_(False)
    replica.step(batch())
    replica.rebuild_optimizer()
    assert replica.layout(with_optimizer=True) == layout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu_state_is_flat_on_the_device_and_layouts_agree(name: str) -> None:
    trained, untrained = (
        Replica(batch_norm_net(), OPTIMIZERS[name], nn.CrossEntropyLoss(), "cuda") for _ in range(2)
    )
    trained.step(batch())
    assert trained.layout(with_optimizer=True) == untrained.layout(with_optimizer=True)
    assert all(p.is_cuda for p in trained.module.parameters())
    assert all(s.is_cuda for s in trained.segments(with_optimizer=False))
