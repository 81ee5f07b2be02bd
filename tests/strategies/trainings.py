"""What most tests of strategies train: rows of three ranks, optimizers, and a job of 3 epochs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from toys import Data, classification, make_job, mlp

from sparkdl.strategies import OuterOptimizer, OuterSGD, ThresholdGradientSharing
from sparkdl.worker import Job

SIZES = [40, 33, 21]
"""Of batches of 4: 10, 9 and 6 steps an epoch."""
DATA = classification(SIZES)
EVEN = classification([40, 34, 22])
"""No minibatch of one row, which BatchNorm would not take."""
SLOW_MOMENTUM = OuterSGD(0.7, 0.6, nesterov=False)
SHARED = ThresholdGradientSharing(0.01, sparsity=(0.05, 0.3), clip=5.0, shake_every=4)
STRATEGY = OuterOptimizer(period=2, outer=SLOW_MOMENTUM)
SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.02)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1)


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    """Of ``STRATEGY`` if no other is given."""
    settings = {"strategy": STRATEGY, "epochs": 3, "max_failures": 1, **changes}
    return make_job(model or mlp(), **settings)


def normed(dropout: float = 0.0) -> nn.Module:
    """With statistics; ranks that are threads share the random numbers that dropout draws."""
    torch.manual_seed(3)
    norm, drops = nn.BatchNorm1d(8), nn.Dropout(dropout)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), drops, nn.Linear(8, 3)).double()


def head() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 3).double()


def on_backbone() -> nn.Module:
    """The same head on 200 times as many parameters that are not trained."""
    torch.manual_seed(2)
    backbone = [nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 6), nn.Tanh()]
    return nn.Sequential(*(layer.double().requires_grad_(False) for layer in backbone), head())


class Point(nn.Module):
    """A number, times each row's first feature."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        return self.place * features[:, 0]


def slope(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def equal_rows(*values: float, steps: int) -> Data:
    """So many rows of each rank, all of its value."""
    features = np.repeat(np.array(values), steps)[:, None] * np.ones(6)
    return Data(features, np.zeros(len(features), np.int64), (steps,) * len(values))
