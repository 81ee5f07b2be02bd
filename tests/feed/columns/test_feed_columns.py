"""Columns of fixed and of varying length."""

from __future__ import annotations

import torch
from every_row import every
from ragged_rows import ragged

from sparkdl.feed.columns.ragged import Ragged, picked
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


def test_masks_are_what_torch_and_hugging_face_take() -> None:
    column = ragged([[1, 2], [], [3]])
    assert column.mask("padding_mask").tolist() == [[False, False], [True, True], [False, True]]
    assert column.mask("attention_mask").tolist() == [[1, 1], [0, 0], [1, 0]]
    assert column.mask("attention_mask").dtype is torch.int64
    assert column.mask("lengths").tolist() == [2, 0, 1]
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        ragged([[1, 2], [3]], torch.float32).padded(0.0)[..., None],
        ragged([[1, 2], [3]]).mask("lengths"),
        batch_first=True,
    )
    assert packed.data[:, 0].tolist() == [1, 3, 2]


@every("ragged", [False, True])
def test_rows_are_copied_though_a_model_differentiates_by_what_it_was_given(ragged: bool) -> None:
    values = torch.arange(6.0).requires_grad_()
    column = Ragged(values, torch.tensor([1, 2, 3])) if ragged else values
    copy = picked(column, torch.tensor([2, 0]))
    found = copy.values if isinstance(copy, Ragged) else copy
    assert not found.requires_grad
    assert found.tolist() == ([3.0, 4.0, 5.0, 0.0] if ragged else [2.0, 0.0])
