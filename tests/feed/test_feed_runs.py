"""Whole runs on the feed: what models get to see of the rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import Data, enough_rows, make_job

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.testing import batches_of, run_world


class Recorder(nn.Module):
    """Remembers the ids of the rows that it was trained on, in a buffer of counts."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.extend(int(i) for i in ids)
        return self.weight.expand(len(ids))


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=4).filter(enough_rows),
    batch_size=st.integers(1, 9),
)
@pytest.mark.slow
def test_a_run_trains_on_every_row_once_an_epoch(sizes: list[int], batch_size: int) -> None:
    rows = sum(sizes)
    replicas: list[Recorder] = []

    def build() -> nn.Module:
        replicas.append(Recorder(rows))
        return replicas[-1]

    data = Data(np.arange(rows, dtype=np.int64), np.zeros(rows, np.float32), tuple(sizes))
    job = make_job(
        build,
        loss=nn.MSELoss(),
        schema=FeedSchema((ColumnSpec("id", torch.int64),), ColumnSpec("y", torch.float32)),
        epochs=3,
        batch_size=batch_size,
    )
    outcome = run_world(job, data.shards(rows_a_batch=5))

    seen = sorted(i for replica in replicas for i in replica.seen)
    assert seen == sorted(list(range(rows)) * 3)
    assert [row.examples for row in outcome.history] == [rows] * 3


def test_several_features_columns_arrive_as_separate_arguments() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 2)
            self.out = nn.Linear(4, 2)

        def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
            assert numbers.dtype is torch.float32
            assert codes.dtype is torch.int64
            return self.out(torch.cat([numbers, self.table(codes)], dim=1))

    schema = FeedSchema(
        (ColumnSpec("numbers", torch.float32, (2,)), ColumnSpec("codes", torch.int64)),
        ColumnSpec("label", torch.int64),
    )
    shard = batches_of(
        3,
        numbers=np.ones((8, 2), np.float32),
        codes=np.arange(8, dtype=np.int32) % 5,
        label=np.zeros(8, np.int64),
    )
    outcome = run_world(make_job(TwoInputs(), schema=schema, epochs=2), [shard, shard])
    assert outcome.history[-1].examples == 16


@every("kind", [np.float64, np.int32, np.int64, np.bool_])
def test_batches_of_cuts_arrays_into_record_batches(kind: type) -> None:
    shard = batches_of(3, a=np.ones((8, 2), kind), b=np.arange(8))
    assert [batch.num_rows for batch in shard] == [3, 3, 2]
    assert shard[0].column(0).type == pa.list_(pa.from_numpy_dtype(kind))
    assert [i for batch in shard for i in batch.column(1).to_pylist()] == list(range(8))
