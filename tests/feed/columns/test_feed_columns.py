"""The columns of a feed: their order, and their lengths as far as they are known."""

from __future__ import annotations

import torch

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import UNKNOWN, ColumnSpec


def test_the_label_is_the_last_column() -> None:
    features = (ColumnSpec("a", torch.float32), ColumnSpec("b", torch.float32, (3,)))
    label = ColumnSpec("y", torch.int64)
    assert FeedSchema(features, label).columns == (*features, label)
    assert [column.row_shape for column in features] == [(), (3,)]


def test_lengths_found_in_the_data_complete_the_columns_that_had_none() -> None:
    numbers, known = ColumnSpec("a", torch.float32), ColumnSpec("b", torch.float32, (3,))
    unknown, label = ColumnSpec("c", torch.int64, (UNKNOWN,)), ColumnSpec("y", torch.int64)
    schema = FeedSchema((numbers, known, unknown), label)
    assert schema.of_lengths([None, 3, None, None]) == schema
    assert schema.of_lengths([None, 3, 5, None]) == FeedSchema(
        (numbers, known, ColumnSpec("c", torch.int64, (5,))), label
    )


def test_a_column_is_an_array_whether_its_length_is_known_or_not() -> None:
    shapes: list[tuple[int, ...]] = [(), (3,), (0,), (UNKNOWN,)]
    found = [ColumnSpec("c", torch.int64, shape).is_array for shape in shapes]
    assert found == [False, True, True, True]
