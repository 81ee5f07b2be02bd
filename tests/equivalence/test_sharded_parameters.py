"""Sharded parameters become what one process becomes on the union of the workers' minibatches."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from every_row import every
from test_all_reduce import OPTIMIZERS, all_reduce, part_by_part, train_on_union
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import classification, cnn, mlp, relative_error, schema

from sparkdl.strategies import GradientAllReduce

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Of a few hundred bytes, so each layer is gathered by itself.
SHARDED = GradientAllReduce(bucket_mb=0.0001, shard_parameters=True)


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize("sizes", [[12, 12], [13, 6], [7, 12, 1], [5, 9, 3, 2]])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unequal_shards_equal_one_process_on_the_union_batch(sizes: list[int], name: str) -> None:
    data = classification(sizes)
    outcome = all_reduce(data, mlp(), SHARDED, optimizer=OPTIMIZERS[name], epochs=3)
    oracle = train_on_union(mlp(), OPTIMIZERS[name], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-10
    assert [row.examples for row in outcome.history] == [sum(sizes)] * 3


class Tied(nn.Module):
    """Two layers have one matrix, another layer is called twice, and a bias is the module's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.back = nn.Linear(5, 6)
        self.last = nn.Linear(6, 5)
        self.last.weight = self.first.weight
        self.bias = nn.Parameter(torch.zeros(3))
        self.double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.first(features).tanh()
        for block in [*self.blocks, self.blocks[0]]:
            hidden = block(hidden).tanh()
        outputs: torch.Tensor = self.last(self.back(hidden))
        return outputs[:, :3] + self.bias


class Frozen(nn.Module):
    """A backbone of which only one bias is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).double()
        self.backbone.requires_grad_(False)
        self.backbone[2].bias.requires_grad_(True)
        self.head = nn.Linear(5, 3).double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.backbone(features))
        return outputs


class Attending(nn.Module):
    """torch's own layers that read the parameters of the layers in them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.embed = nn.Linear(1, 4)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.recurrent = nn.LSTM(4, 3, batch_first=True, num_layers=2)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.encoder(self.embed(features.unsqueeze(-1))))
        outputs: torch.Tensor = self.head(hidden[:, -1])
        return outputs


class Recomputing(Tied):
    """Keeps nothing of its first layers for the backward pass."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        def begin(x: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.blocks[1](self.blocks[0](self.first(x)).tanh())
            return outputs

        hidden = checkpoint(begin, features, use_reentrant=False)
        outputs: torch.Tensor = self.last(self.back(hidden))
        return outputs[:, :3] + self.bias


@every("model", [Tied, Frozen, Attending, Recomputing])
def test_models_of_all_kinds_equal_one_process(model: Any) -> None:
    data = classification([9, 6, 3])
    outcome = all_reduce(data, model, SHARDED, optimizer=OPTIMIZERS["adam"], epochs=2)
    oracle = train_on_union(model(), OPTIMIZERS["adam"], data, epochs=2, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-9


@every("accumulate", [2, 3])
def test_accumulated_minibatches_equal_one_larger_batch(accumulate: int) -> None:
    data = classification([23, 5, 2])
    strategy = GradientAllReduce(0.0001, accumulate, shard_parameters=True)
    outcome = all_reduce(data, mlp(), strategy, optimizer=OPTIMIZERS["momentum"], epochs=3)
    oracle = train_on_union(
        mlp(), OPTIMIZERS["momentum"], data, epochs=3, batch_size=4, accumulate=accumulate
    )
    assert relative_error(outcome.module, oracle) <= 1e-10


def test_the_norm_that_is_clipped_is_that_of_all_parts_together() -> None:
    data = classification([13, 6])
    outcome = all_reduce(data, mlp(), SHARDED, epochs=3, clip_norm=0.05)
    by_hand = partial(train_on_union, mlp(), OPTIMIZERS["sgd"], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, by_hand(clip_norm=0.05)) <= 1e-10
    assert relative_error(outcome.module, by_hand()) > 1e-3


def test_float32_is_exact_to_its_precision() -> None:
    data = classification([21, 16, 8, 3], width=36, dtype=np.float32)
    outcome = all_reduce(data, cnn().float(), SHARDED, schema=schema(36, torch.float32), epochs=3)
    oracle = train_on_union(cnn().float(), OPTIMIZERS["sgd"], data, epochs=3, batch_size=4)
    assert relative_error(outcome.module, oracle) <= 1e-6


def test_autocast_to_bfloat16_is_that_of_one_process_on_each_ranks_minibatches() -> None:
    data = classification([20, 12], dtype=np.float32)
    rounded = all_reduce(
        data,
        mlp().float(),
        SHARDED,
        precision="bf16",
        schema=schema(6, torch.float32),
        epochs=3,
    ).module
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        oracle = train_on_union(
            mlp().float(),
            OPTIMIZERS["sgd"],
            data,
            epochs=3,
            batch_size=4,
            backward=part_by_part,
        )
    assert relative_error(rounded, oracle) <= 1e-6


def normalized(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(dropout), nn.Linear(5, 3)
    ).double()


@every("synchronized", [False, True])
def test_buffers_and_random_numbers_are_as_if_no_worker_ran_for_the_others(
    synchronized: bool,
) -> None:
    data = classification([18, 10])
    unsharded = GradientAllReduce(sync_batch_norm=synchronized)
    sharded = GradientAllReduce(sync_batch_norm=synchronized, shard_parameters=True)
    found, known = (
        all_reduce(data, normalized(0.5), each, epochs=3).module for each in (sharded, unsharded)
    )
    assert relative_error(found, known) <= 1e-10
    assert found[1].num_batches_tracked == known[1].num_batches_tracked
