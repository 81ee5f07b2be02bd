"""Sums along trees train what gloo's ring trains, whatever they are combined with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from every_row import every
from interruptions import same_bits
from misbehaving import die_after
from test_all_reduce import OPTIMIZERS, all_reduce, train_on_union
from torch import Tensor, nn
from toys import classification, cnn, make_job, mlp, relative_error, schema

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError, WorkerError
from sparkdl.strategies import (
    AdaScale,
    ColorTrees,
    GradientAllReduce,
    KFACPreconditioner,
    ParameterAveraging,
)
from sparkdl.strategies.color_trees import require_no_gpu
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SMALL = ColorTrees(2, 0.05)
"""Chunks of six numbers."""


def normed() -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(8)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 3)).double()


class SparseTable(nn.Module):
    """Its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True).double()

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.table((features[:, 0].abs() % 5).long())
        return outputs


@pytest.mark.slow_variants(fast=1)
@pytest.mark.parametrize("sizes", [[7, 12, 1], [13, 6], [11], [5, 9, 0, 2]])
def test_all_reduce_along_trees_is_one_process_on_the_union_batch(sizes: list[int]) -> None:
    data = classification(sizes)
    strategy = GradientAllReduce(bucket_mb=0.0001, reduction=SMALL)
    outcome = all_reduce(data, mlp(), strategy, optimizer=OPTIMIZERS["momentum"], epochs=3)
    oracle = train_on_union(mlp(), OPTIMIZERS["momentum"], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-10


@pytest.mark.slow
@every(
    ("kind", "settings"),
    [
        (GradientAllReduce, {"accumulate": 2}),
        (GradientAllReduce, {"shard_optimizer": True}),
        (GradientAllReduce, {"find_unused_parameters": True}),
        (GradientAllReduce, {"measure_noise": True}),
        (GradientAllReduce, {"sync_batch_norm": True}),
        (GradientAllReduce, {"preconditioner": KFACPreconditioner(0.05, 0.95, 2, 3, 0.02)}),
        (AdaScale, {}),
        (ParameterAveraging, {"aggregation": "executors", "period": 3}),
        (ParameterAveraging, {"aggregation": "executors", "average_optimizer_state": False}),
    ],
)
def test_whatever_it_is_combined_with_the_training_is_that_of_the_ring(
    kind: Any, settings: dict[str, Any]
) -> None:
    data = classification([24, 15, 18])
    ring, trees = (
        all_reduce(data, normed(), kind(**settings, **way), optimizer=OPTIMIZERS["momentum"])
        for way in ({}, {"reduction": SMALL})
    )
    assert relative_error(trees.module, ring.module) <= 1e-9
    assert [row.loss for row in trees.history] == pytest.approx([row.loss for row in ring.history])
    for mine, other in zip(trees.history, ring.history, strict=True):
        assert (mine.measured or {}) == pytest.approx(other.measured or {}, rel=1e-6)


@every("rounding", ["fp16", "bf16"])
def test_rounded_gradients_are_added_up_as_rounded(rounding: Any) -> None:
    """By two workers, whose sums have one order: to the bit."""
    data = classification([12, 12], width=36)
    ring, trees = (
        all_reduce(
            data,
            cnn(),
            GradientAllReduce(compression=rounding, reduction=reduction),
            schema=schema(36),
        )
        for reduction in (None, SMALL)
    )
    assert same_bits(trees, ring)


def test_sparse_gradients_are_refused_in_words() -> None:
    with pytest.raises(WorkerError, match=r"reduction=ColorTrees\(...\) takes dense gradients"):
        all_reduce(classification([8, 8]), SparseTable(), GradientAllReduce(reduction=SMALL))


def test_gpus_are_left_to_nccl() -> None:
    replica: Any = SimpleNamespace(device=torch.device("cuda:0"))
    with pytest.raises(ConfigError, match="NCCL has double binary trees of its own"):
        require_no_gpu(SMALL, replica)
    require_no_gpu(None, replica)


@pytest.mark.slow
@every(
    "strategy",
    [
        lambda **way: GradientAllReduce(**way),
        lambda **way: ParameterAveraging(1, aggregation="executors", **way),
    ],
)
@every("ways", [({}, {"reduction": SMALL}), ({"reduction": SMALL}, {})])
def test_a_training_goes_on_from_a_checkpoint_of_the_other_way(
    strategy: Any, ways: Any, tmp_path: Path
) -> None:
    data, settings = classification([9, 14, 5]), {"optimizer": OPTIMIZERS["sgd"], "epochs": 3}
    before, after = (make_job(mlp(), strategy=strategy(**way), **settings) for way in ways)
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(1, before, data.shards(), policy, "processes")
    outcome = run_world(after, data.shards(), ranks_as="processes", checkpoints=policy)
    oracle = train_on_union(mlp(), OPTIMIZERS["sgd"], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-9
