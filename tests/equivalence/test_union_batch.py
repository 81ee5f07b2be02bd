"""However workers put their steps together, they train as one process on their minibatches' union.

The oracle of all is ``sgd_on_union`` of toys, in plain torch.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from every_row import every, every_row
from hypothesis import given, settings
from hypothesis import strategies as st
from misbehaving import die_after
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from toys import (
    SGD,
    Data,
    classification,
    cnn,
    enough_rows,
    make_job,
    mlp,
    relative_error,
    schema,
    sgd_on_union,
)

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Outcome
from sparkdl.feed.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import (
    ColorTrees,
    ElasticAveraging,
    GradientAllReduce,
    Hybrid,
    ParameterAveraging,
    Strategy,
)
from sparkdl.testing import batches_of, run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPTIMIZERS: dict[str, Any] = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": partial(torch.optim.Adam, lr=0.02),
}
ADAM = OPTIMIZERS["adam"]
ALL_OPTIMIZERS = {**OPTIMIZERS, "sgd": SGD}
RAGGED = [5, 9, 3, 2]
"""Rows of four workers, in minibatches of 4: some are smaller, and some workers run out."""


def hybrid(groups: Any = 1, layers: str = "*", **settings: Any) -> GradientAllReduce:
    return GradientAllReduce(hybrid=Hybrid(layers, groups), **settings)


ALL_REDUCE = GradientAllReduce()
SHARDED = GradientAllReduce(bucket_mb=0.0001, shard_parameters=True)
"""Of a few hundred bytes, so each layer is gathered by itself."""
SMALL = ColorTrees(2, 0.05)
"""Chunks of six numbers."""
TREES = GradientAllReduce(bucket_mb=0.0001, reduction=SMALL)
AVERAGING = ParameterAveraging(period=1)
ON_HOSTS = [ParameterAveraging(period=1, aggregation="hierarchical")]


def at_the_gate(*values: Any) -> Any:
    """A variant of what is shown daily, whose ranks are processes."""
    return pytest.param(*values, marks=pytest.mark.gate)


def trained(data: Data, model: Any, strategy: Strategy[Any], **changes: Any) -> Outcome:
    return of_shards(data.shards(), model, strategy, **changes)


def of_shards(shards: Any, model: Any, strategy: Strategy[Any], **changes: Any) -> Outcome:
    ranks_as: Any = "processes" if strategy.needs.collective else "threads"
    hosts = ["a", "a", "b"] if strategy in ON_HOSTS else None
    job = make_job(model, strategy=strategy, **changes)
    return run_world(job, shards, ranks_as=ranks_as, hosts=hosts)


@pytest.mark.nightly_variants(every=6)
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        *((ALL_REDUCE, sizes) for sizes in ([12, 12], [13, 6], [11, 0], [0, 9], [7, 12, 1])),
        (GradientAllReduce(shard_optimizer=True), [13, 6]),
        *((SHARDED, sizes) for sizes in ([12, 12], [13, 6], [7, 12, 1], RAGGED)),
        *((TREES, sizes) for sizes in ([7, 12, 1], [13, 6], [11], [5, 9, 0, 2])),
        *((hybrid(groups), RAGGED) for groups in (1, 2, 4, "auto")),
        *((hybrid(1), sizes) for sizes in ([13], [13, 6], [0, 9])),
        (hybrid(2), [13, 6]),
        (hybrid(2), [9, 4, 0, 0]),  # a group that has no rows at all
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_shards_equal_one_process(strategy: Any, sizes: list[int], name: str) -> None:
    data = classification(sizes)
    outcome = trained(data, mlp(), strategy, optimizer=OPTIMIZERS[name], epochs=3)
    oracle = sgd_on_union(mlp(), data, OPTIMIZERS[name], epochs=3)
    assert relative_error(outcome.module, oracle) <= (1e-9 if strategy.hybrid else 1e-10)
    assert [row.examples for row in outcome.history] == [sum(sizes)] * 3


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 17), min_size=1, max_size=4).filter(enough_rows),
    batch_size=st.integers(1, 9),
    rows_a_batch=st.integers(1, 9),
)
def test_averages_in_every_step_equal_one_process_whatever_the_shards(
    sizes: list[int], batch_size: int, rows_a_batch: int
) -> None:
    data = classification(sizes)
    job = make_job(mlp(), epochs=2, batch_size=batch_size)
    outcome = run_world(job, data.shards(rows_a_batch))
    oracle = sgd_on_union(mlp(), data, epochs=2, batch_size=batch_size)
    assert relative_error(outcome.module, oracle) <= 1e-10
    assert [row.examples for row in outcome.history] == [sum(sizes)] * 2


@pytest.mark.parametrize(
    ("strategy", "sizes", "build", "name", "accumulate", "within"),
    [
        (AVERAGING, [23], mlp, "sgd", 1, 1e-12),
        (AVERAGING, [9, 14], cnn, "sgd", 1, 1e-10),
        (ALL_REDUCE, [23], mlp, "sgd", 1, 1e-12),
        (ALL_REDUCE, [23, 5, 0], mlp, "momentum", 3, 1e-10),
        at_the_gate(SHARDED, [23, 5, 2], mlp, "momentum", 3, 1e-10),
        at_the_gate(hybrid(2), [23, 5, 2, 8], mlp, "momentum", 2, 1e-9),
    ],
)
def test_one_worker_images_and_accumulated_minibatches_equal_one_process(
    strategy: Any, sizes: list[int], build: Any, name: str, accumulate: int, within: float
) -> None:
    width = 36 if build is cnn else 6
    data, optimizer = classification(sizes, width=width), ALL_OPTIMIZERS[name]
    if accumulate > 1:
        strategy = replace(strategy, accumulate=accumulate)
    columns = schema(width)
    outcome = trained(data, build(), strategy, optimizer=optimizer, schema=columns, epochs=3)
    oracle = sgd_on_union(build(), data, optimizer, epochs=3, accumulate=accumulate)
    assert relative_error(outcome.module, oracle) <= within


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        (ALL_REDUCE, [13, 6]),
        at_the_gate(GradientAllReduce(shard_optimizer=True), [13, 6]),
        (SHARDED, [13, 6]),
        at_the_gate(hybrid(2, "0"), RAGGED),
    ],
)
def test_the_norm_that_is_clipped_is_that_of_the_union_batch(
    strategy: Any, sizes: list[int]
) -> None:
    data = classification(sizes)
    outcome = trained(data, mlp(), strategy, epochs=3, clip_norm=0.05)
    oracle = partial(sgd_on_union, mlp(), data, epochs=3)
    within = 1e-9 if strategy.hybrid else 1e-10
    assert relative_error(outcome.module, oracle(clip_norm=0.05)) <= within
    assert relative_error(outcome.module, oracle()) > 1e-3


@pytest.mark.parametrize(
    ("strategy", "sizes", "within"),
    [
        (AVERAGING, [21, 16, 8, 3], 1e-5),
        (ALL_REDUCE, [21, 16], 1e-6),
        at_the_gate(SHARDED, [21, 16], 1e-6),
        at_the_gate(hybrid(2), [21, 16, 8, 3], 1e-6),
    ],
)
def test_float32_is_exact_to_its_precision(strategy: Any, sizes: list[int], within: float) -> None:
    data = classification(sizes, width=36, dtype=np.float32)
    columns = schema(36, torch.float32)
    outcome = trained(data, cnn().float(), strategy, schema=columns, epochs=3)
    oracle = sgd_on_union(cnn().float(), data, epochs=3)
    assert relative_error(outcome.module, oracle) <= within


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [(ALL_REDUCE, [20, 12]), at_the_gate(SHARDED, [20, 12]), at_the_gate(hybrid(1), [20, 12, 3])],
)
def test_autocast_to_bfloat16_is_that_of_one_process_on_each_ranks_minibatches(
    strategy: Any, sizes: list[int]
) -> None:
    """Layers that several workers compute together round other sums."""
    data = classification(sizes, dtype=np.float32)
    columns = schema(6, torch.float32)
    how: Any = {"precision": "bf16", "schema": columns, "epochs": 3}
    rounded = trained(data, mlp().float(), strategy, **how).module
    exact = sgd_on_union(mlp().float(), data, epochs=3)
    assert 1e-4 < relative_error(rounded, exact) < 5e-2
    if strategy.hybrid is None:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            oracle = sgd_on_union(mlp().float(), data, epochs=3, by_parts=True)
        assert relative_error(rounded, oracle) <= 1e-6


# Losses that divide by something else than rows

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


def require_one_process_on_labels(
    strategy: Any, sizes: list[int], loss: Any, epochs: int = 2
) -> None:
    data, accumulate = some_ignored(sizes), getattr(strategy, "accumulate", 1)
    outcome = trained(data, mlp(), strategy, loss=loss, epochs=epochs)
    told: list[tuple[float, float]] = []

    def divided(outputs: Tensor, targets: Tensor) -> Tensor:
        total, divisor = pair(outputs, targets)
        told.append((total.item(), divisor.item()))
        return total / divisor if divisor else total

    oracle = sgd_on_union(mlp(), data, epochs=epochs, accumulate=accumulate, loss=divided)
    assert relative_error(outcome.module, oracle) <= 1e-9
    totals, divisors = zip(*told[-len(told) // epochs :], strict=True)
    assert outcome.history[-1].loss == pytest.approx(sum(totals) / sum(divisors), rel=1e-9)
    assert [row.examples for row in outcome.history] == [sum(sizes)] * epochs


@every("loss", [WEIGHTED, pair])
@every("sizes", [[13, 19], [23]])
def test_averaging_equals_one_process_whatever_labels_count(sizes: list[int], loss: Any) -> None:
    require_one_process_on_labels(AVERAGING, sizes, loss, epochs=3)


@pytest.mark.nightly_variants(every=3)
@pytest.mark.parametrize("loss", [WEIGHTED, pair], ids=["torch's", "a pair"])
@pytest.mark.parametrize(
    "strategy",
    [
        ALL_REDUCE,
        GradientAllReduce(accumulate=2),
        GradientAllReduce(bucket_mb=0.0001),
        ParameterAveraging(period=1, aggregation="executors"),
        *ON_HOSTS,
        hybrid(1),
        hybrid(3),
        hybrid(1, accumulate=2),
    ],
    ids=repr,
)
def test_workers_among_themselves_equal_one_process_whatever_labels_count(
    strategy: Any, loss: Any
) -> None:
    require_one_process_on_labels(strategy, [13, 19, 5], loss)


def test_a_window_in_which_nothing_counts_goes_on_as_in_torch() -> None:
    data = classification([12])
    data.targets[:4] = -100
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    job = make_job(mlp(), optimizer=momentum, epochs=3, batch_size=1)
    outcome = run_world(job, data.shards())
    summed = partial(functional.cross_entropy, reduction="sum")
    oracle = sgd_on_union(mlp(), data, momentum, epochs=3, batch_size=1, loss=summed)
    assert relative_error(outcome.module, oracle) <= 1e-9
    assert np.isfinite(outcome.history[-1].loss)


def test_a_loss_that_is_a_sum_equals_plain_all_reduce() -> None:
    data, loss = classification([7, 12, 1]), nn.CrossEntropyLoss(reduction="sum")
    small = partial(torch.optim.SGD, lr=0.01)
    found, known = (
        trained(data, mlp(), each, loss=loss, optimizer=small, epochs=2).module
        for each in (hybrid(1), ALL_REDUCE)
    )
    assert relative_error(found, known) <= 1e-9


# Weights and held-out rows

HELD = ColumnSpec("held", torch.bool)


def weighted_schema(*, held: bool = False) -> FeedSchema:
    weight = ColumnSpec("weight", torch.float32)
    return replace(schema(), weight=weight, validation=HELD if held else None)


def shards(data: Data, **more: np.ndarray) -> list[Any]:
    starts = np.cumsum([0, *data.sizes])
    result = []
    for rank, (start, size) in enumerate(zip(starts[:-1], data.sizes, strict=True)):
        features, targets = data.shard(rank)
        columns = {name: values[start : start + size] for name, values in more.items()}
        result.append(batches_of(5, features=features, label=targets, **columns) if size else [])
    return result


@pytest.mark.parametrize(
    ("strategy", "sizes", "unit"),
    [
        (AVERAGING, [24], 1.0),
        (AVERAGING, [15, 7, 2], 1000.0),
        at_the_gate(hybrid(1), RAGGED, 1.0),
        at_the_gate(hybrid(2), RAGGED, 1.0),
    ],
)
def test_weighted_rows_train_as_in_one_process_whatever_the_weights_unit(
    strategy: Any, sizes: list[int], unit: float
) -> None:
    """By sum_i w_i l_i / n, the mean of all w being 1."""
    data = classification(sizes)
    weights = np.random.default_rng(3).integers(0, 5, sum(sizes)).astype(np.float64) * unit
    weighted_shards, columns = shards(data, weight=weights), weighted_schema()
    outcome = of_shards(weighted_shards, mlp(), strategy, schema=columns, epochs=3)
    scaled, labels = torch.from_numpy(weights / weights.mean()), torch.from_numpy(data.targets)

    def weighted(outputs: Tensor, rows: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, labels[rows], reduction="none")
        return (losses * scaled[rows]).mean()

    numbered = replace(data, targets=np.arange(sum(sizes)))
    oracle = sgd_on_union(mlp(), numbered, epochs=3, loss=weighted)
    assert relative_error(outcome.module, oracle) <= 1e-6


@pytest.mark.parametrize(
    ("strategy", "last"),
    [
        (AVERAGING, 0),
        (ElasticAveraging(2, 0.2), 0),
        at_the_gate(hybrid(2), 0),
        at_the_gate(SHARDED, 8),
    ],
)
def test_the_loss_of_held_out_rows_is_in_the_history_of_every_epoch(
    strategy: Any, last: int
) -> None:
    """It is the center's."""
    data = classification([20, 9, 6, last])
    generator = np.random.default_rng(4)
    weights = generator.integers(1, 5, 35 + last).astype(np.float64)
    held = generator.random(35 + last) < 0.4
    of_all, columns = shards(data, weight=weights, held=held), weighted_schema(held=True)
    outcome = of_shards(of_all, mlp(), strategy, schema=columns, epochs=2)

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
    with_held = make_job(mlp(), schema=replace(schema(), validation=HELD), epochs=2)
    kept = Data(data.features[~held], data.targets[~held], (12, 6))
    first = run_world(with_held, shards(data, held=held))
    second = run_world(make_job(mlp(), epochs=2), kept.shards())
    mine, other = first.module.state_dict(), second.module.state_dict()
    assert all(torch.equal(mine[key], other[key]) for key in other)
    assert second.history[0].validation_loss is None


AMONG = partial(ParameterAveraging, 1, aggregation="executors")


@pytest.mark.nightly
@every_row(
    *(
        (*ways, name)
        for ways in ((hybrid(1), hybrid(2)), (hybrid(2), ALL_REDUCE), (ALL_REDUCE, hybrid(1)))
        for name in OPTIMIZERS
    ),
    (ALL_REDUCE, TREES, "momentum"),
    (TREES, ALL_REDUCE, "momentum"),
    (AMONG(), AMONG(reduction=SMALL), "momentum"),
    (AMONG(reduction=SMALL), AMONG(), "momentum"),
)
def test_a_training_goes_on_from_a_checkpoint_of_another_way(
    tmp_path: Path, before: Any, after: Any, name: str
) -> None:
    """With the optimizer's state: a step from another would be off by more than 1e-9."""
    data, optimizer = classification(RAGGED), OPTIMIZERS[name]
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    first, then = (
        make_job(mlp(), strategy=each, optimizer=optimizer, epochs=3) for each in (before, after)
    )
    die_after(1, first, data.shards(), policy, "processes")
    outcome = run_world(then, data.shards(), ranks_as="processes", checkpoints=policy)
    oracle = sgd_on_union(mlp(), data, optimizer, epochs=3)
    assert relative_error(outcome.module, oracle) <= 1e-9


BASE, WARM_UP = 0.02, 5
"""One worker's learning rate, and epochs."""


@pytest.mark.parametrize(
    ("strategy", "sizes"), [(AVERAGING, (16, 14, 13)), at_the_gate(ALL_REDUCE, (16, 9))]
)
def test_workers_with_the_recipes_warm_up_train_as_one_process_does(
    strategy: Strategy[Any], sizes: tuple[int, ...]
) -> None:
    """From the rate of one worker to that times the workers, over five epochs of four steps."""
    data, epochs, workers = classification(sizes), 7, len(sizes)
    build = partial(torch.optim.SGD, lr=workers * BASE, momentum=0.9, nesterov=True)
    warm_up = partial(LinearLR, start_factor=1 / workers, total_iters=WARM_UP * 4)
    by_step = {"scheduler": warm_up, "scheduler_every": "step"}
    outcome = trained(data, mlp(), strategy, optimizer=build, epochs=epochs, **by_step)
    rates = []

    def scheduled(parameters: Any) -> torch.optim.Optimizer:
        optimizer = build(parameters)
        schedule = warm_up(optimizer)
        optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    oracle = sgd_on_union(mlp(), data, scheduled, epochs=epochs)
    assert relative_error(outcome.module, oracle) < 1e-9
    # Goyal et al.'s ramp, which is the same at each step as at the ends of its epochs.
    ramp = [BASE * (1 + (workers - 1) * min(step / 20, 1)) for step in range(4 * epochs)]
    np.testing.assert_allclose(rates, ramp, rtol=1e-9)
