"""What the tests of outer optimizers share."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from toys import classification, make_job, mlp

from sparkdl.strategies import OuterOptimizer, OuterSGD
from sparkdl.worker import Job

SIZES = [40, 33, 21]
"""Of batches of 4: 10, 9 and 6 steps an epoch."""
DATA = classification(SIZES)
SLOW_MOMENTUM = OuterSGD(0.7, 0.6, nesterov=False)
STRATEGY = OuterOptimizer(period=2, outer=SLOW_MOMENTUM)
SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.02)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1)


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    settings = {"strategy": STRATEGY, "epochs": 3, "max_failures": 1, **changes}
    return make_job(model or mlp(), **settings)


def named(value: Any) -> str:
    """A parameter of a test, for its name."""
    return value.func.__name__ if isinstance(value, partial) else str(value)
