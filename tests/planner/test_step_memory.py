"""What a step is predicted to take is what torch's allocator says that it takes."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from step_networks import CLASSES, KINDS, convolutions, mlp, most_allocated
from torch import Tensor, nn

from sparkdl import Batch
from sparkdl.errors import ConfigError, ModelError
from sparkdl.planner.layers import layer_balance
from sparkdl.planner.memory import StepMemory, rows_of, step_memory
from sparkdl.replica import Replica

SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = torch.optim.Adam


def measured(kind: str, rows: int, optimizer: Any, precision: Any) -> int:
    build, example = KINDS[kind]

    def two_steps() -> None:
        replica = Replica(build().train(), optimizer, CLASSES, precision=precision)
        for _ in range(2):
            replica.step(rows_of(example, rows))

    return most_allocated(two_steps)


@every(
    "kind, optimizer, precision",
    [
        *(("mlp", ADAM, "bf16"), ("convolutions", SGD, "float32")),
        *(("transformer", ADAM, "float32"), ("transformer", SGD, "bf16")),
    ],
)
def test_the_peak_of_larger_minibatches_is_predicted_within_a_tenth(
    kind: str, optimizer: Any, precision: Any
) -> None:
    build, example = KINDS[kind]
    found = step_memory(build(), example, optimizer=optimizer, loss=CLASSES, precision=precision)
    assert found.peak(100) == pytest.approx(measured(kind, 100, optimizer, precision), rel=0.1)


@every("frozen", [0, 10 * 20 + 20])
def test_a_step_without_rows_takes_parameters_gradients_and_adam_s_two_values_of_each(
    frozen: int,
) -> None:
    """Frozen parameters have neither gradients nor state; Adam counts the steps of each tensor."""
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    model[0].requires_grad_(not frozen)
    parameters = 10 * 20 + 20 + 20 * 5 + 5
    found = step_memory(model, torch.randn(2, 10), optimizer=ADAM)
    state = parameters + 2 * (parameters - frozen) + (2 if frozen else 4)
    assert found.fixed.min() == 4 * state
    assert found.fixed.max() >= 4 * (state + parameters - frozen)


def test_the_largest_minibatch_fits_and_one_row_more_does_not() -> None:
    build, example = KINDS["transformer"]
    found = step_memory(build(), example, optimizer=SGD, loss=CLASSES)
    before = 0
    for budget in range(found.peak(1), 40_000_000, 1_234_567):
        rows = found.largest_batch(budget)
        assert found.peak(rows) <= budget < found.peak(rows + 1)
        assert rows >= before
        before = rows


def test_lines_that_cross_have_the_peak_of_the_higher_one() -> None:
    found = StepMemory(np.array([1000.0, 10.0]), np.array([1.0, 100.0]))
    assert [found.peak(rows) for rows in (1, 10, 11)] == [1001, 1010, 1110]
    assert found.largest_batch(1009) == 9
    assert found.largest_batch(2010) == 20


@every(
    "look",
    [
        partial(step_memory, optimizer=ADAM),
        partial(layer_balance, batch_size=4, workers=2, link=1e9),
    ],
)
def test_a_model_its_gradients_and_the_random_numbers_stay_as_they_are(look: Any) -> None:
    model = convolutions().eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    look(model, KINDS["convolutions"][1], loss=CLASSES)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    for part in model.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert "forward" not in vars(part)


def test_the_second_time_it_is_the_same() -> None:
    first, second = (
        step_memory(mlp(), torch.randn(rows, 256), optimizer=ADAM).peak(1000) for rows in (1, 50)
    )
    assert first == second


class Pairs(nn.Module):
    """Compares all rows of a minibatch with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y @ y.T).exp().exp().exp()


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Any]:
        return {"sum": self.layer(features["a"] + features["b"]), "name": "no tensor"}


class Other(nn.Module):
    """Runs more operations for more rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(row[None]) for row in x])


def test_models_of_other_forms_are_measured() -> None:
    named = {"a": torch.randn(2, 4), "b": torch.randn(2, 4)}
    assert step_memory(ByName(), named, optimizer=SGD).peak(1) > 2 * 4 * 20
    varied = step_memory(Other(), torch.randn(2, 64), optimizer=SGD)
    assert varied.peak(32) > varied.peak(16) > 4 * 64 * 64


EXAMPLE = torch.ones(2, 256)


@every(
    "wrong, error, said",
    [
        ({"example": torch.randn(2, 5)}, ModelError, "on 2 rows"),
        ({"example": torch.randn(0, 256)}, ConfigError, "at least on"),
        ({"example": torch.tensor(1.0)}, ConfigError, "must be a mi"),
        ({"example": ()}, ConfigError, "got nothing"),
        ({"example": 5}, ConfigError, "got a int"),
        ({"example": (EXAMPLE, torch.ones(3, 1))}, ConfigError, r"32 \(2, 256\), float32 \(3, 1\)"),
        ({"model": mlp}, ConfigError, "nn.Module"),
        ({"model": nn.ReLU()}, ModelError, "nothing to"),
        ({"optimizer": 3}, ModelError, "not callable"),
        ({"model": Pairs(), "example": torch.ones(2, 4)}, ModelError, "not linear"),
        *(
            ({"budget": budget}, ConfigError, "a step with one row takes")
            for budget in (0, 1000, 3.5, math.inf, "1 GB")
        ),
    ],
)
def test_what_cannot_be_measured_is_said(
    wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    given = {"model": mlp(), "example": EXAMPLE, "optimizer": ADAM, "budget": 10**9} | wrong
    budget = given.pop("budget")
    with pytest.raises(error, match=said):
        step_memory(**given).largest_batch(budget)


def test_weights_and_several_labels_are_rows_too() -> None:
    example = Batch((torch.arange(3),), (torch.arange(3),), last=False, weights=torch.arange(3.0))
    taken = rows_of(example, 5)
    for each in (taken.features[0], taken.targets[0], taken.weights):
        assert each.tolist() == [0, 1, 2, 0, 1]


def test_a_batch_may_hold_one_tensor_that_is_the_models_only_argument() -> None:
    features, targets = torch.ones(2, 256), torch.zeros(2, dtype=torch.int64)
    found, wanted = (
        step_memory(
            mlp(), Batch(each, targets, last=False), optimizer=ADAM, loss=nn.CrossEntropyLoss()
        )
        for each in (features, (features,))
    )
    assert found.peak(64) == wanted.peak(64)
