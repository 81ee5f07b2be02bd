"""Rows that are left out, and what a feed counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from feeds import open_feed
from pictures import by_pillow, drawn, encoded

from sparkdl.encodings.any_size import FITS, AnySize
from sparkdl.errors import DataError
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.decode import DECODED_BYTES, small_parts
from sparkdl.feed.packed import ORDER_COLUMN
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import (
    DataStatistics,
    ShardStatistics,
    check_statistics,
    left_out,
)
from sparkdl.protocols import ColumnSpec, Padding

PHOTO = ColumnSpec("photo", torch.uint8, (3, 8, 8), FITS["crop"])
NUMBERS = ColumnSpec("numbers", torch.float32, (2,))
NUMBER = ColumnSpec("number", torch.float32)
TOKENS = ColumnSpec("tokens", torch.int64, (-1,), padding=Padding(0.0))
LABEL = ColumnSpec("y", torch.int64)
SCHEMA = FeedSchema((PHOTO,), LABEL)
PAIRS = [[1.0, 2.0], None, [None, 1.0], [3.0, 4.0], None]


def filled(
    schema: FeedSchema, directory: Path, batches: list[dict[str, pa.Array]], **options: Any
) -> tuple[DataStatistics, list[int]]:
    """What was found, and the labels of the rows that are trained on and validated with."""
    with open_feed(directory, schema, 2, skip_invalid=True, **options) as feed:
        rows = [pa.record_batch(list(each.values()), list(each)) for each in batches]
        statistics = DataStatistics.of([feed.fill(rows)])
        labels: list[int] = []
        for batch in [*feed.epoch(1), *feed.held_out()]:
            labels += batch.targets.tolist()
        return statistics, sorted(labels)


@every(
    ("spec", "values", "left"),
    [
        (NUMBER, [1.0, None, float("nan"), 2.0, float("-inf")], [0, 3]),
        (NUMBER, [1.0, 2.0, 3.0, 4.0, None], [0, 1, 2, 3]),
        (NUMBERS, [[1.0, 2.0], [None, 1.0], [3.0, 4.0], None, [0.0, float("nan")]], [0, 2]),
        # as Parquet files that were written from fixed-size lists hold them
        (NUMBERS, pa.array(PAIRS, pa.list_(pa.float32(), 2)).cast(pa.list_(pa.float32())), [0, 3]),
        (TOKENS, [[1], [], [1, None], None, [1, 2, 3]], [0, 1, 4]),
    ],
)
def test_nulls_and_numbers_that_are_none_are_left_out(
    tmp_path: Path, spec: ColumnSpec, values: Any, left: list[int]
) -> None:
    given = pa.array(values) if isinstance(values, list) else values
    rows = {spec.name: given, "y": pa.array(range(5))}
    statistics, labels = filled(FeedSchema((spec,), LABEL), tmp_path, [rows])
    assert labels == left
    assert (statistics.rows, statistics.skipped) == (len(left), 5 - len(left))
    assert statistics.columns[0].not_finite == statistics.columns[0].nulls == 0
    check_statistics(statistics, (spec, LABEL))
    assert "null, NaN or infinity" in left_out(statistics, (spec, LABEL))


def photos(*broken: int, rows: int = 6) -> pa.Array:
    files = (b"no" if i in broken else encoded(drawn(20 + i, 30), "PNG") for i in range(rows))
    return pa.array(files)


def test_broken_images_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    batches = [
        {"photo": photos(*broken), "number": pa.array(numbers), "y": pa.array(labels)}
        for broken, numbers, labels in (
            ((), [1.0] * 6, range(6)),
            ((1, 4), [0.0, 1.0, 2.0, None, float("nan"), 3.0], range(6, 12)),
            (range(6), [1.0] * 6, range(6)),
        )
    ]
    schema = FeedSchema((PHOTO, NUMBER), LABEL)
    statistics, labels = filled(schema, tmp_path, batches)
    assert labels == [0, 1, 2, 3, 4, 5, 6, 8, 11]
    told = left_out(statistics, schema.columns)
    assert told.startswith("handleInvalid='skip' left out 9 of 18 rows: 8 because of column 'pho")
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
    rows = pa.record_batch([photos(), pa.array(range(6))], ["photo", "y"])
    expected = [by_pillow(each.as_py(), 3, "crop", (8, 8)) for each in rows["photo"]]
    with open_feed(tmp_path, SCHEMA) as feed:
        feed.fill([rows])
        for epoch in map(feed.epoch, (1, 2, 3)):
            seen = 0
            for batch in epoch:
                for pixels, label in zip(batch.features[0], batch.targets.tolist(), strict=True):
                    assert np.array_equal(pixels.numpy(), expected[label])
                    seen += 1
            assert seen == 6
    assert len(decoded) == 6


def test_the_order_the_weights_and_the_side_of_other_rows_stay_theirs(tmp_path: Path) -> None:
    weight, held = ColumnSpec("w", torch.float64), ColumnSpec("held", torch.bool)
    schema = replace(SCHEMA, weight=weight, validation=held)
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
    rows = {"photo": photos(0, 1, 2, 3, 4, 5), "y": pa.array(range(6))}
    statistics, labels = filled(SCHEMA, tmp_path, [rows])
    assert labels == []
    with pytest.raises(DataError, match=r"nothing to train on: .* left out 6 of 6 rows: 6 because"):
        check_statistics(statistics, SCHEMA.columns)


def test_labels_are_not_features_and_are_refused_as_ever(tmp_path: Path) -> None:
    with open_feed(tmp_path, SCHEMA, skip_invalid=True) as feed:
        rows = pa.record_batch([photos(1), pa.array([0, None, 2, None, 4, 5])], ["photo", "y"])
        statistics = DataStatistics.of([feed.fill([rows])])
    message = r"'y' has 1 null value in .*first is row 3 of part"
    with pytest.raises(DataError, match=message) as caught:
        check_statistics(statistics, SCHEMA.columns, len(SCHEMA.features))
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
