"""What the feed hands out: minibatches, runs of rows, and their shapes."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from feeds import SCHEMA, ids_of, open_feed, read, record_batch_sizes, record_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import permutation

from sparkdl.feed import minibatches
from sparkdl.feed.feed import Feed
from sparkdl.feed.minibatches import prefetched
from sparkdl.feed.order import even_sizes
from sparkdl.feed.partition_store import PartitionStore


@settings(max_examples=80)
@given(
    sizes=record_batch_sizes,
    batch_size=st.integers(1, 20),
    chunk_bytes=st.sampled_from([64, 4 << 20]),
)
def test_every_row_comes_whole_and_once_an_epoch_in_batches_of_which_the_last_may_be_short(
    sizes: list[int], batch_size: int, chunk_bytes: int
) -> None:
    full, tail = divmod(sum(sizes), batch_size)
    expected = [batch_size] * full + [tail] * (tail > 0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(minibatches, "CHUNK_BYTES", chunk_bytes)
        epochs = read(sizes, batch_size=batch_size)
    for batches in epochs:
        assert sorted(ids_of(batches)) == list(range(sum(sizes)))
        assert [batch.examples for batch in batches] == expected
        assert [batch.last for batch in batches[-1:]] == [True] * bool(batches)
        assert not any(batch.last for batch in batches[:-1])
        for batch in batches:
            (wide,) = batch.features
            assert (wide.dtype, batch.targets.dtype) == (torch.float32, torch.int64)
            assert torch.equal(wide, torch.stack([batch.targets, -batch.targets], 1).float())


def test_every_epoch_follows_the_documented_permutation_also_if_it_is_repeated(
    tmp_path: Path,
) -> None:
    with open_feed(tmp_path, batch_size=8, seed=5, rank=3) as feed:
        feed.fill(record_batches([30, 20]))
        for number in (2, 1, 2, 3):
            order = permutation(50, seed=5, epoch=number, rank=3)
            assert ids_of(list(feed.epoch(number))) == order.tolist()


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


@settings(max_examples=60)
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


PREFETCHER = "sparkdl-prefetch_0"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_same_rows_from_pinned_memory(tmp_path: Path) -> None:
    pinned = PartitionStore(tmp_path)
    pinned.append(SCHEMA.of_lengths([2, None]).stored, [torch.rand(9, 2), torch.arange(9)])
    assert all(column.is_pinned() for column in pinned.take(torch.arange(9), pinned=True))
    pinned.close()
    found = []
    for device in ("cpu", "cuda"):
        with Feed(SCHEMA, batch_size=4, seed=1, rank=0, directory=tmp_path, device=device) as feed:
            feed.fill(record_batches([500]))
            found.append([b.targets for b in feed.epoch(2)])
    assert all(t.is_cuda for t in found[1])
    assert torch.equal(torch.cat(found[0]), torch.cat(found[1]).cpu())


def test_items_come_in_order_and_an_error_in_its_place() -> None:
    def source() -> Any:
        yield from range(20)
        raise ZeroDivisionError("at 20")

    items = prefetched(source())
    assert [next(items) for _ in range(20)] == list(range(20))
    with pytest.raises(ZeroDivisionError, match="at 20"):
        next(items)


def test_no_more_than_a_few_items_are_made_ahead() -> None:
    made: list[int] = []

    def source() -> Any:
        for item in range(1000):
            made.append(item)
            yield item

    items = prefetched(source())
    for _ in range(5):
        next(items)
    items.close()
    assert len(made) <= 5 + 4


def test_closing_early_ends_the_thread_and_the_source() -> None:
    items = prefetched(iter(range(10**9)))
    next(items)
    items.close()
    assert not [t for t in threading.enumerate() if t.name == PREFETCHER]
