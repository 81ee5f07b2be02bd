"""Optimizers for large minibatches: each layer's step is as long as the layer's weights allow.

With one rate for all, the layer whose gradients are largest relative to its weights diverges first.
For a weight matrix (or kernel) w with gradient g, weight decay b and learning rate e:

    LARS    rate  <-  trust * |w| / (|g| + b |w|)        m <- momentum * m + e * rate * (g + b w)
            w <- w - m
    LAMB    m, v  <-  Adam's moments, corrected          u <- m / (sqrt(v) + eps) + b w
            w <- w - e * |w| / |u| * u

where the ratio of norms is 1 if one is 0. LARS keeps its learning rate in the momentum, as in the
paper and unlike torch's SGD, so a warm-up's small steps stay small. One-dimensional parameters
(biases and normalization layers) neither decay nor have a ratio of their own, as in the authors'
code. You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks" (arXiv
1708.03888); You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76
minutes" (arXiv 1904.00962).

Written here because pytorch_optimizer 4.1, the best-maintained library that has both, divides
LAMB's step by Adam's first-moment correction: ten times the learning rate in the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparkdl.arguments import as_number
from sparkdl.errors import ConfigError


class _Layerwise(torch.optim.Optimizer):
    """What both share: taking a step for each parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; see ``torch.optim.Optimizer``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._step(weights, weights.grad, self.state[weights], group)
        return loss

    def _step(
        self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class LARS(_Layerwise):
    """SGD with momentum and a learning rate for each layer.

    Choose it for convolutional networks with minibatches of thousands of rows, with a warm-up of
    several epochs. For small ones SGD needs one setting less.

    Args:
        params: as any optimizer of torch takes them.
        lr: > 0, or 0 at the start of a warm-up; with the default ``trust``, about ten times SGD's.
        momentum: in [0, 1); 0.9 in the paper.
        weight_decay: >= 0; the paper has 5e-4, and 5e-5 to 1e-4 are usual for ResNet-50.
        trust: > 0; 0.001 in the paper.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        lr = _require("lr", lr, 0, math.inf)
        momentum = _require("momentum", momentum, 0, 1)
        weight_decay = _require("weight_decay", weight_decay, 0, math.inf)
        trust = _require("trust", trust, math.ulp(0.0), math.inf)
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, settings)

    def _step(
        self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weights)
        velocity = state["momentum_buffer"].mul_(group["momentum"])
        if weights.dim() < 2:
            velocity.add_(gradient, alpha=group["lr"])
        else:
            decay, norm = group["weight_decay"], weights.norm()
            rate = _ratio(group["trust"] * norm, gradient.norm() + decay * norm)
            velocity.add_(gradient.add(weights, alpha=decay).mul_(rate), alpha=group["lr"])
        weights.sub_(velocity)


class LAMB(_Layerwise):
    """Adam with a learning rate for each layer.

    Choose it for transformers with minibatches of thousands of rows. For small ones AdamW learns
    just as well and is fused.

    Args:
        params: as any optimizer of torch takes them.
        lr: > 0, or 0 at the start of a warm-up; the paper trains BERT with 5e-3 / sqrt(2 ** k) for
            minibatches of 32,768 / 2 ** k rows.
        betas: decay of the moments, in [0, 1); (0.9, 0.999) in the paper.
        eps: > 0; 1e-6 in the paper.
        weight_decay: >= 0; 0.01 in the paper.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        lr = _require("lr", lr, 0, math.inf)
        first, second = (_require("betas", beta, 0, 1) for beta in betas)
        eps = _require("eps", eps, math.ulp(0.0), math.inf)
        weight_decay = _require("weight_decay", weight_decay, 0, math.inf)
        settings = {"lr": lr, "betas": (first, second), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)

    def _step(
        self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weights)
            state["exp_avg_sq"] = torch.zeros_like(weights)
        state["step"] += 1
        steps, (first, second) = float(state["step"]), group["betas"]
        is_layer, means, squares = weights.dim() > 1, state["exp_avg"], state["exp_avg_sq"]
        if weights.is_complex():  # real and imaginary parts each have a variance, as in Adam
            weights, gradient = torch.view_as_real(weights), torch.view_as_real(gradient)
            means, squares = torch.view_as_real(means), torch.view_as_real(squares)
        mean = means.lerp_(gradient, 1 - first)
        square = squares.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = square.div(1 - second**steps).sqrt_().add_(group["eps"])
        update = mean.div(root).div_(1 - first**steps)
        if is_layer:
            update.add_(weights, alpha=group["weight_decay"])
            update.mul_(_ratio(weights.norm(), update.norm()))
        weights.add_(update, alpha=-group["lr"])


def _ratio(weights: Tensor, update: Tensor) -> Tensor:
    """The ratio of the two norms, 1 if either is 0; stays on the device."""
    ratio = weights / update
    return torch.where((weights > 0) & (update > 0), ratio, torch.ones_like(ratio))


def _require(name: str, value: object, least: float, below: float) -> float:
    number = as_number(value)
    if number is None or not least <= number < below:
        raise ConfigError(f"{name} must be a number >= {least:g} and < {below:g}, got {value!r}")
    return number
