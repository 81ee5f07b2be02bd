"""What gradient sharing sends: a formula of bytes, through the driver and among executors."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import cloudpickle
import numpy as np
import torch
from every_row import every
from torch import nn
from toys import classification, make_job, schema

from sparkdl.strategies import ParameterAveraging, ThresholdGradientSharing
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(__import__(__name__))


class Quadratic(nn.Module):
    """x of 1,000 numbers, of which the rows' gradient moves the first ``moving`` by 1 each step."""

    def __init__(self, moving: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1000))
        self.moving = moving

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        total = -self.x[: self.moving].sum().float() + 0 * self.x.sum()
        return total.expand(len(features), 3)


def total_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0].mean()


@every(
    ("moving", "up", "down"),
    [
        (0, 8, 8),
        (10, 8 + 4 * 10, 8 + 4 * 10),
        (62, 8 + 4 * 62, 8 + 4 * 62),
        (63, 8 + 2 * 125, 8 + 2 * 125),
        (1000, 8 + 2 * 125, 8 + 2 * 125),
    ],
)
def test_the_driver_receives_and_sends_what_the_formula_says(
    moving: int, up: int, down: int, traffic: Counter[str]
) -> None:
    """Every entry that moves does so by the learning rate, which is the threshold."""
    traffic.clear()
    steps, workers = 4, 2
    strategy = ThresholdGradientSharing(2**-5, sparsity=None)
    given = make_job(
        Quadratic(moving),
        strategy=strategy,
        loss=total_of,
        optimizer=partial(torch.optim.SGD, lr=2**-5),
        schema=schema(dtype=torch.float32),
        epochs=2,
    )
    data = classification([4 * steps] * workers, dtype=np.float32)
    outcome = run_world(given, data.shards(), ranks_as="processes")
    expected = torch.zeros(1000)
    expected[:moving] = 2 * steps * 2**-5
    assert torch.equal(outcome.module.x.detach(), expected)
    whole = 4 * 1000
    assert traffic["in"] == 2 * steps * workers * up
    # The center at the start, and at the end of each epoch in place of what has changed.
    assert traffic["out"] == workers * (whole + 2 * ((steps - 1) * down + whole))


def test_executors_send_each_other_the_same_messages() -> None:
    """Counted where they are handed to torch, in the process of rank 0."""
    steps, moving = 4, 10
    counter = CountsGathered(Quadratic(moving))
    given = make_job(
        counter,
        strategy=ThresholdGradientSharing(2**-5, sparsity=None, aggregation="executors"),
        loss=total_of,
        optimizer=partial(torch.optim.SGD, lr=2**-5),
        schema=schema(dtype=torch.float32),
        epochs=2,
    )
    data = classification([4 * steps] * 2, dtype=np.float32)
    outcome = run_world(given, data.shards(), ranks_as="processes")
    lengths, messages = 8, 8 + 4 * moving
    # The count itself is a buffer, of 8 bytes, as integers are; it has every gather but the last,
    # which comes after the last step.
    expected = (2 * steps - 1) * (2 * lengths + messages + 8)
    assert int(outcome.module.octets) == expected


class CountsGathered(nn.Module):
    """Counts in a buffer what its process has given to all others."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("octets", torch.zeros((), dtype=torch.int64))
        self.total = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        from sparkdl.collective import Collective

        if not hasattr(Collective, "counted_by"):
            gather = Collective.all_gather

            def counting(collective: Collective, tensor: torch.Tensor) -> list[torch.Tensor]:
                Collective.counted_by.total += tensor.nbytes  # type: ignore[attr-defined]
                return gather(collective, tensor)

            Collective.all_gather = counting  # type: ignore[method-assign]
        Collective.counted_by = self  # type: ignore[attr-defined]
        self.octets.fill_(self.total)
        return self.net(features)


def test_it_learns_what_all_reduce_learns_with_a_fraction_of_the_bytes(
    traffic: Counter[str],
) -> None:
    data = classification([200, 200], dtype=np.float32, width=64)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 3))
    settings = {"schema": schema(64, torch.float32), "epochs": 5, "batch_size": 20}
    losses, octets = [], []
    for strategy in (ParameterAveraging(1), ThresholdGradientSharing(1e-3, sparsity=(1e-4, 2e-2))):
        traffic.clear()
        torch.manual_seed(0)
        outcome = run_world(
            make_job(copy.deepcopy(model), strategy=strategy, **settings),
            data.shards(),
            ranks_as="processes",
        )
        losses.append(outcome.history[-1].loss)
        octets.append(traffic["in"])
    assert losses[1] < 1.5 * losses[0] < 0.5
    assert octets[1] < 0.1 * octets[0]
