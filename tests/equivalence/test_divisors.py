"""Losses that divide by something else than rows."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from every_row import every
from torch import Tensor, nn
from toys import (
    Data,
    batches_by_hand,
    classification,
    make_job,
    mlp,
    relative_error,
    schema,
    sgd_on_union,
)

from sparkdl.replica.losses import ModelLoss
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import run_world

WEIGHT = torch.tensor([1.0, 20.0, 0.5], dtype=torch.float64)
WEIGHTED = nn.CrossEntropyLoss(weight=WEIGHT)


def pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What ``WEIGHTED`` divides, and what it divides it by."""
    counts = WEIGHT[targets.clamp(min=0)] * (targets != -100)
    rows = functional.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (rows * counts).sum(), counts.sum()


def some_ignored(sizes: list[int]) -> Data:
    """Of every worker's rows a part does not count; of the second's first eight, none does."""
    data = classification(sizes)
    targets = data.targets.copy()
    targets[::5] = -100
    targets[sizes[0] : sizes[0] + 8] = -100
    return Data(data.features, targets, data.sizes)


def in_one_process(data: Data, *, epochs: int, minibatches: int = 1) -> tuple[nn.Module, float]:
    """SGD on the union of the ranks' minibatches; with the last epoch's loss over all labels."""
    module = copy.deepcopy(mlp()).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(data, rank, epoch, 4) for rank in range(len(data.sizes))]
        total = counted = 0.0
        for start in range(0, max(map(len, plans)), minibatches):
            parts = [part for plan in plans for part in plan[start : start + minibatches]]
            features, targets = map(np.concatenate, zip(*parts, strict=True))
            optimizer.zero_grad()
            labels = torch.from_numpy(targets)
            if not (labels != -100).any():
                continue
            loss = WEIGHTED(module(torch.from_numpy(features)), labels)
            loss.backward()
            optimizer.step()
            divisor = WEIGHT[labels[labels != -100]].sum().item()
            total, counted = total + divisor * loss.item(), counted + divisor
    return module, total / counted


AMONG_WORKERS: list[Strategy[Any]] = [
    GradientAllReduce(),
    GradientAllReduce(accumulate=2),
    GradientAllReduce(bucket_mb=0.0001),
    ParameterAveraging(period=1, aggregation="executors"),
    ParameterAveraging(period=1, aggregation="hierarchical"),
]


@every("loss", [WEIGHTED, pair])
@every("sizes", [[13, 19], [23]])
def test_averaging_equals_one_process_whatever_labels_count(sizes: list[int], loss: Any) -> None:
    data = some_ignored(sizes)
    outcome = run_world(make_job(mlp(), loss=loss, epochs=3), data.shards())
    oracle, value = in_one_process(data, epochs=3)
    assert relative_error(outcome.module, oracle) <= 1e-9
    assert outcome.history[-1].loss == pytest.approx(value, rel=1e-9)
    assert [row.examples for row in outcome.history] == [sum(sizes)] * 3


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("loss", [WEIGHTED, pair], ids=["torch's", "a pair"])
@pytest.mark.parametrize("strategy", AMONG_WORKERS, ids=repr)
def test_workers_among_themselves_equal_one_process_whatever_labels_count(
    strategy: Any, loss: Any
) -> None:
    data = some_ignored([13, 19, 5])
    job = make_job(mlp(), loss=loss, epochs=2, strategy=strategy, deadline_s=120.0)
    outcome = run_world(job, data.shards(), ranks_as="processes", hosts=["a", "a", "b"])
    oracle, value = in_one_process(data, epochs=2, minibatches=getattr(strategy, "accumulate", 1))
    assert relative_error(outcome.module, oracle) <= 1e-9
    assert outcome.history[-1].loss == pytest.approx(value, rel=1e-9)


@every("optimizer", [partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_a_window_in_which_nothing_counts_goes_on_as_in_torch(optimizer: Any) -> None:
    data = classification([12])
    data.targets[:4] = -100
    order = np.concatenate([targets for _, targets in batches_by_hand(data, 0, 1, 4)])
    assert len(order) == 12
    job = make_job(mlp(), optimizer=optimizer, epochs=3, batch_size=1)
    outcome = run_world(job, data.shards())

    module = copy.deepcopy(mlp()).train()
    steps = optimizer(module.parameters())
    for epoch in range(1, 4):
        for features, targets in batches_by_hand(data, 0, epoch, 1):
            steps.zero_grad()
            loss = functional.cross_entropy(
                module(torch.from_numpy(features)), torch.from_numpy(targets), reduction="sum"
            )
            loss.backward()
            steps.step()
    assert relative_error(outcome.module, module) <= 1e-9
    assert np.isfinite(outcome.history[-1].loss)


class Own(nn.Module):
    """Its logits, or with labels also the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def forward(self, features: Tensor, *, kind: Tensor | None = None) -> Any:
        logits = self.layers(features)
        if kind is None:
            return logits
        return {"logits": logits, "loss": functional.cross_entropy(logits, kind)}


@every("strategy", [ParameterAveraging(period=1), GradientAllReduce()])
@every("as_kwargs", [False, True])
def test_the_loss_of_the_model_itself_equals_sgd_on_the_union_batch(
    strategy: Strategy[Any], as_kwargs: bool
) -> None:
    data = classification([12, 9])
    job = make_job(
        Own(),
        loss=ModelLoss(("kind",)),
        schema=replace(schema(), by_name=as_kwargs),
        features_as_kwargs=as_kwargs,
        strategy=strategy,
        epochs=3,
        deadline_s=120.0,
    )

    outcome = run_world(job, data.shards(), ranks_as="processes")

    oracle = sgd_on_union(Own(), data, lr=0.1, epochs=3, batch_size=4, dtype=torch.float64)
    assert relative_error(outcome.module, oracle) <= 1e-10
