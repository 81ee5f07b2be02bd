"""The feed: every row exactly once an epoch, in an order that is reproducible."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from feeds import (
    ids_of,
    open_feed,
    read,
    record_batch_sizes,
    record_batches,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import permutation

from sparkdl.feed import minibatches
from sparkdl.feed.order import even_sizes


@settings(max_examples=80, deadline=None)
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
