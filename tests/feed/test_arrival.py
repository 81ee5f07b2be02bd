"""The first epoch on rows that still arrive: the minibatches of the store, but at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from feeds import SCHEMA, ids_of, open_feed, record_batch, record_batch_sizes, record_batches
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.feed import order
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import READ_AHEAD
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.protocols import Batch, ColumnSpec

ROW_BYTES = 2 * 4 + 8
"""Of ``SCHEMA``: two float32 and an int64."""
HELD = ColumnSpec("held", torch.bool)


class RefusedError(Exception):
    """The driver does not want these rows."""


streaming = partial(open_feed, rank=2, stream_first_epoch=True)


def accept(shard: ShardStatistics) -> None:
    """Find nothing wrong."""


@pytest.fixture
def blocks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda rows: monkeypatch.setattr(order, "BLOCK_BYTES", rows * ROW_BYTES)


def same(first: Batch, second: Batch) -> bool:
    return (
        first.last == second.last
        and torch.equal(first.targets, second.targets)
        and torch.equal(first.features[0], second.features[0])
    )


@settings(max_examples=150, deadline=None)
@given(
    sizes=record_batch_sizes,
    batch_size=st.integers(1, 9),
    block=st.integers(1, 30),
    drop_last=st.booleans(),
)
def test_minibatches_on_arrival_are_those_of_the_first_epoch_from_the_store(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    batch_size: int,
    block: int,
    drop_last: bool,
) -> None:
    with (
        pytest.MonkeyPatch.context() as patched,
        streaming(
            tmp_path_factory.mktemp("feed"), batch_size=batch_size, drop_last=drop_last
        ) as feed,
    ):
        patched.setattr(order, "BLOCK_BYTES", block * ROW_BYTES)
        feed.read_first(record_batches(sizes))
        arrived = list(feed.arriving(accept))
        stored = list(feed.epoch(1))
        second = list(feed.epoch(2))
    assert all(map(same, arrived, stored))
    assert len(arrived) == len(stored)
    assert [batch.last for batch in arrived] == [False] * (len(arrived) - 1) + [True] * bool(
        arrived
    )
    rows = sum(sizes)
    used = rows - rows % batch_size if drop_last else rows
    assert len(ids_of(arrived)) == used
    assert set(ids_of(arrived)) <= set(range(rows))
    assert len(set(ids_of(arrived))) == used == len(ids_of(second))


def test_each_block_holds_the_rows_that_arrived_after_each_other_in_another_order(
    tmp_path: Path, blocks_of: Callable[[int], None]
) -> None:
    blocks_of(20)
    with streaming(tmp_path) as feed:
        feed.read_first(record_batches([7] * 10))
        ids = ids_of(list(feed.arriving(accept)))
    blocks = [ids[start : start + 20] for start in range(0, 70, 20)]
    assert [sorted(block) for block in blocks] == [
        list(range(start, min(start + 20, 70))) for start in range(0, 70, 20)
    ]
    assert all(block != sorted(block) for block in blocks)


def test_a_block_has_whole_minibatches_and_one_at_least() -> None:
    assert order.block_sizes(1 << 20, 32, 1000)[0] == 16 * 1024 * 1024 // 32000 * 32
    assert order.block_sizes(1 << 20, 64, 150 * 1024 * 1024)[0] == 64


def test_minibatches_come_long_before_the_last_row(
    tmp_path: Path, blocks_of: Callable[[int], None]
) -> None:
    """Of two blocks, before the first is known not to be the last; and what is read ahead."""
    blocks_of(8)
    handed_over = 0
    enough = 2 + READ_AHEAD + 2

    def source() -> Iterator[pa.RecordBatch]:
        nonlocal handed_over
        for batch in record_batches([8] * 50):
            handed_over += 1
            yield batch

    with streaming(tmp_path) as feed:
        first = feed.read_first(source())
        assert (first.complete, first.rows) == (False, 16)
        next(batches := feed.arriving(accept))
        assert handed_over <= enough
        assert not feed.complete
        assert len(list(batches)) == 99
        assert feed.complete


def test_what_was_left_unread_is_read_into_the_store_and_trained_on_from_there(
    tmp_path: Path, blocks_of: Callable[[int], None]
) -> None:
    blocks_of(8)
    told: list[int] = []
    with streaming(tmp_path) as feed:
        feed.read_first(record_batches([5] * 10), told.append)
        before = list(islice(feed.arriving(accept), 5))
        shard = feed.read_rest()
        after = list(feed.epoch(1, first_step=5))
    assert shard == replace(shard, rows=50, complete=True)
    assert told == list(range(5, 55, 5))
    assert sorted(ids_of(before + after)) == list(range(50))


def test_no_row_is_lost_when_a_heartbeat_cannot_be_given(
    tmp_path: Path, blocks_of: Callable[[int], None]
) -> None:
    """The connection to the averager may break in it; the worker connects again and goes on."""

    def breaks(rows: int) -> None:
        if rows == 25:
            raise ConnectionResetError

    blocks_of(8)
    with streaming(tmp_path) as feed:
        feed.read_first(record_batches([5] * 10), breaks)
        with pytest.raises(ConnectionResetError):
            list(feed.arriving(accept))
        assert feed.read_rest().rows == 50
        assert sorted(ids_of(list(feed.epoch(1)))) == list(range(50))


def test_all_that_was_found_is_shown_before_the_last_minibatch(
    tmp_path: Path, blocks_of: Callable[[int], None]
) -> None:
    blocks_of(8)
    shown: list[ShardStatistics] = []
    with streaming(tmp_path) as feed:
        feed.read_first(record_batches([8] * 3))
        for batch in feed.arriving(shown.append):
            assert not batch.last or shown[-1].complete
    assert shown[-1].rows == 24
    assert shown[-1].columns == feed.read_rest().columns


def test_rows_that_fit_one_block_are_complete_at_first_and_not_shown_again(tmp_path: Path) -> None:
    with streaming(tmp_path) as feed:
        assert feed.read_first(record_batches([9])).complete
        shown: list[ShardStatistics] = []
        assert len(list(feed.arriving(shown.append))) == 3
        assert shown == []


def test_rows_that_cannot_be_tensors_are_shown_before_their_block_is_trained_on(
    tmp_path: Path, blocks_of: Callable[[int], None]
) -> None:
    blocks_of(8)
    bad = pa.record_batch({"wide": pa.array([[1.0, 2.0], [3.0, None]]), "id": pa.array([24, 25])})
    shown: list[ShardStatistics] = []

    def refuse(shard: ShardStatistics) -> None:
        shown.append(shard)
        if not shard.columns[0].sound:
            raise RefusedError

    with streaming(tmp_path) as feed:
        feed.read_first([*record_batches([8] * 3), bad, *record_batches([100])])
        batches = feed.arriving(refuse)
        trained = list(islice(batches, 4))
        with pytest.raises(RefusedError):
            trained += list(batches)
    assert set(ids_of(trained)) <= set(range(24))
    assert shown[-1].rows == 26
    assert shown[-1].columns[0].where("null_elements") == "row 25 of partition 2"


def test_a_class_that_was_not_seen_before_is_shown_before_it_is_trained_on(
    tmp_path: Path, blocks_of: Callable[[int], None]
) -> None:
    blocks_of(4)
    log: list[float] = []
    labels = [0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 7, 1, 0, 0, 1, 1]
    source = [record_batch(labels[start : start + 4]) for start in range(0, 20, 4)]
    with streaming(tmp_path) as feed:
        feed.read_first(source)
        for batch in feed.arriving(lambda shard: log.append(-shard.columns[1].largest)):
            log.extend(ids_of([batch]))
    assert [entry for entry in log if entry < 0] == [-7, -7], "once new, once in all rows"
    assert log.index(-7) < log.index(7)


def test_new_extremes_of_fractions_are_not_worth_a_question(
    tmp_path: Path, blocks_of: Callable[[int], None]
) -> None:
    blocks_of(4)
    schema = FeedSchema((ColumnSpec("x", torch.float32),), ColumnSpec("y", torch.int64))
    source = [
        pa.record_batch({"x": pa.array([float(i)] * 4), "y": pa.array([0, 1, 0, 1])})
        for i in range(20)
    ]
    shown: list[ShardStatistics] = []
    with streaming(tmp_path, schema=schema) as feed:
        feed.read_first(source)
        assert len(list(feed.arriving(shown.append))) == 20
    assert [shard.complete for shard in shown] == [True]


def test_held_out_rows_are_kept_apart_while_the_others_are_trained_on(
    tmp_path: Path, blocks_of: Callable[[int], None]
) -> None:
    blocks_of(8)
    schema = replace(SCHEMA, validation=HELD)
    source = [
        batch.append_column("held", pa.array([i % 3 == 0 for i in batch["id"].to_pylist()]))
        for batch in record_batches([7] * 6)
    ]
    with streaming(tmp_path, schema=schema) as feed:
        feed.read_first(source)
        trained = ids_of(list(feed.arriving(accept)))
        held_out = ids_of(list(feed.held_out()))
    assert sorted(trained) == [i for i in range(42) if i % 3]
    assert held_out == [i for i in range(42) if i % 3 == 0]


def test_a_transform_draws_the_same_numbers_on_arrival_as_from_the_store(
    tmp_path: Path, blocks_of: Callable[[int], None]
) -> None:
    def noisy(batch: Batch) -> Batch:
        (wide,) = batch.features
        return replace(batch, features=(wide + torch.rand_like(wide),))

    blocks_of(8)
    with streaming(tmp_path, transform=noisy) as feed:
        feed.read_first(record_batches([7] * 6))
        arrived = list(feed.arriving(accept))
        assert all(map(same, arrived, feed.epoch(1)))
