"""Averaging in windows of several steps equals the algorithm written out by hand."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import (
    average_by_hand,
    classification,
    enough_rows,
    make_job,
    mlp,
    relative_error,
)

from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": partial(torch.optim.Adam, lr=0.02),
    "adamw": partial(torch.optim.AdamW, lr=0.02),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


@every("averaged", [True, False])
@every("name", OPTIMIZERS)
def test_averaging_with_tails_equals_the_algorithm_by_hand(name: str, averaged: bool) -> None:
    data = classification([31, 18, 26])  # 8, 5 and 7 batches of 4: tails of 2, 2 and 1 steps
    optimizer = OPTIMIZERS[name]
    strategy = ParameterAveraging(period=3, average_optimizer_state=averaged)

    outcome = run_world(
        make_job(mlp(), optimizer=optimizer, strategy=strategy, epochs=3), data.shards()
    )

    oracle = average_by_hand(
        mlp(), optimizer, data, period=3, epochs=3, batch_size=4, average_optimizer_state=averaged
    )
    assert relative_error(outcome.module, oracle) <= 1e-9


def test_averaging_optimizer_state_is_not_the_same_as_keeping_it() -> None:
    """Guards the tests above: if the two oracles agreed, they would prove nothing."""
    data = classification([31, 18, 26])
    by_hand = partial(
        average_by_hand, mlp(), OPTIMIZERS["momentum"], data, period=3, epochs=3, batch_size=4
    )
    averaged = by_hand(average_optimizer_state=True)
    kept = by_hand(average_optimizer_state=False)
    assert relative_error(averaged, kept) > 1e-4


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(enough_rows),
    period=st.integers(1, 5),
    batch_size=st.integers(1, 8),
    averaged=st.booleans(),
)
def test_any_shards_and_period_equal_the_algorithm_by_hand(
    sizes: list[int], period: int, batch_size: int, averaged: bool
) -> None:
    data = classification(sizes)
    optimizer = OPTIMIZERS["momentum"]
    strategy = ParameterAveraging(period=period, average_optimizer_state=averaged)

    outcome = run_world(
        make_job(mlp(), optimizer=optimizer, strategy=strategy, epochs=2, batch_size=batch_size),
        data.shards(),
    )

    oracle = average_by_hand(
        mlp(),
        optimizer,
        data,
        period=period,
        epochs=2,
        batch_size=batch_size,
        average_optimizer_state=averaged,
    )
    assert relative_error(outcome.module, oracle) <= 1e-9


def test_batch_norm_statistics_are_averaged_and_its_counter_is_carried() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    data = classification([32, 16])

    outcome = run_world(
        make_job(model, strategy=ParameterAveraging(period=2), epochs=2), data.shards()
    )

    oracle = average_by_hand(
        copy.deepcopy(model),
        partial(torch.optim.SGD, lr=0.1),
        data,
        period=2,
        epochs=2,
        batch_size=4,
        average_optimizer_state=True,
    )
    assert relative_error(outcome.module, oracle) <= 1e-10
    counted = outcome.module.get_buffer("1.num_batches_tracked")
    assert counted.dtype is torch.int64
    assert counted == oracle.get_buffer("1.num_batches_tracked") == 16


@pytest.mark.nightly
def test_ranks_as_processes_give_the_same_bits_as_ranks_as_threads() -> None:
    data = classification([13, 9])
    job = make_job(mlp(), strategy=ParameterAveraging(period=2), epochs=2)

    threads = run_world(job, data.shards()).module.state_dict()
    processes = run_world(job, data.shards(), ranks_as="processes").module.state_dict()

    assert all(torch.equal(threads[key], processes[key]) for key in threads)
