"""The encoding of thresholds, and its bytes."""

from __future__ import annotations

import copy
from collections import Counter
from fractions import Fraction as Exact
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import classification, make_job, schema

from sparkdl.strategies import ParameterAveraging, ThresholdGradientSharing
from sparkdl.strategies.threshold.threshold_encoding import DECAY, Encoding, ThresholdEncoder, short
from sparkdl.testing import run_world

SIZES = (70_001, 3)
"""More than one block, and less."""


def encoding(threshold: float = 0.25, **changes: Any) -> Encoding:
    return Encoding(
        **{"threshold": threshold, "sparsity": None, "clip": None, "shake_every": None, **changes}
    )


def changes(
    seed: int, dtype: torch.dtype = torch.float32, scale: float = 0.2
) -> list[torch.Tensor]:
    generator = np.random.default_rng(seed)
    return [torch.from_numpy(generator.normal(scale=scale, size=n)).to(dtype) for n in SIZES]


def sent(encoder: ThresholdEncoder, produced: list[torch.Tensor]) -> list[torch.Tensor]:
    zero = [torch.zeros_like(values) for values in produced]
    encoder.encode(produced, zero, zero)
    return zero


@every("dtype", [torch.float32, torch.float64])
def test_a_message_is_the_rule_in_numpy(dtype: torch.dtype) -> None:
    encoder = ThresholdEncoder(encoding(), changes(0, dtype))
    residuals = [np.zeros(n, changes(0, dtype)[0].numpy().dtype) for n in SIZES]
    for seed in range(4):
        shares = sent(encoder, changes(seed, dtype))
        for index, change in enumerate(changes(seed, dtype)):
            total = residuals[index] + change.numpy()
            expected = np.sign(total) * (np.abs(total) >= 0.25) * 0.25
            residuals[index] = total - expected.astype(total.dtype)
            np.testing.assert_array_equal(shares[index].numpy(), expected)
            np.testing.assert_array_equal(encoder.residuals[index].numpy(), residuals[index])


@settings(max_examples=60, deadline=None)
@given(
    threshold=st.floats(1e-6, 10),
    numbers=st.lists(
        st.lists(st.integers(-(2**12), 2**12), min_size=3, max_size=3), min_size=1, max_size=12
    ),
    grid=st.integers(-12, 0),
    shake_every=st.sampled_from([None, 2]),
)
def test_sent_and_residual_are_what_was_produced_exactly(
    threshold: float, numbers: list[list[int]], grid: int, shake_every: int | None
) -> None:
    """Exactly: changes on a grid, so that their sum has no rounding of its own."""
    encoder = ThresholdEncoder(
        encoding(threshold, shake_every=shake_every), [torch.zeros(3, dtype=torch.float64)]
    )
    total_sent = np.zeros(3, object)
    total_produced = np.zeros(3, object)
    for row in numbers:
        produced = torch.tensor(row, dtype=torch.float64) * 2.0**grid
        (share,) = sent(encoder, [produced])
        total_sent += [Exact(value) for value in share.tolist()]
        total_produced += [Exact(value) for value in produced.tolist()]
    (residual,) = encoder.residuals
    left = np.array([Exact(value) for value in residual.tolist()], object)
    assert (total_sent + left == total_produced).all()


@settings(max_examples=100, deadline=None)
@given(
    threshold=st.floats(1e-8, 1e3),
    times=st.lists(st.floats(-60_000, 60_000), min_size=1, max_size=20),
)
def test_taking_a_threshold_away_rounds_nothing_in_float32(
    threshold: float, times: list[float]
) -> None:
    produced = torch.tensor([each * threshold for each in times], dtype=torch.float32)
    encoder = ThresholdEncoder(encoding(threshold), [produced])
    (share,) = sent(encoder, [produced])
    (residual,) = encoder.residuals
    assert torch.equal(share.double() + residual.double(), produced.double())


def test_a_large_change_is_sent_more_than_once() -> None:
    encoder = ThresholdEncoder(encoding(), [torch.zeros(2)])
    total = torch.zeros(2)
    for window in range(8):
        (share,) = sent(encoder, [torch.tensor([1.6, -0.1]) if window == 0 else torch.zeros(2)])
        total += share
    assert total.tolist() == [1.5, 0.0]
    assert encoder.residuals[0].tolist() == pytest.approx([0.1, -0.1])


def test_the_threshold_goes_to_where_the_sparsity_is_between_the_two() -> None:
    """Of normal changes with deviation 1: the quantile says which threshold that is."""
    for first in (1e-2, 30.0):
        encoder = ThresholdEncoder(
            encoding(first, sparsity=(0.001, 0.01), clip=5.0), [torch.zeros(50_000)]
        )
        generator = torch.Generator().manual_seed(0)
        parts = []
        for _ in range(400):
            before = encoder.threshold
            (share,) = sent(encoder, [torch.randn(50_000, generator=generator)])
            parts.append(int(share.count_nonzero()) / 50_000)
            factor = encoder.threshold / before
            wanted = DECAY if parts[-1] < 0.001 else 1 / DECAY if parts[-1] > 0.01 else 1
            assert factor == pytest.approx(wanted, rel=2**-8)
        assert 0.001 <= np.mean(parts[-100:]) <= 0.01


def test_every_third_message_shakes_the_residual_up() -> None:
    encoder = ThresholdEncoder(encoding(shake_every=3), changes(0))
    sizes = [sent(encoder, changes(seed))[0].abs().max().item() for seed in range(1, 7)]
    third = short(0.25 / 3)
    assert sizes == [0.25, 0.25, third, 0.25, 0.25, third]
    assert encoder.threshold == 0.25


def test_every_fifth_message_clips_the_residual() -> None:
    encoder = ThresholdEncoder(encoding(clip=2.0), [torch.zeros(1)])
    left = []
    for _ in range(6):
        sent(encoder, [torch.tensor([1.0])])
        left.append(encoder.residuals[0].item())
    assert left == [0.75, 1.5, 2.25, 3.0, 0.5, 1.25]


def test_without_a_threshold_everything_is_sent() -> None:
    encoder = ThresholdEncoder(encoding(0.0), changes(0))
    produced = changes(1)
    assert all(map(torch.equal, sent(encoder, produced), produced))
    assert not any(residual.any() for residual in encoder.residuals)


def test_what_was_saved_goes_on_in_the_same_bits() -> None:
    given_to_both = encoding(0.1, sparsity=(0.01, 0.1), clip=5.0, shake_every=4)
    whole = ThresholdEncoder(given_to_both, changes(0))
    for seed in range(7):
        sent(whole, changes(seed))
    saved = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in whole.saved().items()
    }
    resumed = ThresholdEncoder(given_to_both, changes(0))
    resumed.restore(saved)
    for seed in range(7, 12):
        both = zip(sent(whole, changes(seed)), sent(resumed, changes(seed)), strict=True)
        assert all(torch.equal(mine, other) for mine, other in both)
    assert resumed.threshold == whole.threshold


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
