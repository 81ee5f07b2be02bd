"""Parameters and buffers are views of a few flat buffers, and stay so whatever a model does."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from replicas import OPTIMIZERS, SGD, batch, batch_norm_net, replica_of, views_of
from torch import Tensor, nn
from toys import mlp

from sparkdl.errors import TrainingError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica


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
        outputs: Tensor = self.clipped(hidden)
        return outputs


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_that_writes_in_its_forward_pass_trains_as_in_plain_torch(name: str) -> None:
    replica, oracle = replica_of(WritesInForward(), OPTIMIZERS[name]), WritesInForward()
    optimizer = OPTIMIZERS[name](oracle.parameters())
    features, targets = torch.randn(5, 6), torch.arange(5) % 3
    for _ in range(3):
        replica.step(Batch((features,), targets, last=False))
        optimizer.zero_grad()
        nn.functional.cross_entropy(oracle(features), targets).backward()
        optimizer.step()
    torch.testing.assert_close(replica.module.state_dict(), oracle.state_dict())


class Reassigns(nn.Module):
    """Assigns its buffer again in every forward instead of writing to it."""

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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu_state_is_flat_on_the_device_and_layouts_agree(name: str) -> None:
    trained = Replica(batch_norm_net(), OPTIMIZERS[name], nn.CrossEntropyLoss(), "cuda")
    untrained = Replica(batch_norm_net(), OPTIMIZERS[name], nn.CrossEntropyLoss(), "cuda")
    trained.step(batch())
    assert trained.layout(with_optimizer=True) == untrained.layout(with_optimizer=True)
    assert all(p.is_cuda for p in trained.module.parameters())
    assert all(s.is_cuda for s in trained.segments(with_optimizer=False))
