"""Runs without Spark on rows of unequal length, against rows that nobody has padded."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from torch import Tensor, nn
from toys import make_job, relative_error

from sparkdl import ParameterAveraging
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import FeedOptions
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding
from sparkdl.testing.world import run_world

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
        answers: Tensor = self.out(mean)
        return answers

    def row(self, tokens: list[int]) -> Tensor:
        """The same of one row, without padding."""
        mean = self.embedding.weight[tokens].mean(0) if tokens else torch.zeros(4).double()
        answer: Tensor = self.out(mean)
        return answer


def rows_of(count: int) -> list[list[int]]:
    drawn = np.random.default_rng(7)
    return [drawn.integers(1, WORDS, drawn.integers(0, 15)).tolist() for _ in range(count)]


def shards_of(rows: list[list[int]], workers: int) -> list[list[pa.RecordBatch]]:
    whole = pa.record_batch(
        {
            "tokens": pa.array(rows, pa.list_(pa.int32())),
            "label": pa.array([row % CLASSES for row in range(len(rows))]),
        }
    )
    cuts = np.linspace(0, len(rows), workers + 1).astype(int)
    return [
        [whole.slice(start, 5), whole.slice(start + 5, stop - start - 5)]
        for start, stop in itertools.pairwise(cuts)
    ]


def job(batch_size: int, epochs: int, **options: Any) -> Any:
    return make_job(
        Bag,
        schema=SCHEMA,
        optimizer=partial(torch.optim.SGD, lr=LR),
        strategy=ParameterAveraging(period=1),
        epochs=epochs,
        batch_size=batch_size,
        feed=FeedOptions(**options),
    )


@every(
    "options",
    [{}, {"exchange_rows": True, "reshuffle_every": 1, "group_by_length": True}],
)
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
