"""Optimizers and schedules of the learning rate, for what_happens.md.

The plainest of torch's are those of tests/replica and tests/strategies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import torch
from frames import CLASSES
from table_case import EPOCHS, WIDTH, WORDS, Case
from table_models import SENTENCE
from torch import nn, optim
from torch.optim import lr_scheduler

from sparkdl import ParameterAveraging

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def by(name: str, optimizer: Any, **more: Any) -> Case:
    return Case(name, settings={"optimizer": optimizer, **more})


class Lion(optim.Optimizer):
    """Steps by the sign of an average of the gradients."""

    def __init__(self, parameters: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"]
                average.lerp_(parameter.grad, 1 - group["beta"])
                parameter.add_(average.sign(), alpha=-group["lr"])


class Lookahead(optim.SGD):
    """Keeps slow parameters from its third step on."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps += 1
        for parameter in self.param_groups[0]["params"] if self.steps == 3 else ():
            self.state[parameter]["slow"] = parameter.detach().clone()


class SharpnessAware(optim.SGD):
    """Wants the gradient at a second place."""

    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("SharpnessAware.step needs a closure")
        closure()
        super().step()


class ScheduleFree(optim.SGD):
    """Has other parameters to predict with than those that it trains."""

    def eval(self) -> None:
        """Never called."""


class Reassigns(optim.SGD):
    """Steps as many a tutorial does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data = parameter.data - 0.1 * parameter.grad


class OneState(optim.SGD):
    """Keeps the norm of all gradients with the first parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        state = self.state[parameters[0]]
        state["norm"] = 0.9 * state.get("norm", torch.zeros(())) + norm
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad / (1 + state["norm"])


def groups(parameters: Any) -> optim.Optimizer:
    weights, biases = [], []
    for parameter in parameters:
        (weights if parameter.dim() > 1 else biases).append(parameter)
    return optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1e-2)


def groups_by_name(named_parameters: Any) -> optim.Optimizer:
    weights = [parameter for name, parameter in named_parameters if "weight" in name]
    others = [parameter for name, parameter in named_parameters if "weight" not in name]
    return optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def two(parameters: Any) -> Any:
    parameters = list(parameters)
    return optim.SGD(parameters[:2], lr=0.1), optim.Adam(parameters[2:])


def rounded(parameters: Any) -> optim.Optimizer:
    optimizer = optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: (
            [p.grad.clamp_(-0.1, 0.1) for p in optimizer.param_groups[0]["params"]] and None
        )
    )
    return optimizer


OWN_STATE = "`ParameterAveraging(average_optimizer_state=False)`"

OPTIMIZERS = [
    by("`SGD(maximize=True)`", partial(optim.SGD, lr=0.1, maximize=True)),
    by("`Adadelta`", partial(optim.Adadelta, lr=0.01)),
    by("`Adafactor`", partial(optim.Adafactor, lr=0.01)),
    by("`Adam(amsgrad=True)`", partial(optim.Adam, lr=0.01, amsgrad=True)),
    Case(
        "`Muon`, for matrices alone",
        model=lambda: nn.Linear(WIDTH, CLASSES, bias=False),
        settings={"optimizer": optim.Muon},
    ),
    by("`Muon`, with biases", optim.Muon),
    Case(
        "`SparseAdam`, for sparse embeddings alone",
        model=lambda: nn.EmbeddingBag(WORDS, CLASSES, sparse=True, mode="sum"),
        settings={**SENTENCE, "optimizer": partial(optim.SparseAdam, lr=0.01)},
    ),
    Case(
        "`SparseAdam`, each replica its own state",
        how=OWN_STATE,
        model=lambda: nn.EmbeddingBag(WORDS, CLASSES, sparse=True, mode="sum"),
        settings={
            **SENTENCE,
            "optimizer": partial(optim.SparseAdam, lr=0.01),
            "strategy": ParameterAveraging(period=1, average_optimizer_state=False),
        },
    ),
    by("`SparseAdam`, with dense layers", optim.SparseAdam),
    by("`LBFGS`", optim.LBFGS),
    by("`Adam(foreach=True)`", partial(optim.Adam, lr=0.01, foreach=True)),
    by("`Adam(fused=True)`", partial(optim.Adam, lr=0.01, fused=True)),
    by("`SGD(fused=True)`", partial(optim.SGD, lr=0.1, momentum=0.9, fused=True)),
    by("`Adam(capturable=True)` on a CPU", partial(optim.Adam, lr=0.01, capturable=True)),
    by("`Adam(differentiable=True)`", partial(optim.Adam, lr=0.01, differentiable=True)),
    by("`Adam(lr=tensor)`", partial(optim.Adam, lr=torch.tensor(0.01))),
    Case(
        "groups of parameters",
        how="a function that makes them of the parameters' shapes",
        settings={"optimizer": groups},
    ),
    Case(
        "groups of parameters by their names",
        how="a function of `named_parameters`",
        by_name=True,
        settings={"optimizer": groups_by_name},
    ),
    by("a step hook", rounded),
    by("an optimizer class of one's own", Lion),
    by("`clipNorm`", partial(optim.SGD, lr=0.1), clipNorm=0.01),
    by("an optimizer whose state grows after its first step", partial(Lookahead, lr=0.1)),
    Case(
        "an optimizer whose state grows, each replica its own state",
        how=OWN_STATE,
        settings={
            "optimizer": partial(Lookahead, lr=0.1),
            "strategy": ParameterAveraging(period=1, average_optimizer_state=False),
        },
    ),
    by("an optimizer that gives parameters other memory (`p.data = ...`)", Reassigns),
    by("an optimizer with one state for all parameters", OneState),
    by("an optimizer that wants a closure (sharpness-aware)", partial(SharpnessAware, lr=0.1)),
    by("a schedule-free optimizer", partial(ScheduleFree, lr=0.1)),
    by("several optimizers (GAN)", two),
    by("a dict of optimizers", {"one": optim.SGD, "other": optim.SGD}),
    by("an optimizer that is built already", optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
    by("a learning rate that the optimizer refuses", partial(optim.SGD, lr=-0.1)),
]


def scheduled(name: str, scheduler: Callable[..., Any], optimizer: Any = None) -> Case:
    settings = {"scheduler": scheduler, "schedulerEvery": "step"}
    if optimizer is not None:
        settings["optimizer"] = optimizer
    return Case(name, settings=settings)


def chained(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


class Halved(lr_scheduler.LRScheduler):
    """Halves the rate at each step."""

    def get_lr(self) -> list[float]:
        return [
            group["lr"] * (0.5 if self.last_epoch else 1) for group in self.optimizer.param_groups
        ]


class HalvesByHand:
    """Has the methods of a schedule without being torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=EPOCHS + 1)
plateau = partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5)
cyclic = partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.3, step_size_up=2)

SCHEDULERS = [
    scheduled("`ConstantLR`", partial(lr_scheduler.ConstantLR, total_iters=2)),
    scheduled("`LinearLR`", lr_scheduler.LinearLR),
    scheduled("`ExponentialLR`", partial(lr_scheduler.ExponentialLR, gamma=0.9)),
    scheduled("`PolynomialLR`", partial(lr_scheduler.PolynomialLR, total_iters=EPOCHS)),
    scheduled(
        "`CosineAnnealingWarmRestarts`", partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2)
    ),
    scheduled("`OneCycleLR` with SGD without momentum", one_cycle),
    scheduled("`OneCycleLR` with Adam", one_cycle, partial(optim.Adam, lr=0.01)),
    scheduled(
        "`OneCycleLR` with a rate that is a tensor",
        one_cycle,
        partial(optim.Adam, lr=torch.tensor(0.01)),
    ),
    scheduled("`CyclicLR` with SGD without momentum", cyclic),
    scheduled("`CyclicLR` with momentum", cyclic, partial(optim.SGD, lr=0.1, momentum=0.9)),
    scheduled("`CyclicLR` with Adam", cyclic, partial(optim.Adam, lr=0.01)),
    scheduled(
        "`MultiplicativeLR`", partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.8)
    ),
    scheduled("`ChainedScheduler`", chained),
    scheduled("`SWALR`", partial(optim.swa_utils.SWALR, swa_lr=0.05, anneal_epochs=2)),
    scheduled("an `LRScheduler` of one's own", Halved),
    Case(
        "a schedule by epochs",
        how="`schedulerEvery='epoch'`, the default",
        settings={"scheduler": partial(lr_scheduler.StepLR, step_size=2)},
    ),
    Case(
        "`ReduceLROnPlateau`",
        how="`schedulerEvery='epoch'`; follows the loss on held-out rows, else the training loss",
        settings={"scheduler": plateau},
    ),
    scheduled("`ReduceLROnPlateau` by steps", plateau),
    scheduled(
        "`OneCycleLR` shorter than the training",
        partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=EPOCHS - 1),
    ),
    scheduled("a class with `step()` that is no `LRScheduler`", HalvesByHand),
    scheduled(
        "a scheduler that is built already",
        lr_scheduler.StepLR(optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 2),
    ),
]
