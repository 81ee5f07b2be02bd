"""The feed: every row exactly once an epoch, in an order that is reproducible."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import Data, make_job

from sparkdl.feed.columns import FeedSchema
from sparkdl.feed.feed import Feed, permutation
from sparkdl.feed.store import PartitionStore
from sparkdl.protocols import Batch, ColumnSpec
from sparkdl.testing import batches_of, run_world

SCHEMA = FeedSchema((ColumnSpec("wide", torch.float32, 2),), ColumnSpec("id", torch.int64))


def record_batches(sizes: Sequence[int]) -> list[pa.RecordBatch]:
    """Record batches of the given sizes; row i is ([i, -i], i)."""
    ids = iter(range(sum(sizes)))
    batches = []
    for size in sizes:
        rows = [next(ids) for _ in range(size)]
        wide = pa.array([[i, -i] for i in rows], pa.list_(pa.float64()))
        batches.append(pa.record_batch({"wide": wide, "id": pa.array(rows, pa.int32())}))
    return batches


def read(
    sizes: Sequence[int], *, batch_size: int, epochs: int = 3, seed: int = 1, rank: int = 0
) -> list[list[Batch]]:
    with (
        tempfile.TemporaryDirectory() as directory,
        Feed(
            iter(record_batches(sizes)),
            SCHEMA,
            batch_size=batch_size,
            seed=seed,
            rank=rank,
            directory=Path(directory),
        ) as feed,
    ):
        return [list(feed.epoch(epoch)) for epoch in range(1, epochs + 1)]


def ids_of(batches: Sequence[Batch]) -> list[int]:
    return [int(i) for batch in batches for i in batch.targets]


record_batch_sizes = st.lists(st.integers(0, 12), max_size=8)


@settings(max_examples=80, deadline=None)
@given(sizes=record_batch_sizes, batch_size=st.integers(1, 20))
def test_every_row_comes_exactly_once_an_epoch(sizes: list[int], batch_size: int) -> None:
    for batches in read(sizes, batch_size=batch_size):
        assert sorted(ids_of(batches)) == list(range(sum(sizes)))


@settings(max_examples=80, deadline=None)
@given(sizes=record_batch_sizes, batch_size=st.integers(1, 20))
def test_batches_are_full_but_for_the_last_and_only_the_last_says_so(
    sizes: list[int], batch_size: int
) -> None:
    full, tail = divmod(sum(sizes), batch_size)
    expected = [batch_size] * full + [tail] * (tail > 0)
    for batches in read(sizes, batch_size=batch_size):
        assert [batch.examples for batch in batches] == expected
        assert [batch.last for batch in batches] == [False] * (len(expected) - 1) + [True] * (
            len(expected) > 0
        )


@settings(max_examples=40, deadline=None)
@given(sizes=record_batch_sizes, batch_size=st.integers(1, 20))
def test_the_columns_of_a_row_stay_together(sizes: list[int], batch_size: int) -> None:
    for epoch in read(sizes, batch_size=batch_size):
        for batch in epoch:
            (wide,) = batch.features
            assert (wide.dtype, batch.targets.dtype) == (torch.float32, torch.int64)
            assert torch.equal(wide[:, 0], batch.targets.float())
            assert torch.equal(wide[:, 1], -batch.targets.float())


def test_epoch_one_keeps_the_order_of_arrival() -> None:
    first, *_ = read([3, 0, 5, 1], batch_size=4)
    assert ids_of(first) == list(range(9))


def test_later_epochs_follow_the_documented_permutation() -> None:
    epochs = read([30, 20], batch_size=8, epochs=4, seed=5, rank=3)
    for number, batches in enumerate(epochs[1:], start=2):
        order = permutation(50, seed=5, epoch=number, rank=3)
        assert ids_of(batches) == order.tolist()


def test_the_order_is_the_same_in_every_run() -> None:
    runs = [read([40], batch_size=7) for _ in range(2)]
    assert [ids_of(epoch) for epoch in runs[0]] == [ids_of(epoch) for epoch in runs[1]]


@given(rows=st.integers(0, 300), seed=st.integers(-(2**63), 2**63 - 1), epoch=st.integers(1, 999))
def test_a_permutation_holds_every_index_once(rows: int, seed: int, epoch: int) -> None:
    order = permutation(rows, seed=seed, epoch=epoch, rank=2)
    assert order.dtype is torch.int64
    assert sorted(order.tolist()) == list(range(rows))


def test_permutations_differ_by_seed_epoch_and_rank() -> None:
    orders = {
        tuple(permutation(40, seed=seed, epoch=epoch, rank=rank).tolist())
        for seed in range(6)
        for epoch in range(1, 7)
        for rank in range(6)
    }
    assert len(orders) == 6**3


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    read([20], batch_size=3)
    assert torch.equal(torch.rand(3), expected)


def test_the_source_is_exhausted_in_epoch_one() -> None:
    drained: list[bool] = []

    def source() -> Iterator[pa.RecordBatch]:
        yield from record_batches([4, 4])
        drained.append(True)

    with (
        tempfile.TemporaryDirectory() as directory,
        Feed(source(), SCHEMA, batch_size=4, seed=0, rank=0, directory=Path(directory)) as feed,
    ):
        list(feed.epoch(1))
        assert drained == [True]


def test_epoch_one_streams_and_does_not_wait_for_all_rows(tmp_path: Path) -> None:
    taken: list[int] = []

    def source() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(record_batches([4] * 10)):
            taken.append(number)
            yield batch

    with Feed(source(), SCHEMA, batch_size=4, seed=0, rank=0, directory=tmp_path) as feed:
        next(iter(feed.epoch(1)))
        assert len(taken) <= 3


class TestPartitionStore:
    """The store's files have no name and give back what was put in."""

    COLUMNS = (
        ColumnSpec("a", torch.float32, 3),
        ColumnSpec("b", torch.int64),
        ColumnSpec("c", torch.float64, 0),
    )

    def batch(self, rows: int) -> list[Tensor]:
        numbers = torch.arange(rows)
        return [
            torch.stack([numbers, numbers + 1, numbers + 2], dim=1).float(),
            numbers,
            torch.empty((rows, 0), dtype=torch.float64),
        ]

    def test_no_file_is_seen_in_the_directory_even_while_open(self, tmp_path: Path) -> None:
        store = PartitionStore(self.COLUMNS, tmp_path)
        store.append(self.batch(1000))
        store.tensors()
        assert list(tmp_path.iterdir()) == []
        store.close()
        assert list(tmp_path.iterdir()) == []

    @given(sizes=st.lists(st.integers(0, 30), max_size=5))
    @settings(deadline=None, max_examples=30)
    def test_rows_come_back_in_the_order_they_were_appended(self, sizes: list[int]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            store = PartitionStore(self.COLUMNS, Path(directory))
            for size in sizes:
                store.append(self.batch(size))
            columns = store.tensors()
            assert store.rows == sum(sizes)
            for position, column in enumerate(columns):
                spec = self.COLUMNS[position]
                expected = torch.cat(
                    [self.batch(size)[position] for size in sizes]
                    or [torch.empty((0, *spec.row_shape), dtype=spec.dtype)]
                )
                assert column.dtype is spec.dtype
                assert torch.equal(column, expected)
            store.close()

    def test_a_slice_that_is_not_contiguous_is_stored_as_it_reads(self, tmp_path: Path) -> None:
        store = PartitionStore((ColumnSpec("a", torch.float32, 2),), tmp_path)
        values = torch.arange(12.0).view(2, 6).t()[::2]
        store.append([values])
        assert torch.equal(store.tensors()[0], values)
        store.close()

    def test_closing_closes_the_files(self, tmp_path: Path) -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        store = PartitionStore(self.COLUMNS, tmp_path)
        store.append(self.batch(10))
        store.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


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
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=4).filter(any),
    batch_size=st.integers(1, 9),
)
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
        (ColumnSpec("numbers", torch.float32, 2), ColumnSpec("codes", torch.int64)),
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


@pytest.mark.parametrize("kind", [np.float64, np.int32, np.int64, np.bool_])
def test_batches_of_cuts_arrays_into_record_batches(kind: type) -> None:
    shard = batches_of(3, a=np.ones((8, 2), kind), b=np.arange(8))
    assert [batch.num_rows for batch in shard] == [3, 3, 2]
    assert shard[0].column(0).type == pa.list_(pa.from_numpy_dtype(kind))
    assert [i for batch in shard for i in batch.column(1).to_pylist()] == list(range(8))
