"""Weights and held-out rows over several workers, against one process of plain torch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from every_row import every
from torch import nn
from toys import (
    SEED,
    classification,
    make_job,
    mlp,
    permutation,
    relative_error,
    schema,
)

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.testing import batches_of, run_world

WEIGHT = ColumnSpec("weight", torch.float32)
HELD = ColumnSpec("held", torch.bool)


def weighted_schema(*, held: bool = False) -> FeedSchema:
    plain = schema()
    return FeedSchema(plain.features, plain.label, WEIGHT, HELD if held else None)


def by_hand(
    model: nn.Module, data: Any, weights: np.ndarray, *, epochs: int, batch_size: int
) -> nn.Module:
    """SGD on the union of the ranks' minibatches: sum_i w_i l_i / n, the mean of all w being 1."""
    module = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaled = torch.from_numpy(weights / weights.mean())
    starts = np.cumsum([0, *data.sizes])
    for epoch in range(1, epochs + 1):
        orders = [
            start + permutation(size, seed=SEED, epoch=epoch, rank=rank).numpy()
            for rank, (start, size) in enumerate(zip(starts[:-1], data.sizes, strict=True))
        ]
        for first in range(0, max(data.sizes), batch_size):
            chosen = np.concatenate([order[first : first + batch_size] for order in orders])
            optimizer.zero_grad()
            outputs = module(torch.from_numpy(data.features[chosen]))
            targets = torch.from_numpy(data.targets[chosen])
            rows = functional.cross_entropy(outputs, targets, reduction="none")
            (rows * scaled[chosen]).mean().backward()
            optimizer.step()
    return module


def shards(data: Any, **more: np.ndarray) -> list[Any]:
    starts = np.cumsum([0, *data.sizes])
    result = []
    for rank, (start, size) in enumerate(zip(starts[:-1], data.sizes, strict=True)):
        features, targets = data.shard(rank)
        columns = {name: values[start : start + size] for name, values in more.items()}
        result.append(batches_of(5, features=features, label=targets, **columns) if size else [])
    return result


@every("sizes", [[24], [12, 12], [15, 7, 2]])
@every("unit", [1.0, 1000.0])
def test_weighted_rows_train_as_in_one_process_whatever_the_weights_unit(
    sizes: list[int], unit: float
) -> None:
    data = classification(sizes)
    weights = np.random.default_rng(3).integers(0, 5, sum(sizes)).astype(np.float64) * unit
    job = make_job(mlp(), schema=weighted_schema(), epochs=3)
    outcome = run_world(job, shards(data, weight=weights))
    expected = by_hand(mlp(), data, weights, epochs=3, batch_size=4)
    assert relative_error(outcome.module, expected) <= 1e-6


def test_the_loss_of_held_out_rows_is_in_the_history_of_every_epoch() -> None:
    data = classification([20, 9, 6])
    generator = np.random.default_rng(4)
    weights = generator.integers(1, 5, 35).astype(np.float64)
    held = generator.random(35) < 0.4
    job = make_job(mlp(), schema=weighted_schema(held=True), epochs=2)
    outcome = run_world(job, shards(data, weight=weights, held=held))

    assert [epoch.examples for epoch in outcome.history] == [int((~held).sum())] * 2
    assert [epoch.validation_examples for epoch in outcome.history] == [int(held.sum())] * 2
    with torch.no_grad():
        outputs = outcome.module(torch.from_numpy(data.features[held]))
        targets = torch.from_numpy(data.targets[held])
        rows = functional.cross_entropy(outputs, targets, reduction="none").numpy()
    expected = np.average(rows, weights=weights[held])
    assert outcome.history[-1].validation_loss == pytest.approx(expected, rel=1e-6)


def test_rows_that_are_held_out_change_nothing_but_the_history() -> None:
    data = classification([14, 8])
    held = np.zeros(22, dtype=bool)
    held[[1, 5, 15, 21]] = True
    plain = schema()
    with_held = make_job(
        mlp(), schema=FeedSchema(plain.features, plain.label, validation=HELD), epochs=2
    )
    kept = type(data)(data.features[~held], data.targets[~held], (12, 6))
    first = run_world(with_held, shards(data, held=held))
    second = run_world(make_job(mlp(), epochs=2), kept.shards())
    mine, other = first.module.state_dict(), second.module.state_dict()
    assert all(torch.equal(mine[key], other[key]) for key in other)
    assert second.history[0].validation_loss is None
