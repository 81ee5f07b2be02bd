"""Objects are described by import path and arguments, and pickled only where that cannot be."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from every_row import every
from torch import nn

from sparkdl import ParameterAveraging, strategies, trusted_pickles
from sparkdl.checkpoint.object_spec import Expected, load_object, save_object
from sparkdl.checkpoint.trust import TrustArgument, classes_of
from sparkdl.errors import ConfigError

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


def test_a_partial_comes_back_with_its_arguments(tmp_path: Path) -> None:
    value = partial(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.9), foreach=None, amsgrad=True)
    loaded = there_and_back(value, tmp_path)
    assert (loaded.func, loaded.args, loaded.keywords) == (value.func, (), value.keywords)
    assert isinstance(loaded.keywords["betas"], tuple)


def test_nested_partials_lists_and_dicts_come_back(tmp_path: Path) -> None:
    value = partial(partial(models.Net, 4), outputs=[1, (2.5, None)], names={"a": nn.ReLU})
    loaded = there_and_back(value, tmp_path, trust=["models"])
    assert (loaded.args, loaded.keywords) == (value.args, value.keywords)


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


LOSSES = [
    nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=3),
    nn.NLLLoss(reduction="sum"),
    nn.HuberLoss(delta=2.5),
    nn.SmoothL1Loss(beta=0.3),
    nn.KLDivLoss(log_target=True),
]


@every("loss", LOSSES)
def test_a_loss_of_torch_comes_back_with_its_settings(tmp_path: Path, loss: Any) -> None:
    loaded = there_and_back(loss, tmp_path)
    assert type(loaded) is type(loss)
    plain = {k: v for k, v in vars(loss).items() if not k.startswith("_")}
    assert {k: v for k, v in vars(loaded).items() if k in plain} == plain
    assert not list(tmp_path.iterdir())


def test_a_loss_with_class_weights_is_pickled_with_them(tmp_path: Path) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    loaded = there_and_back(loss, tmp_path, trust=True)
    assert torch.equal(loaded.weight, loss.weight)
    assert (tmp_path / "thing.pkl").exists()


class OwnLoss(nn.CrossEntropyLoss):
    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = sharpness


def test_a_subclass_of_a_loss_keeps_what_it_added(tmp_path: Path) -> None:
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


def fail_inside_trust() -> None:
    with trusted_pickles():
        raise RuntimeError


def test_trust_ends_with_the_block_also_after_an_error(tmp_path: Path) -> None:
    spec = save_object(lambda: 1, tmp_path, "thing")
    with pytest.raises(RuntimeError):
        fail_inside_trust()
    with pytest.raises(ConfigError, match="pickle"):
        load(spec, tmp_path)


def test_nested_trust_ends_with_the_outer_block(tmp_path: Path) -> None:
    spec = save_object(lambda: 1, tmp_path, "thing")
    with trusted_pickles():
        with trusted_pickles():
            pass
        assert load(spec, tmp_path)() == 1


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
