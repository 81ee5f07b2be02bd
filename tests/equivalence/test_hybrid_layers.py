"""Layers that groups of workers compute together become what one process makes of them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from every_row import every
from misbehaving import die_after
from test_all_reduce import OPTIMIZERS, all_reduce, train_on_union
from test_divisors import WEIGHTED, in_one_process, pair, some_ignored
from test_weighted_equivalence import by_hand, shards, weighted_schema
from torch import Tensor, nn
from toys import classification, cnn, make_job, mlp, relative_error, schema

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.strategies import GradientAllReduce, Hybrid
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

RAGGED = [5, 9, 3, 2]
"""Rows of four workers, in minibatches of 4: some are smaller, and some workers run out."""


def hybrid(groups: Any = 1, layers: str = "*", **settings: Any) -> GradientAllReduce:
    return GradientAllReduce(hybrid=Hybrid(layers, groups), **settings)


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([13], 1),
        ([13, 6], 1),
        ([13, 6], 2),
        ([0, 9], 1),
        (RAGGED, 1),
        (RAGGED, 2),
        (RAGGED, 4),
        ([9, 4, 0, 0], 2),  # a group that has no rows at all
        (RAGGED, "auto"),
    ],
)
def test_any_groups_and_shards_equal_one_process_on_the_union_batch(
    sizes: list[int], groups: Any, name: str
) -> None:
    data = classification(sizes)
    outcome = all_reduce(data, mlp(), hybrid(groups), optimizer=OPTIMIZERS[name], epochs=3)
    oracle = train_on_union(mlp(), OPTIMIZERS[name], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-9
    assert [row.examples for row in outcome.history] == [sum(sizes)] * 3


class OfAllKinds(nn.Module):
    """Layers without a bias, called twice, of sequences, side by side, and called for no loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(6))
        self.items = nn.Linear(1, 4, bias=False)
        self.twice = nn.Linear(4, 4)
        self.left, self.right = nn.Linear(24, 5), nn.Linear(24, 5, bias=False)
        self.last = nn.Linear(5, 3)
        self.double()

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.items((features * self.scale).unsqueeze(-1)).tanh()
        hidden = self.twice(self.twice(hidden).tanh()).flatten(1)
        with torch.no_grad():
            shown = self.left(hidden).mean(1, keepdim=True)
        outputs: Tensor = self.last(self.left(hidden).tanh() * self.right(hidden) - shown)
        return outputs


@every("groups", [1, 2])
@every("layers", ["*", "[tlr]*", "right"])
def test_layers_of_all_kinds_equal_one_process(groups: int, layers: str) -> None:
    data = classification(RAGGED)
    adam = OPTIMIZERS["adam"]
    outcome = all_reduce(data, OfAllKinds(), hybrid(groups, layers), optimizer=adam, epochs=2)
    oracle = train_on_union(OfAllKinds(), adam, data, epochs=2, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-9


@every("accumulate", [2, 3])
def test_accumulated_minibatches_equal_one_larger_batch(accumulate: int) -> None:
    data = classification([23, 5, 2, 8])
    strategy = hybrid(2, accumulate=accumulate)
    momentum = OPTIMIZERS["momentum"]
    outcome = all_reduce(data, mlp(), strategy, optimizer=momentum, epochs=2)
    oracle = train_on_union(mlp(), momentum, data, epochs=2, batch_size=4, accumulate=accumulate)
    assert relative_error(outcome.module, oracle) <= 1e-9


def test_the_norm_that_is_clipped_is_that_of_all_strips_and_other_layers_together() -> None:
    data = classification(RAGGED)
    outcome = all_reduce(data, mlp(), hybrid(2, "0"), epochs=3, clip_norm=0.05)
    oracle = partial(train_on_union, mlp(), OPTIMIZERS["sgd"], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, oracle(clip_norm=0.05)) <= 1e-9
    assert relative_error(outcome.module, oracle()) > 1e-3


@every("loss", [WEIGHTED, pair])
@every(("groups", "accumulate"), [(1, 1), (3, 1), (1, 2)])
def test_whatever_labels_count_and_by_how_much_it_equals_one_process(
    groups: int, accumulate: int, loss: Any
) -> None:
    data = some_ignored([13, 19, 5])
    strategy = hybrid(groups, accumulate=accumulate)
    outcome = all_reduce(data, mlp(), strategy, loss=loss, epochs=2)
    oracle, value = in_one_process(data, epochs=2, minibatches=accumulate)
    assert relative_error(outcome.module, oracle) <= 1e-9
    assert outcome.history[-1].loss == pytest.approx(value, rel=1e-9)


@every("groups", [1, 2])
def test_weighted_rows_equal_one_process(groups: int) -> None:
    data = classification(RAGGED)
    weights = np.random.default_rng(3).integers(0, 5, sum(RAGGED)).astype(np.float64)
    job = make_job(mlp(), schema=weighted_schema(), epochs=2, strategy=hybrid(groups))
    outcome = run_world(job, shards(data, weight=weights), ranks_as="processes")
    expected = by_hand(mlp(), data, weights, epochs=2, batch_size=4)
    assert relative_error(outcome.module, expected) <= 1e-6


def test_a_loss_that_is_a_sum_equals_plain_all_reduce() -> None:
    data, loss = classification([7, 12, 1]), nn.CrossEntropyLoss(reduction="sum")
    small = partial(torch.optim.SGD, lr=0.01)
    found, known = (
        all_reduce(data, mlp(), each, loss=loss, optimizer=small, epochs=2).module
        for each in (hybrid(1), GradientAllReduce())
    )
    assert relative_error(found, known) <= 1e-9


def test_float32_behind_convolutions_is_exact_to_its_precision() -> None:
    data = classification([21, 16, 8, 3], width=36, dtype=np.float32)
    columns = schema(36, torch.float32)
    outcome = all_reduce(data, cnn().float(), hybrid(2), schema=columns, epochs=3)
    oracle = train_on_union(cnn().float(), OPTIMIZERS["sgd"], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-6


def test_autocast_to_bfloat16_is_that_of_plain_all_reduce_to_its_precision() -> None:
    data = classification([20, 12, 3], dtype=np.float32)
    settings: dict[str, Any] = {"schema": schema(6, torch.float32), "epochs": 3}
    rounded = all_reduce(data, mlp().float(), hybrid(1), precision="bf16", **settings).module
    exact = all_reduce(data, mlp().float(), hybrid(1), **settings).module
    assert 1e-4 < relative_error(rounded, exact) < 5e-2


@every("synchronized", [False, True])
def test_statistics_and_random_numbers_are_those_of_plain_all_reduce(synchronized: bool) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)
    ).double()
    data = classification([18, 10])
    found, known = (
        all_reduce(data, model, each, epochs=3).module
        for each in (
            hybrid(1, sync_batch_norm=synchronized),
            GradientAllReduce(sync_batch_norm=synchronized),
        )
    )
    assert relative_error(found, known) <= 1e-9
    assert found[1].num_batches_tracked == known[1].num_batches_tracked


def test_held_out_rows_are_seen_by_whole_layers() -> None:
    data = classification([24, 9, 15, 2])
    held = np.arange(50) % 3 == 1
    settings: dict[str, Any] = {"schema": weighted_schema(held=True), "epochs": 2}
    found, known = (
        run_world(
            make_job(mlp(), strategy=each, **settings),
            shards(data, weight=np.ones(50), held=held),
            ranks_as="processes",
        ).history
        for each in (hybrid(2), GradientAllReduce())
    )
    losses = [[row.validation_loss for row in each] for each in (found, known)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.slow
@every("name", ["momentum", "adam"])
@every(
    ("before", "after"),
    [(hybrid(1), hybrid(2)), (hybrid(2), GradientAllReduce()), (GradientAllReduce(), hybrid(1))],
)
def test_a_training_goes_on_with_other_groups(
    before: Any, after: Any, name: str, tmp_path: Path
) -> None:
    """With the optimizer's state: a step from another would be off by more than 1e-9."""
    data, settings = classification(RAGGED), {"optimizer": OPTIMIZERS[name], "epochs": 3}
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    first = make_job(mlp(), strategy=before, **settings)
    die_after(1, first, data.shards(), policy, "processes")
    outcome = run_world(
        make_job(mlp(), strategy=after, **settings),
        data.shards(),
        ranks_as="processes",
        checkpoints=policy,
    )
    oracle = train_on_union(mlp(), OPTIMIZERS[name], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-9
