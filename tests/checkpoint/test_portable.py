"""Modules that refuse to be pickled travel as what builds them, with their values of now."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from every_row import every
from torch import Tensor, nn

from sparkdl.checkpoint.portable import pickled_module, require_portable
from sparkdl.errors import ModelError


def with_first(change: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    return nn.Sequential(change(nn.Linear(6, 8)), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Shifted(nn.Module):
    """Draws a buffer that is no part of its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))
        self.register_buffer("shift", torch.rand(1), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features) + self.shift


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: with_first(nn.utils.parametrizations.weight_norm),
    "spectral_norm": lambda: with_first(nn.utils.parametrizations.spectral_norm),
    "orthogonal": lambda: with_first(nn.utils.parametrizations.orthogonal),
    "script": lambda: torch.jit.script(with_first(lambda layer: layer)),
    "buffer that is not persistent": Shifted,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_module_that_cannot_be_pickled_is_built_again_with_its_values(
    subtests: pytest.Subtests,
) -> None:
    for dtype, build in itertools.product([torch.float32, torch.float64], BUILDERS.values()):
        with subtests.test(build=build, dtype=dtype):
            module = build().to(dtype).eval()
            with pytest.raises(Exception, match=r"erializ"):
                cloudpickle.dumps(module)
            with torch.no_grad():
                for tensor in [*module.parameters(), *module.buffers()]:
                    if tensor.is_floating_point():
                        tensor.add_(0.125)
            features = torch.randn(4, 6, dtype=dtype)

            require_portable(module, build)
            arrived = cloudpickle.loads(pickled_module(module, build)).eval()

            assert torch.equal(arrived(features), module(features))


class HoldsInAList(nn.Module):
    """Holds a parameter in a list of its own, and one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.scale = self.same = nn.Parameter(torch.rand(6))
        self.scales = [self.scale]

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features) * self.scales[0]


def test_a_module_that_is_built_again_still_holds_its_own_parameters() -> None:
    module, features = HoldsInAList().double(), torch.randn(4, 6, dtype=torch.float64)
    arrived = cloudpickle.loads(pickled_module(module, HoldsInAList))
    assert torch.equal(arrived(features), module(features))
    assert arrived.same is arrived.scale


class DrawsOnce(nn.Module):
    """Draws a cache in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))
        self.register_buffer("shift", None, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        if self.shift is None:
            self.shift = torch.rand(1)
        return self.layer(features) + self.shift


@every("used", [False, True])
def test_a_cache_that_is_made_later_arrives_as_it_is(used: bool) -> None:
    module, features = DrawsOnce(), torch.randn(4, 6)
    if used:
        module(features)
    arrived = cloudpickle.loads(pickled_module(module, DrawsOnce))
    if used:
        assert torch.equal(arrived(features), module(features))
    else:
        assert arrived.shift is None
    assert arrived.state_dict().keys() == module.state_dict().keys()


def test_the_same_module_is_the_same_pickle() -> None:
    build = BUILDERS["weight_norm"]
    module = build()
    assert pickled_module(module, build) == pickled_module(module, build)


def test_building_it_again_leaves_the_random_numbers_alone() -> None:
    build = BUILDERS["weight_norm"]
    pickled = pickled_module(build(), build)
    before = torch.random.get_rng_state()
    cloudpickle.loads(pickled)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_can_be_pickled_arrives_as_it_is_and_not_as_it_was_built() -> None:
    module = nn.Sequential(nn.Linear(6, 3))
    module.append(nn.ReLU())
    arrived = cloudpickle.loads(pickled_module(module, lambda: nn.Linear(6, 3)))
    assert [type(each) for each in arrived] == [nn.Linear, nn.ReLU]


class KeepsALock(nn.Linear):
    """Whose state holds what cannot be pickled, once it is built."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.guard = threading.Lock()

    def get_extra_state(self) -> Any:
        return self.guard

    def set_extra_state(self, state: Any) -> None:
        self.guard = state


def test_what_cannot_travel_at_all_is_refused() -> None:
    for check in (require_portable, pickled_module):
        with pytest.raises(ModelError, match=r"which transform requires: TypeError.*lock"):
            check(KeepsALock(), KeepsALock)


def test_the_check_does_not_copy_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Tensor, protocol: int) -> Any:
        raise AssertionError("the values were read")

    monkeypatch.setattr(Tensor, "__reduce_ex__", read)
    require_portable(nn.Linear(6, 3), nn.Linear)
    build = BUILDERS["weight_norm"]
    require_portable(build(), build)
