"""All-reduced gradients equal single-process training on the union of the workers' minibatches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from torch import nn
from toys import Data, batches_by_hand, classification, cnn, make_job, mlp, relative_error, schema

from sparkdl.driver import Outcome
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, PowerSGD, Strategy
from sparkdl.testing import run_world

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": partial(torch.optim.Adam, lr=0.02),
}


def train_on_union(
    model: nn.Module,
    optimizer: Any,
    data: Data,
    *,
    epochs: int,
    batch_size: int,
    accumulate: int = 1,
    clip_norm: float = float("inf"),
    backward: Callable[[nn.Module, list[tuple[Any, Any]]], None] | None = None,
) -> nn.Module:
    """One process; step t trains on the ranks' t-th ``accumulate`` minibatches put together."""
    module = copy.deepcopy(model).train()
    steps = optimizer(module.parameters())
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(data, rank, epoch, batch_size) for rank in range(len(data.sizes))]
        for start in range(0, max(map(len, plans)), accumulate):
            parts = [part for plan in plans for part in plan[start : start + accumulate]]
            steps.zero_grad()
            (backward or of_the_union)(module, parts)
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
            steps.step()
    return module


def of_the_union(module: nn.Module, parts: list[tuple[Any, Any]]) -> None:
    """Add the gradients of the mean loss of all parts' rows."""
    features = torch.from_numpy(np.concatenate([features for features, _ in parts]))
    targets = torch.from_numpy(np.concatenate([targets for _, targets in parts]))
    nn.functional.cross_entropy(module(features), targets).backward()


def part_by_part(module: nn.Module, parts: list[tuple[Any, Any]]) -> None:
    """Add the same, each part by itself, as bfloat16 rounds the sum over a part's rows."""
    total = sum(len(targets) for _, targets in parts)
    for features, targets in parts:
        loss = nn.functional.cross_entropy(
            module(torch.from_numpy(features)), torch.from_numpy(targets)
        )
        (loss * (len(targets) / total)).backward()


def all_reduce(data: Data, model: nn.Module, strategy: Strategy, **changes: Any) -> Outcome:
    job = make_job(model, strategy=strategy, **changes)
    return run_world(job, data.shards(), ranks_as="processes")


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize(
    "sizes",
    [[12, 12], [13, 6], [11, 0], [0, 9], [7, 12, 1]],
    ids=["equal", "unequal", "last-empty", "first-empty", "three"],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_shards_equal_one_process_on_the_union_batch(sizes: list[int], name: str) -> None:
    data = classification(sizes)

    outcome = all_reduce(data, mlp(), GradientAllReduce(), optimizer=OPTIMIZERS[name], epochs=3)

    oracle = train_on_union(mlp(), OPTIMIZERS[name], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-10
    assert [row.examples for row in outcome.history] == [sum(sizes)] * 3


@every("sizes", [[12, 12], [23, 5, 0]])
@every("accumulate", [2, 3])
def test_accumulated_minibatches_equal_one_larger_batch(sizes: list[int], accumulate: int) -> None:
    data = classification(sizes)
    strategy = GradientAllReduce(accumulate=accumulate)

    outcome = all_reduce(data, mlp(), strategy, optimizer=OPTIMIZERS["momentum"], epochs=3)

    oracle = train_on_union(
        mlp(), OPTIMIZERS["momentum"], data, epochs=3, batch_size=4, accumulate=accumulate
    )
    assert relative_error(outcome.module, oracle) <= 1e-10


def test_buckets_smaller_than_the_model_change_nothing() -> None:
    data = classification([9, 14], width=36)
    strategy = GradientAllReduce(bucket_mb=0.0001)

    outcome = all_reduce(data, cnn(), strategy, schema=schema(36), epochs=2)

    oracle = train_on_union(cnn(), partial(torch.optim.SGD, lr=0.1), data, epochs=2, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-10


@every(
    ("strategy", "error"),
    [
        (GradientAllReduce(), 1e-10),
        (GradientAllReduce(shard_optimizer=True), 1e-10),
        (GradientAllReduce(compression="bf16"), 3e-2),
        (GradientAllReduce(compression=PowerSGD(100, 0, 0)), 1e-9),
        (ParameterAveraging(period=1), 1e-10),
        (ParameterAveraging(period=1, aggregation="executors"), 1e-10),
    ],
)
def test_channels_last_changes_no_result_and_stays(strategy: Strategy, error: float) -> None:
    data = classification([9, 14], width=36)
    model = cnn().to(memory_format=torch.channels_last)

    outcome = all_reduce(data, model, strategy, schema=schema(36), epochs=2)

    oracle = train_on_union(cnn(), partial(torch.optim.SGD, lr=0.1), data, epochs=2, batch_size=4)
    assert relative_error(outcome.module, oracle) <= error
    strides = [parameter.stride() for parameter in outcome.module.parameters()]
    assert strides == [parameter.stride() for parameter in model.parameters()]


def test_float32_is_exact_to_its_precision() -> None:
    data = classification([21, 16], dtype=np.float32)

    outcome = all_reduce(
        data, mlp().float(), GradientAllReduce(), schema=schema(6, torch.float32), epochs=3
    )

    oracle = train_on_union(
        mlp().float(), partial(torch.optim.SGD, lr=0.1), data, epochs=3, batch_size=4
    )
    assert relative_error(outcome.module, oracle) <= 1e-6


@pytest.mark.slow_variants
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sharded_optimizer_changes_nothing(name: str) -> None:
    data = classification([13, 6])
    strategy = GradientAllReduce(shard_optimizer=True)

    outcome = all_reduce(data, mlp(), strategy, optimizer=OPTIMIZERS[name], epochs=3)

    oracle = train_on_union(mlp(), OPTIMIZERS[name], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-10


@every(("compression", "error"), [("fp16", 3e-3), ("bf16", 3e-2)])
def test_compressed_gradients_are_the_gradients_to_the_precision_that_was_sent(
    compression: Any, error: float
) -> None:
    data = classification([13, 6])
    job = partial(all_reduce, data, mlp(), epochs=3)

    compressed = job(GradientAllReduce(compression=compression)).module

    exact = job(GradientAllReduce()).module
    assert 0 < relative_error(compressed, exact) <= error


def test_power_sgd_learns_and_leaves_out_what_low_rank_factors_cannot_hold() -> None:
    data = classification([60, 60])
    job = partial(all_reduce, data, mlp(), epochs=8)

    compressed = job(GradientAllReduce(compression=PowerSGD(1, 10, 0)))

    exact = job(GradientAllReduce())
    assert relative_error(compressed.module, exact.module) > 0
    losses = [row.loss for row in compressed.history]
    assert losses[-1] < 0.8 * losses[0]


def test_the_history_holds_the_loss_over_all_rows() -> None:
    data = classification([13, 6, 0])

    outcome = all_reduce(
        data, mlp(), GradientAllReduce(), optimizer=partial(torch.optim.SGD, lr=0.0), epochs=1
    )

    outputs = mlp()(torch.from_numpy(data.features)).detach()
    loss = nn.functional.cross_entropy(outputs, torch.from_numpy(data.targets))
    assert outcome.history[0].loss == pytest.approx(float(loss), rel=1e-12)
    assert outcome.history[0].examples == 19


@every("sizes", [[8, 16], [0, 8]])
def test_batch_norm_statistics_are_averaged_by_examples(sizes: list[int]) -> None:
    torch.manual_seed(5)
    norm = nn.BatchNorm1d(6, momentum=None, affine=False).double()
    model = nn.Sequential(norm, nn.Linear(6, 3).double())
    data = classification(sizes)

    outcome = all_reduce(data, model, GradientAllReduce(), epochs=1)

    means = [
        np.mean(
            [features.mean(axis=0) for features, _ in batches_by_hand(data, rank, 1, 4)], axis=0
        )
        if size
        else np.zeros(6)
        for rank, size in enumerate(sizes)
    ]
    expected = np.average(means, axis=0, weights=sizes)
    found = outcome.module.get_buffer("0.running_mean").numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    counted = outcome.module.get_buffer("0.num_batches_tracked")
    assert counted == 2  # the steps of the first worker with rows
    assert counted.dtype is torch.int64


class HalfUsed(nn.Module):
    """Has a layer that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 3)
        self.double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.used(features)


@every(("sizes", "name"), [([9, 6], "momentum"), ([0, 13], "adam")])
def test_parameters_outside_the_loss_keep_their_values(sizes: list[int], name: str) -> None:
    data = classification(sizes)
    strategy = GradientAllReduce(find_unused_parameters=True, commit_every=1)

    outcome = all_reduce(data, HalfUsed(), strategy, optimizer=OPTIMIZERS[name], epochs=2)

    oracle = train_on_union(HalfUsed(), OPTIMIZERS[name], data, epochs=2, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-10
    assert torch.equal(outcome.module.unused.weight, HalfUsed().unused.weight)


class UsedLater(HalfUsed):
    """Its second layer takes part from the third minibatch on."""

    minibatches = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.minibatches += 1
        late = self.unused(features) if self.minibatches > 2 else 0.0
        return self.used(features) + late


@every("name", ["momentum", "adam"])
def test_a_first_gradient_that_comes_late_is_the_first_to_the_optimizer(name: str) -> None:
    data = classification([12, 12])
    strategy = GradientAllReduce(find_unused_parameters=True, commit_every=1)

    outcome = all_reduce(data, UsedLater(), strategy, optimizer=OPTIMIZERS[name], epochs=2)

    oracle = train_on_union(UsedLater(), OPTIMIZERS[name], data, epochs=2, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-10


def test_the_same_seed_and_data_give_the_same_bits() -> None:
    data = classification([13, 6, 9])
    job = partial(all_reduce, data, mlp(), GradientAllReduce(), epochs=2)

    first, second = (job().module.state_dict() for _ in range(2))

    assert all(torch.equal(first[key], second[key]) for key in first)


def test_one_worker_takes_the_same_path_alone() -> None:
    data = classification([23])
    outcome = all_reduce(data, mlp(), GradientAllReduce(), epochs=2)
    oracle = train_on_union(mlp(), partial(torch.optim.SGD, lr=0.1), data, epochs=2, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-12


@every("sharded", [False, True])
def test_the_norm_that_is_clipped_is_that_of_the_union_batch(sharded: bool) -> None:
    data = classification([13, 6])
    strategy = GradientAllReduce(shard_optimizer=sharded)

    outcome = all_reduce(data, mlp(), strategy, epochs=3, clip_norm=0.05)

    by_hand = partial(
        train_on_union, mlp(), partial(torch.optim.SGD, lr=0.1), data, epochs=3, batch_size=4
    )
    assert relative_error(outcome.module, by_hand(clip_norm=0.05)) <= 1e-10
    assert relative_error(outcome.module, by_hand()) > 1e-3


def test_autocast_to_bfloat16_is_that_of_one_process_on_each_ranks_minibatches() -> None:
    data = classification([20, 12], dtype=np.float32)
    settings: dict[str, Any] = {"schema": schema(6, torch.float32), "epochs": 3}

    rounded = all_reduce(
        data, mlp().float(), GradientAllReduce(), precision="bf16", **settings
    ).module

    exact = all_reduce(data, mlp().float(), GradientAllReduce(), **settings).module
    assert 1e-4 < relative_error(rounded, exact) < 5e-2
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        oracle = train_on_union(
            mlp().float(),
            partial(torch.optim.SGD, lr=0.1),
            data,
            epochs=3,
            batch_size=4,
            backward=part_by_part,
        )
    assert relative_error(rounded, oracle) <= 1e-6
