"""BatchNorm over all workers equals one process's BatchNorm on the union of their minibatches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from every_row import every
from test_all_reduce import OPTIMIZERS, all_reduce, train_on_union
from torch import nn
from toys import classification, mlp, relative_error, schema

from sparkdl.errors import WorkerError
from sparkdl.strategies import GradientAllReduce

STRATEGY = GradientAllReduce(sync_batch_norm=True)


def flat_network() -> nn.Module:
    """Two layers of normalization, the second without parameters and without running statistics."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 5, bias=False),
        nn.BatchNorm1d(5, affine=False, track_running_stats=False),
        nn.Linear(5, 3),
    ).double()


def image_network() -> nn.Module:
    """Images of 6 x 6; the running statistics are means over all steps."""
    torch.manual_seed(6)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 3),
    ).double()


@every("sizes", [[12, 12], [14, 6], [7, 12, 1]])
@every("name", ["sgd", "adam"])
def test_parameters_and_statistics_are_those_of_one_process(sizes: list[int], name: str) -> None:
    data = classification(sizes)

    outcome = all_reduce(data, flat_network(), STRATEGY, optimizer=OPTIMIZERS[name], epochs=3)

    oracle = train_on_union(flat_network(), OPTIMIZERS[name], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-9


def test_channels_of_images_are_normalized_over_all_places() -> None:
    data = classification([9, 14], width=36)

    outcome = all_reduce(data, image_network(), STRATEGY, schema=schema(36), epochs=2)

    oracle = train_on_union(
        image_network(), partial(torch.optim.SGD, lr=0.1), data, epochs=2, batch_size=4
    )
    assert relative_error(outcome.module, oracle) <= 1e-9


def test_without_it_workers_normalize_alone() -> None:
    data = classification([12, 12])
    alone = all_reduce(data, flat_network(), GradientAllReduce()).module
    together = all_reduce(data, flat_network(), STRATEGY).module
    assert relative_error(alone, together) > 1e-3


def test_workers_accumulate_different_numbers_of_minibatches() -> None:
    strategy = GradientAllReduce(sync_batch_norm=True, accumulate=3)
    outcome = all_reduce(classification([23, 5]), flat_network(), strategy, epochs=2)
    assert [epoch.examples for epoch in outcome.history] == [28, 28]


@every(
    ("sizes", "model", "message"),
    [
        ([8, 0], flat_network, "rank 1.*no rows left before its first step"),
        ([8, 8], mlp, "Sequential has no BatchNorm layer"),
        ([1], flat_network, "1 value per channel across all workers"),
    ],
)
def test_what_cannot_be_normalized_is_refused(sizes: list[int], model: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        all_reduce(classification(sizes), model(), STRATEGY)
