"""Top-k against numpy, all-reduced gradients, a formula of bytes, and lost workers."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import trainings
from every_row import every
from members import of_all, steps_of
from torch import Tensor, nn
from toys import classification, schema
from trainings import MOMENTUM

from sparkdl.strategies import GradientAllReduce, TopK
from sparkdl.strategies.compression import top_k
from sparkdl.strategies.compression.top_k import place_dtype
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [40, 33]
DATA = classification(SIZES)
STRATEGY = GradientAllReduce(compression=TopK(0.1, start_after=2), commit_every=6)


job = partial(trainings.job, strategy=STRATEGY, optimizer=MOMENTUM)


SHAPES: dict[int, tuple[int, ...]] = {0: (12, 9), 1: (7,), 4: (), 6: (3, 2, 3, 3)}


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[int, Tensor]:
    generator = np.random.default_rng([rank, step])
    return {
        place: torch.as_tensor(generator.normal(size=shape)).to(dtype)
        for place, shape in SHAPES.items()
    }


def by_hand(fraction: float, workers: int, steps: int) -> list[dict[int, np.ndarray]]:
    """What the workers agree on in each step, in numpy, by sorting."""
    errors = [{place: np.zeros(shape, np.float32) for place, shape in SHAPES.items()}] * workers
    agreed = []
    for step in range(steps):
        sums = {place: np.zeros(shape, np.float32) for place, shape in SHAPES.items()}
        for rank in range(workers):
            left = {}
            for place, gradient in gradients(rank, step).items():
                whole = gradient.numpy() + errors[rank][place]
                count = -(-round(fraction * whole.size * 1000) // 1000)
                least = np.sort(np.abs(whole), axis=None)[-count]
                sent = np.where(np.abs(whole) >= least, whole, np.float32(0))
                left[place] = whole - sent
                sums[place] = sums[place] + sent
            errors = [*errors[:rank], left, *errors[rank + 1 :]]
        agreed.append({place: total / np.float32(workers) for place, total in sums.items()})
    return agreed


@every("fraction", [0.001, 0.1, 0.5, 1.0])
def test_it_is_the_rule_in_numpy_to_the_bit(fraction: float) -> None:
    ranks = of_all(3, lambda member: steps_of(member, gradients, TopK(fraction), 4))
    for number, expected in enumerate(by_hand(fraction, 3, 4)):
        for steps in ranks:
            for place, agreed in steps[number][1].items():
                np.testing.assert_array_equal(agreed.numpy(), expected[place])


@every("fraction", [0.01, 0.3])
def test_what_was_sent_and_what_is_left_are_what_was_to_be_sent_to_the_bit(fraction: float) -> None:
    """Of one worker, what all agree on is what it has sent."""
    (steps,) = of_all(1, lambda one: steps_of(one, gradients, TopK(fraction), 5))
    for asked, sent, errors in steps:
        for place, error in errors.items():
            left = error.view_as(sent[place])
            assert torch.equal(sent[place] + left, asked[place])
            assert not (sent[place] * left).any()
            assert int((sent[place] != 0).sum()) == TopK(fraction).entries(left.numel())


def test_all_entries_are_the_mean_of_all_gradients_and_nothing_is_left() -> None:
    for number, step in enumerate(
        zip(*of_all(2, lambda member: steps_of(member, gradients, TopK(1), 3)), strict=True)
    ):
        for _, agreed, errors in step:
            for place, values in agreed.items():
                mean = (gradients(0, number)[place] + gradients(1, number)[place]) / 2
                assert torch.equal(values, mean)
                assert not errors[place].any()


@every(
    ("entries", "dtype"),
    [
        ([], torch.int32),
        ([3, 2**31], torch.int32),
        ([3, 2**31 + 1], torch.int64),
        ([2**31 + 1, 3], torch.int64),
    ],
)
def test_places_are_sent_in_numbers_that_reach_the_largest_parameters_end(
    entries: list[int], dtype: torch.dtype
) -> None:
    assert place_dtype(entries) is dtype


def test_places_of_64_bits_stand_for_the_same_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k, "place_dtype", lambda entries: torch.int64)
    ranks = of_all(2, lambda member: steps_of(member, gradients, TopK(0.1), 2))
    for number, expected in enumerate(by_hand(0.1, 2, 2)):
        for steps in ranks:
            for place, agreed in steps[number][1].items():
                np.testing.assert_array_equal(agreed.numpy(), expected[place])


def test_half_precision_keeps_its_errors_in_float32() -> None:
    def body(member: Any) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        compressor = TopK(0.2).compressor(member, None)
        given = gradients(0, 0, torch.bfloat16)
        compressor.average(given)
        return given, compressor.errors

    given, errors = of_all(2, body)[0]
    for place, error in errors.items():
        assert error.dtype is torch.float32
        assert given[place].dtype is torch.bfloat16
        whole = gradients(0, 0, torch.bfloat16)[place].float()
        assert torch.equal(given[place].float() + error.view_as(whole), whole)


@every(("dtype", "octets"), [(torch.float32, 4), (torch.float64, 8)])
def test_each_step_sends_what_the_formula_says(
    dtype: torch.dtype, octets: int, sent: list[tuple[str, torch.dtype, int]]
) -> None:
    """Where entries are, and what, for each bucket."""
    sent.clear()
    model = nn.Sequential(nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)
    steps, fraction = 7, 0.03
    given = job(
        model,
        strategy=GradientAllReduce(compression=TopK(fraction, start_after=3)),
        schema=schema(60, dtype),
        epochs=1,
    )
    rows = classification([4 * steps], width=60, dtype=torch.zeros(0, dtype=dtype).numpy().dtype)
    run_world(given, rows.shards())
    entries = 72 + 2 + 4 + 1  # of 2400, 40, 120 and 3
    assert [(name, count) for name, _, count in sent] == [
        *[("all_reduce", octets * (2400 + 40 + 120 + 3))] * 3,
        *[("all_gather", 4 * entries), ("all_gather", octets * entries)] * 4,
    ]
