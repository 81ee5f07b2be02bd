"""What the feed hands out, in which shapes, what it leaves out, and what it counts."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every_row
from feeds import SCHEMA, ids_of, open_feed, read, record_batch_sizes, record_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import by_pillow, drawn, encoded
from torch import Tensor
from toys import permutation

from sparkdl.encodings.any_size import FITS, AnySize
from sparkdl.errors import DataError
from sparkdl.feed import minibatches
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.decode import DECODED_BYTES, small_parts
from sparkdl.feed.feed import Feed, FeedOptions
from sparkdl.feed.minibatches import prefetched
from sparkdl.feed.order import even_sizes
from sparkdl.feed.packed import ORDER_COLUMN
from sparkdl.feed.partition_store import PartitionStore
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import (
    DataStatistics,
    ShardStatistics,
    check_statistics,
    left_out,
)
from sparkdl.protocols import ColumnSpec, Padding


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


PHOTO = ColumnSpec("photo", torch.uint8, (3, 8, 8), FITS["crop"])
NUMBERS = ColumnSpec("numbers", torch.float32, (2,))
NUMBER = ColumnSpec("number", torch.float32)
TOKENS = ColumnSpec("tokens", torch.int64, (-1,), padding=Padding(0.0))
LABEL = ColumnSpec("y", torch.int64)


def filled(
    schema: FeedSchema, directory: Path, batches: list[dict[str, pa.Array]], **options: Any
) -> tuple[DataStatistics, list[int]]:
    """What was found, and the labels of the rows that are trained on and validated with."""
    given = FeedOptions(skip_invalid=True, **options)
    with Feed(schema, batch_size=2, seed=1, rank=0, directory=directory, options=given) as feed:
        rows = [pa.record_batch(list(each.values()), list(each)) for each in batches]
        statistics = DataStatistics.of([feed.fill(rows)])
        labels: list[int] = []
        for batch in [*feed.epoch(1), *feed.held_out()]:
            assert isinstance(batch.targets, Tensor)
            labels += batch.targets.tolist()
        return statistics, sorted(labels)


@every_row(
    (NUMBER, [1.0, None, float("nan"), 2.0, float("-inf")], [0, 3], "null, NaN or infinity"),
    (NUMBER, [1.0, 2.0, 3.0, 4.0, None], [0, 1, 2, 3], "null, NaN or infinity"),
    (
        NUMBERS,
        [[1.0, 2.0], [None, 1.0], [3.0, 4.0], None, [0.0, float("nan")]],
        [0, 2],
        "null, NaN or infinity",
    ),
    (
        NUMBERS,  # as Parquet files that were written from fixed-size lists hold them
        pa.array([[1.0, 2.0], None, [None, 1.0], [3.0, 4.0], None], pa.list_(pa.float32(), 2)).cast(
            pa.list_(pa.float32())
        ),
        [0, 3],
        "null, NaN or infinity",
    ),
    (TOKENS, [[1], [], [1, None], None, [1, 2, 3]], [0, 1, 4], "null, NaN or infinity"),
)
def test_nulls_and_numbers_that_are_none_are_left_out(
    tmp_path: Path, spec: ColumnSpec, values: Any, left: list[int], reason: str
) -> None:
    given = pa.array(values) if isinstance(values, list) else values
    rows = {spec.name: given, "y": pa.array(range(5))}
    statistics, labels = filled(FeedSchema((spec,), LABEL), tmp_path, [rows])
    assert labels == left
    assert (statistics.rows, statistics.skipped) == (len(left), 5 - len(left))
    assert statistics.columns[0].not_finite == statistics.columns[0].nulls == 0
    check_statistics(statistics, (spec, LABEL))
    assert reason in left_out(statistics, (spec, LABEL))


def photos(*broken: int, rows: int = 6) -> pa.Array:
    return pa.array(
        [b"no" if i in broken else encoded(drawn(20 + i, 30), "PNG") for i in range(rows)]
    )


def test_broken_images_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    batches = [
        {"photo": photos(), "number": pa.array([1.0] * 6), "y": pa.array(range(6))},
        {
            "photo": photos(1, 4),
            "number": pa.array([0.0, 1.0, 2.0, None, float("nan"), 3.0]),
            "y": pa.array(range(6, 12)),
        },
        {"photo": photos(0, 1, 2, 3, 4, 5), "number": pa.array([1.0] * 6), "y": pa.array(range(6))},
    ]
    schema = FeedSchema((PHOTO, NUMBER), LABEL)
    statistics, labels = filled(schema, tmp_path, batches)
    assert labels == [0, 1, 2, 3, 4, 5, 6, 8, 11]
    told = left_out(statistics, schema.columns)
    assert told.startswith(
        "handleInvalid='skip' left out 9 of 18 rows: 8 because of column 'photo'"
    )
    assert "the first, row 7 of partition 0, is not a valid image: " in told
    assert "2 because of column 'number' (the first, row 9 of partition 0, holds a null" in told


def test_an_image_is_decoded_once_however_many_epochs_it_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    picture = AnySize.picture

    def counted(self: AnySize, *given: Any) -> Any:
        decoded.append(1)
        return picture(self, *given)

    monkeypatch.setattr(AnySize, "picture", counted)
    schema = FeedSchema((PHOTO,), LABEL)
    rows = pa.record_batch([photos(), pa.array(range(6))], ["photo", "y"])
    expected = [by_pillow(each.as_py(), 3, "crop", (8, 8)) for each in rows["photo"]]
    with Feed(schema, batch_size=4, seed=1, rank=0, directory=tmp_path) as feed:
        feed.fill([rows])
        for epoch in map(feed.epoch, (1, 2, 3)):
            seen = 0
            for batch in epoch:
                assert isinstance(batch.targets, Tensor)
                for pixels, label in zip(batch.features[0], batch.targets.tolist(), strict=True):
                    assert np.array_equal(pixels.numpy(), expected[label])
                    seen += 1
            assert seen == 6
    assert len(decoded) == 6


def test_the_order_the_weights_and_the_side_of_other_rows_stay_theirs(tmp_path: Path) -> None:
    schema = FeedSchema(
        (PHOTO,),
        LABEL,
        weight=ColumnSpec("w", torch.float64),
        validation=ColumnSpec("held", torch.bool),
    )
    columns = {
        "photo": photos(1, 4),
        "y": pa.array(range(6)),
        "w": pa.array([1.0, 100.0, 2.0, 3.0, 100.0, 4.0]),
        "held": pa.array([False, True, True, False, False, False]),
        ORDER_COLUMN: pa.array([5, 4, 3, 2, 1, 0]),
    }
    statistics, labels = filled(schema, tmp_path, [columns])
    assert labels == [0, 2, 3, 5]
    assert (statistics.rows, statistics.held_out, statistics.weight) == (3, 1, 8.0)
    assert "left out 2 of 6 rows" in left_out(statistics, schema.columns)
    by_content = {**columns, ORDER_COLUMN: pa.nulls(6)}
    assert filled(schema, tmp_path, [by_content])[1] == labels


def test_a_table_of_nothing_but_broken_images_is_refused(tmp_path: Path) -> None:
    schema = FeedSchema((PHOTO,), LABEL)
    rows = {"photo": photos(0, 1, 2, 3, 4, 5), "y": pa.array(range(6))}
    statistics, labels = filled(schema, tmp_path, [rows])
    assert labels == []
    with pytest.raises(DataError, match=r"nothing to train on: .* left out 6 of 6 rows: 6 because"):
        check_statistics(statistics, schema.columns)


def test_labels_are_not_features_and_are_refused_as_ever(tmp_path: Path) -> None:
    schema = FeedSchema((PHOTO,), LABEL)
    options = FeedOptions(skip_invalid=True)
    with Feed(schema, batch_size=2, seed=1, rank=0, directory=tmp_path, options=options) as feed:
        rows = pa.record_batch([photos(1), pa.array([0, None, 2, None, 4, 5])], ["photo", "y"])
        statistics = DataStatistics.of([feed.fill([rows])])
    with pytest.raises(
        DataError, match=r"'y' has 1 null value in .*first is row 3 of part"
    ) as caught:
        check_statistics(statistics, schema.columns, len(schema.features))
    assert "handleInvalid" not in str(caught.value)


def test_a_record_batch_is_decoded_in_parts_of_little_memory() -> None:
    large = ColumnSpec("photo", torch.uint8, (3, 1024, 1024), FITS["crop"])
    rows = pa.array([b""] * 100)
    sizes = [len(part[0]) for part in small_parts([rows, pa.array(range(100))], [large])]
    assert sum(sizes) == 100
    assert max(sizes) * 3 * 1024 * 1024 <= DECODED_BYTES


def test_a_feed_without_rows_has_epochs_without_minibatches(tmp_path: Path) -> None:
    with open_feed(tmp_path) as feed:
        assert feed.fill([]) == ShardStatistics(0, (ColumnStatistics(), ColumnStatistics()))
        assert [list(feed.epoch(epoch)) for epoch in (1, 2)] == [[], []]
