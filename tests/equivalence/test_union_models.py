"""Models of all kinds, and rows of any length, train as in one process, whatever is split.

The oracle is that of ``test_union_batch``.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from test_union_batch import ADAM, ALL_REDUCE, RAGGED, SHARDED, at_the_gate, hybrid, trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import classification, make_job, relative_error, sgd_on_union

from sparkdl.averager.values.replica_codec import count_non_finite
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.schema import FeedSchema
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding
from sparkdl.replica import Replica
from sparkdl.strategies import (
    BSP,
    AsynchronousSGD,
    GradientAllReduce,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    PowerSGD,
    Strategy,
    ThresholdGradientSharing,
)
from sparkdl.strategies.all_reduce.gradient_noise import norms_of
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])


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

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features).tanh()
        for block in [*self.blocks, self.blocks[0]]:
            hidden = block(hidden).tanh()
        outputs: Tensor = self.last(self.back(hidden))
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

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.backbone(features))


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

    def forward(self, features: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.encoder(self.embed(features.unsqueeze(-1))))
        return self.head(hidden[:, -1])


class Recomputing(Tied):
    """Keeps nothing of its first layers for the backward pass."""

    def forward(self, features: Tensor) -> Tensor:
        def begin(x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](self.first(x)).tanh())

        hidden = checkpoint(begin, features, use_reentrant=False)
        outputs: Tensor = self.last(self.back(hidden))
        return outputs[:, :3] + self.bias


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
        return self.last(self.left(hidden).tanh() * self.right(hidden) - shown)


@pytest.mark.nightly_variants(every=4)
@pytest.mark.parametrize(
    ("model", "strategy", "sizes"),
    [
        *((each, SHARDED, [9, 6, 3]) for each in (Tied, Frozen, Attending, Recomputing)),
        *(
            (OfAllKinds, hybrid(groups, layers), RAGGED)
            for groups, layers in ((1, "*"), (2, "*"), (1, "right"), (2, "[tlr]*"))
        ),
    ],
)
def test_models_of_all_kinds_equal_one_process(model: Any, strategy: Any, sizes: list[int]) -> None:
    data = classification(sizes)
    outcome = trained(data, model, strategy, optimizer=ADAM, epochs=2)
    assert relative_error(outcome.module, sgd_on_union(model(), data, ADAM, epochs=2)) <= 1e-9


@pytest.mark.parametrize(
    ("strategy", "synchronized"),
    [(SHARDED, True), at_the_gate(SHARDED, False), at_the_gate(hybrid(1), True)],
)
def test_statistics_and_random_numbers_are_those_of_plain_all_reduce(
    strategy: Any, synchronized: bool
) -> None:
    torch.manual_seed(5)
    norm, drops = nn.BatchNorm1d(5), nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(6, 5), norm, drops, nn.Linear(5, 3)).double()
    data = classification([18, 10])
    found, known = (
        trained(data, model, replace(each, sync_batch_norm=synchronized), epochs=3).module
        for each in (strategy, ALL_REDUCE)
    )
    assert relative_error(found, known) <= (1e-9 if strategy.hybrid else 1e-10)
    assert found[1].num_batches_tracked == known[1].num_batches_tracked


class Wave(nn.Module):
    """The magnitudes of a complex linear map."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map = nn.Linear(6, 3, dtype=torch.complex128)
        self.register_buffer("phase", torch.polar(*torch.ones(2, 1).double()))

    def forward(self, features: Tensor) -> Tensor:
        return (self.map(features.to(torch.complex128)) * self.phase).abs()


DATA = classification([20, 13])


@pytest.mark.parametrize(
    ("strategy", "momentum"),
    [
        (ParameterAveraging(period=1), 0.9),
        (OuterOptimizer(period=1, outer=OuterSGD(1.0, 0.0)), 0.0),
        (AsynchronousSGD(period=1, barrier=BSP()), 0.0),
        (ThresholdGradientSharing(threshold=0), 0.0),
        pytest.param(GradientAllReduce(), 0.9, marks=pytest.mark.nightly),
    ],
    ids=["averaging", "outer", "changes", "sharing", "all_reduce"],
)
def test_in_every_step_they_agree_on_what_one_process_would_have_come_to(
    strategy: Any, momentum: float
) -> None:
    build = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    given = make_job(Wave(), optimizer=build, strategy=strategy, epochs=2, deadline_s=90.0)
    ranks_as: Any = "processes" if strategy.needs.collective else "threads"
    found = run_world(given, DATA.shards(), ranks_as=ranks_as)
    oracle = sgd_on_union(Wave(), DATA, build, epochs=2)
    for mine, other in zip(found.module.parameters(), oracle.parameters(), strict=True):
        assert mine.dtype is torch.complex128
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


class Seen(nn.Linear):
    """Keeps the mean of the rows that it saw last, times 1 + 2i, and how many they were."""

    def __init__(self) -> None:
        super().__init__(6, 3, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(6, dtype=torch.complex128))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int32))
        self.register_buffer("many", torch.zeros(3, dtype=torch.bool))

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.mean = features.mean(0) * (1 + 2j)
            self.rows.fill_(len(features))
            self.many.fill_(len(features) > 15)
        return super().forward(features)


@pytest.mark.parametrize("among", ["threads", pytest.param("processes", marks=pytest.mark.nightly)])
def test_complex_buffers_become_the_mean_over_rows_and_integers_those_of_the_first(
    among: Any,
) -> None:
    strategies: list[Strategy[Any]] = [
        ParameterAveraging(period=1),
        OuterOptimizer(period=1, outer=OuterSGD(1.0, 0.0)),
        AsynchronousSGD(period=1, barrier=BSP()),
        ThresholdGradientSharing(threshold=0),
    ]
    if among == "processes":
        strategies = [GradientAllReduce(), ParameterAveraging(1, aggregation="executors")]
    expected = torch.from_numpy(DATA.features.mean(0) * (1 + 2j))
    for strategy in strategies:
        job = make_job(Seen(), strategy=strategy, epochs=1, batch_size=20, deadline_s=90.0)
        found = run_world(job, DATA.shards(), ranks_as=among).module
        torch.testing.assert_close(found.mean, expected)
        assert (int(found.rows), found.many.tolist()) == (20, [True] * 3)


def test_noise_of_complex_numbers_is_that_of_both_parts_and_any_not_finite_is_found() -> None:
    assert float(norms_of([torch.tensor([3 + 4j, 0, 12j])])[0]) == pytest.approx(13)
    assert count_non_finite(torch.tensor([1j, complex(0, math.nan), complex(math.inf, 0)])) == 2


def test_their_gradients_are_not_compressed() -> None:
    strategy = GradientAllReduce(compression=PowerSGD(1))
    with pytest.raises(ConfigError, match="has complex parameters"):
        strategy.require_fits(Replica(Wave(), torch.optim.SGD, nn.CrossEntropyLoss()))


WORDS, CLASSES, LR = 30, 3, 0.3
SCHEMA = FeedSchema(
    (ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(0, "padding_mask")),),
    ColumnSpec("label", torch.int64),
)


class Bag(nn.Module):
    """The mean of a row's embeddings, then a linear layer; of an empty row, the bias alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4, dtype=torch.float64)
        self.out = nn.Linear(4, CLASSES, dtype=torch.float64)
        drawn = np.random.default_rng(1)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.from_numpy(drawn.normal(size=tuple(each.shape))))

    def forward(self, tokens: Tensor, padding_mask: Tensor) -> Tensor:
        real = (~padding_mask)[..., None]
        mean = (self.embedding(tokens) * real).sum(1) / real.sum(1).clamp(min=1)
        return self.out(mean)

    def row(self, tokens: list[int]) -> Tensor:
        """The same of one row, without padding."""
        mean = self.embedding.weight[tokens].mean(0) if tokens else torch.zeros(4).double()
        return self.out(mean)


def rows_of(count: int) -> list[list[int]]:
    drawn = np.random.default_rng(7)
    return [drawn.integers(1, WORDS, drawn.integers(0, 15)).tolist() for _ in range(count)]


def shards_of(rows: list[list[int]], workers: int) -> list[list[pa.RecordBatch]]:
    labels = [row % CLASSES for row in range(len(rows))]
    whole = pa.record_batch({"tokens": pa.array(rows, pa.list_(pa.int32())), "label": labels})
    cuts = np.linspace(0, len(rows), workers + 1).astype(int)
    return [
        [whole.slice(start, 5), whole.slice(start + 5, stop - start - 5)]
        for start, stop in itertools.pairwise(cuts)
    ]


def job(batch_size: int, epochs: int, **options: Any) -> Any:
    sgd, feed = partial(torch.optim.SGD, lr=LR), FeedOptions(**options)
    sizes: Any = {"epochs": epochs, "batch_size": batch_size}
    return make_job(Bag, schema=SCHEMA, optimizer=sgd, feed=feed, **sizes)


@every("options", [{}, {"exchange_rows": True, "reshuffle_every": 1, "group_by_length": True}])
def test_a_step_on_all_rows_is_one_of_gradient_descent(options: dict[str, Any]) -> None:
    rows = rows_of(47)
    outcome = run_world(job(len(rows), 3, **options), shards_of(rows, 3))
    alone = Bag()
    optimizer = torch.optim.SGD(alone.parameters(), lr=LR)
    targets = torch.tensor([row % CLASSES for row in range(len(rows))])
    for _ in range(3):
        optimizer.zero_grad()
        outputs = torch.stack([alone.row(row) for row in rows])
        nn.functional.cross_entropy(outputs, targets).backward()
        optimizer.step()
    assert relative_error(outcome.module, alone) < 1e-9


def test_a_checkpoint_is_of_how_rows_are_padded_and_grouped(tmp_path: Path) -> None:
    shards = shards_of(rows_of(20), 2)
    checkpoints = CheckpointPolicy(path=str(tmp_path))
    run_world(job(4, 1), shards, checkpoints=checkpoints)
    with pytest.raises(ConfigError, match="batch size: was 4, is now 4, grouped by length"):
        run_world(job(4, 2, group_by_length=True), shards, checkpoints=checkpoints)
    other = shards_of([[*row, 0] for row in rows_of(20)], 2)
    with pytest.raises(ConfigError, match="longest of column 'tokens'"):
        run_world(job(4, 2), other, checkpoints=checkpoints)
