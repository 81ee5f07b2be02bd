"""What is found wrong with a model, an optimizer or a schedule by trying them, without Spark."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from every_row import every
from frames import estimator
from torch import nn
from torch.optim import lr_scheduler

from sparkdl import LARS
from sparkdl.errors import ConfigError, ModelError
from sparkdl.estimator.checks.building import LazyModelError, build
from sparkdl.estimator.checks.rehearsal import (
    require_rate_counts,
    require_steady_state,
    require_steps,
)
from sparkdl.estimator.fit_settings import FitSettings
from sparkdl.replica import Replica


class GrowsAt(torch.optim.SGD):
    """Keeps a copy of the parameters from a step on."""

    def __init__(self, parameters: Any, step: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.left = step

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.left -= 1
        for parameter in self.param_groups[0]["params"] if self.left <= 0 else ():
            self.state[parameter]["slow"] = parameter.detach().clone()


def in_groups(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    weight, bias = parameters
    return torch.optim.SGD([{"params": [weight], **settings}, {"params": [bias], "lr": 0.5}])


class TurnsMomentumOn(lr_scheduler.LambdaLR):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == 3:
            self.optimizer.param_groups[0]["momentum"] = 0.9


@every("step", [2, 6])
def test_an_optimizer_whose_state_grows_late_is_refused_by_name(step: int) -> None:
    with pytest.raises(ModelError, match=r"GrowsAt has grown.*'slow'.*average_optimizer_state"):
        require_steady_state(partial(GrowsAt, step=step), None)


def test_a_schedule_that_makes_the_state_grow_is_refused_by_what_grows() -> None:
    with pytest.raises(ModelError, match=r"SGD has grown.*'momentum_buffer'"):
        require_steady_state(partial(torch.optim.SGD, lr=0.1), TurnsMomentumOn)


@every(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
        torch.optim.Adam,
        torch.optim.ASGD,
        # which only the real model can try out
        torch.optim.LBFGS,
        torch.optim.SparseAdam,
        torch.optim.Muon,
    ],
)
def test_other_optimizers_pass(optimizer: Any) -> None:
    require_steady_state(optimizer, None)
    require_steady_state(optimizer, partial(lr_scheduler.StepLR, step_size=3))
    # Schedules that turn momentum on at once.
    sgd = partial(torch.optim.SGD, lr=0.1)
    require_steady_state(sgd, partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=7))
    require_steady_state(sgd, partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.3))


def test_a_schedule_shorter_than_the_training_is_refused_with_both_lengths() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=7)
    with pytest.raises(ModelError, match=r"OneCycleLR ends after total_steps=7.* takes 8 "):
        require_steps(optimizer, one_cycle, 8)
    require_steps(optimizer, one_cycle, 7)
    require_steps(optimizer, partial(lr_scheduler.StepLR, step_size=3), 8)
    require_steps(optimizer, None, 8)


@every("several", [tuple, list])
def test_several_optimizers_are_refused_with_where_to_write_such_a_loop(several: Any) -> None:
    def optimizers(parameters: Any) -> Any:
        parameters = list(parameters)
        return several(torch.optim.SGD(half, lr=0.1) for half in (parameters[:1], parameters[1:]))

    with pytest.raises(ModelError, match=rf"builds a {several.__name__};.* sparkdl\.run"):
        build(lambda: nn.Linear(2, 2), optimizers, nn.MSELoss(), 0)


def test_lazy_layers_are_told_from_other_models() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())

    with pytest.raises(LazyModelError, match="calls it on a batch of zeros"):
        build(model, partial(torch.optim.SGD, lr=0.1), nn.MSELoss(), 0)


def rates(optimizer: Any, **others: Any) -> list[float]:
    """Of a network of one layer, for learningRate=0.25, once all is checked."""
    settings = FitSettings(estimator(optimizer=optimizer, learningRate=0.25, **others))
    replica = Replica(nn.Linear(2, 2), settings.optimizer_builder(), nn.MSELoss())
    require_rate_counts(settings, replica, 0.25)
    return [group["lr"] for group in replica.optimizer.param_groups]


@every(
    ("optimizer", "expected"),
    [
        (torch.optim.Adam, [0.25]),
        ("Adam", [0.25]),
        ("torch.optim.SGD", [0.25]),
        ("sparkdl.LARS", [0.25]),
        (partial(torch.optim.SGD, lr=3.0, momentum=0.9), [0.25]),
        (in_groups, [0.25, 0.5]),
    ],
)
def test_the_learning_rate_wins_over_the_optimizers_own(optimizer: Any, expected: Any) -> None:
    assert rates(optimizer) == expected
    warm_up = partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: step / 10)
    assert rates(optimizer, scheduler=warm_up) == expected


def takes_none(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def ignores_it(parameters: Any, **_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@every(
    ("settings", "words"),
    [
        (
            {"optimizer": takes_none},
            r"takes_none takes only \(parameters\). Give it an",
        ),
        ({"optimizer": ignores_it}, "ignores_it sets lr in each of its parameter groups"),
        (
            {
                "optimizer": "SGD",
                "scheduler": partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=9),
            },
            r"OneCycleLR\(max_lr=1.0, total_steps=9\) sets lr by itself",
        ),
    ],
)
def test_a_learning_rate_that_changes_nothing_is_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"learningRate=0.25 .*{words}"):
        rates(**settings)


def test_an_optimizer_without_a_rate_is_answered_with_the_param_that_gives_one() -> None:
    with pytest.raises(ModelError, match=r"'lr'\. Give the optimizer .* learningRate"):
        build(lambda: nn.Linear(2, 2), LARS, nn.MSELoss(), 0)
