"""Objects are described by import path and arguments, modules by what builds them; or pickled."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import models
import pytest
import torch
from every_row import every
from torch import Tensor, nn

from sparkdl import ParameterAveraging, strategies, trusted_pickles
from sparkdl.checkpoint.object_spec import Expected, load_object, save_object
from sparkdl.checkpoint.portable import pickled_module, require_portable
from sparkdl.checkpoint.trust import TrustArgument, classes_of
from sparkdl.errors import ConfigError, ModelError

ANYTHING = Expected(
    "anything",
    object,
    instance=True,
    harmless={
        **classes_of(strategies, strategies.Strategy),
        **classes_of(strategies, strategies.KFACPreconditioner),
        **classes_of(strategies, strategies.Hybrid),
        **classes_of(strategies, strategies.ColorTrees),
    },
)


def load(saved: Any, directory: Path, trust: TrustArgument = False) -> Any:
    return load_object(saved, directory, "thing", expected=ANYTHING, trust=trust)


def there_and_back(value: Any, directory: Path, *, trust: TrustArgument = False) -> Any:
    return load(json.loads(json.dumps(save_object(value, directory, "thing"))), directory, trust)


@every("value", [nn.ReLU, models.Net, nn.functional.cross_entropy, torch.optim.Adam])
def test_what_can_be_imported_comes_back_itself(tmp_path: Path, value: Any) -> None:
    assert there_and_back(value, tmp_path, trust=["models"]) is value
    assert not list(tmp_path.iterdir())


def test_partials_come_back_with_their_arguments_lists_and_dicts(tmp_path: Path) -> None:
    value = partial(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.9), foreach=None, amsgrad=True)
    loaded = there_and_back(value, tmp_path)
    assert (loaded.func, loaded.args, loaded.keywords) == (value.func, (), value.keywords)
    assert isinstance(loaded.keywords["betas"], tuple)
    nested = partial(partial(models.Net, 4), outputs=[1, (2.5, None)], names={"a": nn.ReLU})
    again = there_and_back(nested, tmp_path, trust=["models"])
    assert (again.args, again.keywords) == (nested.args, nested.keywords)


class Activation(str, Enum):
    RELU = "relu"


class Sizes(NamedTuple):
    width: int


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


@dataclass
class Scaled:
    width: int
    factor: InitVar[int] = 1

    def __post_init__(self, factor: int) -> None:
        self.width *= factor


@every("value", [Activation.RELU, Sizes(3), Attributes(width=3), Scaled(3, 2)])
def test_an_argument_is_of_its_own_class_again_and_as_it_was_changed(
    tmp_path: Path, value: Any
) -> None:
    (loaded,) = there_and_back(partial(models.Net, value), tmp_path, trust=True).args
    assert loaded == value
    assert type(loaded) is type(value)


@every(
    "value",
    [
        ParameterAveraging(period=9, average_optimizer_state=False, wire_dtype="bfloat16"),
        strategies.ElasticAveraging(period=9, moving_rate=0.2, mode="asynchronous"),
        strategies.GossipAveraging(3, "pull", "ring"),
        strategies.AdaScale(decay=0.5),
        strategies.GradientAllReduce(preconditioner=strategies.KFACPreconditioner(0.1)),
        strategies.GradientAllReduce(hybrid=strategies.Hybrid("classifier.*", 2)),
        strategies.GradientAllReduce(reduction=strategies.ColorTrees(2, 64)),
        strategies.ThresholdGradientSharing(0.02, sparsity=(0.001, 0.1), clip=None),
    ],
)
def test_a_strategy_comes_back_equal(tmp_path: Path, value: Any) -> None:
    assert there_and_back(value, tmp_path) == value
    assert not list(tmp_path.iterdir())


@every(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=3),
        nn.NLLLoss(reduction="sum"),
        nn.HuberLoss(delta=2.5),
        nn.SmoothL1Loss(beta=0.3),
        nn.KLDivLoss(log_target=True),
    ],
)
def test_a_loss_of_torch_comes_back_with_its_settings(tmp_path: Path, loss: Any) -> None:
    loaded = there_and_back(loss, tmp_path)
    assert type(loaded) is type(loss)
    plain = {k: v for k, v in vars(loss).items() if not k.startswith("_")}
    assert {k: v for k, v in vars(loaded).items() if k in plain} == plain
    assert not list(tmp_path.iterdir())


class OwnLoss(nn.CrossEntropyLoss):
    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = sharpness


def test_a_loss_with_class_weights_or_of_a_subclass_is_pickled_with_them(tmp_path: Path) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(there_and_back(loss, tmp_path, trust=True).weight, loss.weight)
    assert (tmp_path / "thing.pkl").exists()
    assert there_and_back(OwnLoss(3.0), tmp_path, trust=True).sharpness == 3.0


@every("value", [nn.Linear(2, 3), lambda: nn.Linear(2, 3)])
def test_what_cannot_be_imported_needs_trust(value: Any, tmp_path: Path) -> None:
    spec = save_object(value, tmp_path, "thing")
    with pytest.raises(ConfigError, match=r"thing was saved as a pickle.*trust=True.*trusted_pick"):
        load(spec, tmp_path)
    with trusted_pickles():
        load(spec, tmp_path)
    with pytest.raises(ConfigError, match="pickle"):
        load(spec, tmp_path)


def test_nested_trust_ends_with_the_outer_block_also_after_an_error(tmp_path: Path) -> None:
    spec = save_object(lambda: 1, tmp_path, "thing")
    with suppress(RuntimeError), trusted_pickles():
        with trusted_pickles():
            pass
        assert load(spec, tmp_path)() == 1
        raise RuntimeError
    with pytest.raises(ConfigError, match="pickle"):
        load(spec, tmp_path)


def test_what_is_no_longer_importable_is_named_with_its_path(tmp_path: Path) -> None:
    spec = {"recipe": {"import": "a_package_of_yore:Net"}}
    with pytest.raises(ConfigError, match=r"a_package_of_yore:Net.*spark\.submit\.pyFiles"):
        load(spec, tmp_path, trust=["a_package_of_yore"])


def test_a_function_of_the_running_script_is_pickled_beside_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import __main__

    def build() -> int:
        return 42

    build.__module__, build.__qualname__ = "__main__", "build"
    monkeypatch.setattr(__main__, "build", build, raising=False)
    spec = save_object(build, tmp_path, "thing")
    assert load(spec, tmp_path, trust=["__main__"]) is build
    monkeypatch.delattr(__main__, "build")
    with pytest.raises(ConfigError, match="trust=True"):
        load(spec, tmp_path)


def test_a_pickle_that_went_missing_is_named(tmp_path: Path) -> None:
    spec = save_object(lambda: 1, tmp_path, "thing")
    (tmp_path / "thing.pkl").unlink()
    with pytest.raises(ConfigError, match=r"thing\.pkl"):
        load(spec, tmp_path, trust=True)


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
@every(("dtype", "kind"), itertools.product([torch.float32, torch.float64], BUILDERS))
def test_a_module_that_cannot_be_pickled_is_built_again_with_its_values(
    dtype: torch.dtype, kind: str
) -> None:
    build = BUILDERS[kind]
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


def test_the_same_module_is_the_same_pickle_and_leaves_the_random_numbers_alone() -> None:
    build = BUILDERS["weight_norm"]
    module = build()
    pickled = pickled_module(module, build)
    assert pickled_module(module, build) == pickled
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
