"""Compressions beside parameters that take part in some steps only."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from every_row import every
from torch import Tensor, nn
from toys import classification, make_job

from sparkdl.strategies import GradientAllReduce, OneBitAdam, PowerSGD, TopK
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = torch.tensor([[3.0, -2.0, 0.5], [2.0, 1.0, -4.0]], dtype=torch.float64)


class UsedEvery(nn.Module):
    """Uses ``now_and_then`` in one of every so many minibatches, with new gradients."""

    def __init__(self, every: int, minibatches: int = 0) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.zeros(1).double())
        self.now_and_then = nn.Parameter(torch.zeros(2, 3).double())
        self.every, self.minibatches = every, minibatches

    def forward(self, features: Tensor) -> Tensor:
        output = self.always + 0.0 * features.sum(1)
        if self.minibatches % self.every == 0:
            used = self.minibatches // self.every
            output = output + (self.now_and_then * ROWS.roll(used, 1) * (1 + used)).sum()
        self.minibatches += 1
        return output


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


@every(
    ("optimizer", "often", "seldom"),
    [
        (torch.optim.SGD, TopK(0.3), TopK(0.3)),
        (torch.optim.SGD, PowerSGD(1, 0, 0), PowerSGD(1, 0, 0)),
        # Of five steps of the warm-up three use the parameter.
        (partial(torch.optim.Adam, betas=(0.7, 0.9)), OneBitAdam(3), OneBitAdam(5)),
    ],
)
def test_steps_that_do_not_use_a_parameter_are_none_to_it(
    optimizer: Any, often: Any, seldom: Any
) -> None:
    def trained(every: int, compression: Any) -> Tensor:
        given = make_job(
            UsedEvery(every),
            loss=mean,
            optimizer=partial(optimizer, lr=0.1),
            strategy=GradientAllReduce(compression=compression, find_unused_parameters=True),
        )
        outcome = run_world(given, classification([4 * 8 * every]).shards())
        return outcome.module.get_parameter("now_and_then").detach()

    assert trained(1, often).any()
    torch.testing.assert_close(trained(2, seldom), trained(1, often), rtol=1e-12, atol=1e-12)


def test_a_parameter_that_is_never_used_is_no_error_of_one_bit_adam() -> None:
    given = make_job(
        UsedEvery(1000, minibatches=1),
        loss=mean,
        optimizer=partial(torch.optim.Adam, lr=0.1),
        strategy=GradientAllReduce(compression=OneBitAdam(1), find_unused_parameters=True),
    )
    outcome = run_world(given, classification([4 * 5]).shards())
    assert outcome.module.get_parameter("always").item() == pytest.approx(-0.5, rel=1e-6)
