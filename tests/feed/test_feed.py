"""The feed: every row exactly once an epoch, in an order that is reproducible."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import Data, classification, enough_rows, make_job, mlp

from sparkdl.feed.columns import ORDER_COLUMN, FeedSchema
from sparkdl.feed.facts import ColumnFacts, ShardFacts
from sparkdl.feed.feed import Feed
from sparkdl.feed.shuffle import even_sizes, permutation
from sparkdl.feed.store import PartitionStore
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec
from sparkdl.testing import batches_of, run_world

SCHEMA = FeedSchema((ColumnSpec("wide", torch.float32, (UNKNOWN,)),), ColumnSpec("id", torch.int64))


def record_batch(ids: Sequence[int], keys: Sequence[int] | None = None) -> pa.RecordBatch:
    """Row i is ([i, -i], i), and its place in the order where keys are given."""
    columns = {
        "wide": pa.array([[i, -i] for i in ids], pa.list_(pa.float64())),
        "id": pa.array(ids, pa.int32()),
    }
    if keys is not None:
        columns[ORDER_COLUMN] = pa.array(keys, pa.int64())
    return pa.record_batch(columns)


def record_batches(sizes: Sequence[int]) -> list[pa.RecordBatch]:
    """Record batches of the given sizes; ids count up."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        record_batch(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)
    ]


def open_feed(
    directory: Path,
    *,
    batch_size: int = 4,
    seed: int = 1,
    rank: int = 0,
    schema: FeedSchema = SCHEMA,
) -> Feed:
    return Feed(schema, batch_size=batch_size, seed=seed, rank=rank, directory=directory)


def epochs_of(
    source: Iterable[pa.RecordBatch], *, epochs: int = 3, **settings: Any
) -> list[list[Batch]]:
    with tempfile.TemporaryDirectory() as name, open_feed(Path(name), **settings) as feed:
        feed.fill(source)
        return [list(feed.epoch(epoch)) for epoch in range(1, epochs + 1)]


def read(sizes: Sequence[int], **settings: Any) -> list[list[Batch]]:
    return epochs_of(record_batches(sizes), **settings)


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


def test_the_source_is_exhausted_when_the_feed_is_filled(tmp_path: Path) -> None:
    drained: list[bool] = []

    def source() -> Iterator[pa.RecordBatch]:
        yield from record_batches([4, 4])
        drained.append(True)

    with open_feed(tmp_path) as feed:
        feed.fill(source())
        assert drained == [True]


def test_the_rows_read_so_far_are_told_while_they_are_read(tmp_path: Path) -> None:
    log: list[str] = []

    def source() -> Iterator[pa.RecordBatch]:
        for batch in record_batches([4, 0, 3]):
            log.append(f"{batch.num_rows} rows handed over")
            yield batch

    with open_feed(tmp_path) as feed:
        feed.fill(source(), lambda rows: log.append(f"{rows} rows read"))
    told = [line for line in log if line.endswith("read")]
    assert told == ["4 rows read", "7 rows read"]
    assert log.index("4 rows read") < log.index("3 rows handed over")


def test_an_epoch_can_be_repeated(tmp_path: Path) -> None:
    with open_feed(tmp_path) as feed:
        feed.fill(record_batches([9]))
        epochs = [ids_of(list(feed.epoch(number))) for number in (2, 1, 2)]
    assert epochs[1] == list(range(9))
    assert epochs[0] == epochs[2] != epochs[1]


class TestOrder:
    """Rows that say where they belong give the same minibatches however they arrive."""

    @staticmethod
    def arrivals(draw: Callable[[Any], Any], rows: list[tuple[int, int]]) -> list[pa.RecordBatch]:
        """(key, id) pairs in a drawn order, in record batches of drawn sizes."""
        shuffled = draw(st.permutations(rows))
        cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
        return [
            record_batch([i for _, i in piece], [key for key, _ in piece])
            for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)
            for piece in [shuffled[start:stop]]
        ]

    @settings(max_examples=60, deadline=None)
    @given(
        data=st.data(),
        keys=st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=20),
        batch_size=st.integers(1, 7),
    )
    def test_rows_in_any_order_of_arrival_give_the_same_minibatches(
        self, data: Any, keys: list[int], batch_size: int
    ) -> None:
        rows = list(zip(keys, range(len(keys)), strict=True))
        ordered = [i for _, i in sorted(rows)]
        # the same rows, arriving in the wanted order and without keys, are the oracle
        expected = epochs_of([record_batch(ordered)], batch_size=batch_size)

        found = epochs_of(self.arrivals(data.draw, rows), batch_size=batch_size)

        for mine, other in zip(found, expected, strict=True):
            assert [batch.last for batch in mine] == [batch.last for batch in other]
            for batch, twin in zip(mine, other, strict=True):
                assert torch.equal(batch.targets, twin.targets)
                assert len(batch.features) == 1
                assert torch.equal(batch.features[0], twin.features[0])

    def test_epoch_one_is_in_the_order_of_the_keys(self) -> None:
        batches = [record_batch([0, 1], [5, -3]), record_batch([2, 3, 4], [9, 0, -7])]
        first, *_ = epochs_of(batches, batch_size=2)
        assert ids_of(first) == [4, 1, 3, 0, 2]

    def test_later_epochs_permute_the_ordered_rows(self) -> None:
        keys = list(range(30, 0, -1))
        _, second, third = epochs_of([record_batch(range(30), keys)], seed=4, rank=2)
        in_order = np.arange(29, -1, -1)
        for number, epoch in ((2, second), (3, third)):
            shuffled = permutation(30, seed=4, epoch=number, rank=2).numpy()
            assert ids_of(epoch) == in_order[shuffled].tolist()

    def test_equal_keys_keep_the_order_of_arrival(self) -> None:
        keys = [7] * 40 + [1] * 3
        first, *_ = epochs_of([record_batch(range(43), keys)])
        assert ids_of(first) == [40, 41, 42, *range(40)]


GOOD = ([[1.0, 2.0]] * 3, [1.0, 2.0, 3.0])
BAD: dict[str, tuple[tuple[list[Any], list[Any]], list[tuple[int, ColumnFacts]]]] = {
    "a null label": (
        ([[1.0, 2.0]] * 3, [4.0, None, None]),
        [(1, ColumnFacts(nulls=2, smallest=1, largest=4))],
    ),
    "a null array": (
        ([[1.0, 2.0], None, [3.0, 4.0]], [1.0] * 3),
        [(0, ColumnFacts(nulls=1, shortest=2, longest=2))],
    ),
    "a null element": (
        ([[1.0, None], [None, None], [3.0, 4.0]], [1.0] * 3),
        [(0, ColumnFacts(null_elements=2, shortest=2, longest=2))],
    ),
    "a short array": (
        ([[1.0, 2.0], [1.0], [3.0, 4.0]], [1.0] * 3),
        [(0, ColumnFacts(shortest=1, longest=2))],
    ),
    "arrays of another length than those before": (
        ([[1.0, 2.0, 3.0]] * 3, [1.0] * 3),
        [(0, ColumnFacts(shortest=2, longest=3))],
    ),
    "a fraction": (
        ([[1.0, 2.0]] * 3, [1.0, 2.5, 0.5]),
        [(1, ColumnFacts(fractions=2, smallest=0.5, largest=3))],
    ),
    "several things": (
        ([[1.0], None, [3.0, None]], [None, 2.0, 3.5]),
        [
            (0, ColumnFacts(nulls=1, null_elements=1, shortest=1, longest=2)),
            (1, ColumnFacts(nulls=1, fractions=1, smallest=1, largest=3.5)),
        ],
    ),
}


def rows_of(wide: list[Any], label: list[Any]) -> pa.RecordBatch:
    arrays = [pa.array(wide, pa.list_(pa.float64())), pa.array(label, pa.float64())]
    return pa.record_batch(arrays, names=["wide", "id"])


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("times", [1, 3])
def test_bad_rows_are_counted_to_the_last_one(tmp_path: Path, name: str, times: int) -> None:
    bad, expected = BAD[name]
    source = [rows_of(*GOOD), *[rows_of(*bad)] * times, rows_of(*GOOD)]
    with open_feed(tmp_path) as feed:
        facts = feed.fill(source)
    assert facts.rows == 3 * (2 + times)
    counted = ("nulls", "null_elements", "fractions")
    for column, found in expected:
        scaled = {field: times * getattr(found, field) for field in counted}
        assert facts.columns[column] == dataclasses.replace(found, **scaled)


def test_good_rows_are_told_with_their_number_length_and_range(tmp_path: Path) -> None:
    with open_feed(tmp_path) as feed:
        facts = feed.fill(record_batches([3, 0, 4]))
    assert facts == ShardFacts(
        7, (ColumnFacts(shortest=2, longest=2), ColumnFacts(smallest=0, largest=6))
    )


def test_the_order_is_not_among_the_facts(tmp_path: Path) -> None:
    with open_feed(tmp_path) as feed:
        facts = feed.fill([record_batch([4, 5], [1, 0])])
    assert len(facts.columns) == 2


def test_a_feed_without_rows_has_epochs_without_minibatches(tmp_path: Path) -> None:
    with open_feed(tmp_path) as feed:
        assert feed.fill([]) == ShardFacts(0, (ColumnFacts(), ColumnFacts()))
        assert [list(feed.epoch(epoch)) for epoch in (1, 2)] == [[], []]


class TestPartitionStore:
    """The store's files have no name and give back what was put in."""

    COLUMNS = (
        ColumnSpec("a", torch.float32, (3,)),
        ColumnSpec("b", torch.int64),
        ColumnSpec("c", torch.float64, (0,)),
    )

    def batch(self, rows: int) -> list[Tensor]:
        numbers = torch.arange(rows)
        return [
            torch.stack([numbers, numbers + 1, numbers + 2], dim=1).float(),
            numbers,
            torch.empty((rows, 0), dtype=torch.float64),
        ]

    def test_no_file_is_seen_in_the_directory_even_while_open(self, tmp_path: Path) -> None:
        store = PartitionStore(tmp_path)
        store.append(self.COLUMNS, self.batch(1000))
        store.slice(0, 1000)
        assert list(tmp_path.iterdir()) == []
        store.close()
        assert list(tmp_path.iterdir()) == []

    @given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5))
    @settings(deadline=None, max_examples=30)
    def test_rows_come_back_in_the_order_they_were_appended(self, sizes: list[int]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            store = PartitionStore(Path(directory))
            for size in sizes:
                store.append(self.COLUMNS, self.batch(size))
            columns = store.slice(0, store.rows)
            assert store.rows == sum(sizes)
            for position, spec in enumerate(self.COLUMNS):
                expected = torch.cat([self.batch(size)[position] for size in sizes])
                assert columns[position].dtype is spec.dtype
                assert torch.equal(columns[position], expected)
            assert len(columns) == len(self.COLUMNS)
            store.close()

    def test_a_store_without_rows_has_no_columns(self, tmp_path: Path) -> None:
        store = PartitionStore(tmp_path)
        assert (store.rows, store.slice(0, 0)) == (0, [])
        store.close()

    def test_a_slice_that_is_not_contiguous_is_stored_as_it_reads(self, tmp_path: Path) -> None:
        store = PartitionStore(tmp_path)
        values = torch.arange(12.0).view(2, 6).t()[::2]
        store.append([ColumnSpec("a", torch.float32, (2,))], [values])
        assert torch.equal(store.slice(0, 3)[0], values)
        store.close()

    def test_closing_closes_the_files(self, tmp_path: Path) -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        store = PartitionStore(tmp_path)
        store.append(self.COLUMNS, self.batch(10))
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
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=4).filter(enough_rows),
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


def test_a_run_on_ordered_rows_does_not_depend_on_their_arrival() -> None:
    data = classification([17, 12])
    job = make_job(mlp(), epochs=3)

    def train(seed: int) -> dict[str, Tensor]:
        shards = []
        for rank in range(2):
            features, targets = data.shard(rank)
            arrival = np.random.default_rng([seed, rank]).permutation(len(targets))
            shards.append(
                batches_of(
                    5, features=features[arrival], label=targets[arrival], order=arrival * 10
                )
            )
        return run_world(job, shards).module.state_dict()

    expected = run_world(job, data.shards()).module.state_dict()
    for seed in (1, 2):
        found = train(seed)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


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


@pytest.mark.parametrize("kind", [np.float64, np.int32, np.int64, np.bool_])
def test_batches_of_cuts_arrays_into_record_batches(kind: type) -> None:
    shard = batches_of(3, a=np.ones((8, 2), kind), b=np.arange(8))
    assert [batch.num_rows for batch in shard] == [3, 3, 2]
    assert shard[0].column(0).type == pa.list_(pa.from_numpy_dtype(kind))
    assert [i for batch in shard for i in batch.column(1).to_pylist()] == list(range(8))


@settings(max_examples=60, deadline=None)
@given(sizes=record_batch_sizes, steps=st.integers(1, 12), epoch=st.integers(1, 3))
def test_an_even_epoch_has_every_row_once_in_so_many_batches_of_one_size_give_or_take_one(
    sizes: list[int], steps: int, epoch: int
) -> None:
    with tempfile.TemporaryDirectory() as name, open_feed(Path(name)) as feed:
        feed.fill(record_batches(sizes))
        feed.settle([2, None])
        batches = list(feed.even_epoch(epoch, steps))
        plain = [i for batch in feed.epoch(epoch) for i in batch.targets.tolist()]
    assert [i for batch in batches for i in batch.targets.tolist()] == plain
    counts = [batch.examples for batch in batches]
    assert counts == [even_sizes(sum(sizes), step, steps) for step in range(steps)]
    assert max(counts) - min(counts) <= 1
    assert [batch.last for batch in batches] == [False] * (steps - 1) + [True]
    assert {batch.features[0].shape[1:] for batch in batches} == {(2,)}


@given(rows=st.lists(st.integers(0, 50), min_size=1, max_size=5), steps=st.integers(1, 20))
def test_even_sizes_of_several_workers_are_those_of_each(rows: list[int], steps: int) -> None:
    together = np.array([even_sizes(np.array(rows), step, steps) for step in range(steps)])
    alone = [[even_sizes(count, step, steps) for count in rows] for step in range(steps)]
    assert together.tolist() == alone
    assert together.sum(axis=0).tolist() == rows
