"""Columns of unequal lengths, from Arrow's lists to ragged rows."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rows import EVENTS

from sparkdl import encodings
from sparkdl.errors import DataError
from sparkdl.feed.columns.ragged import Column, Ragged
from sparkdl.feed.record_batches.decode import tensors_of
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding


class TestDecode:
    """From Arrow's lists to ragged columns, and what is refused."""

    def one(self, values: pa.Array, spec: ColumnSpec) -> Column:
        (column,) = tensors_of([values], [spec])
        return column

    @settings(max_examples=60, deadline=None)
    @given(
        rows=st.lists(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=4)),
        start=st.integers(0, 3),
    )
    def test_nested_lists_of_one_width_are_items(
        self, rows: list[list[list[int]]], start: int
    ) -> None:
        spec = ColumnSpec("x", torch.float32, (UNKNOWN, 3), padding=Padding(0))
        values = pa.array(rows, pa.list_(pa.list_(pa.int32()))).slice(start)
        column = self.one(values, spec)
        assert isinstance(column, Ragged)
        assert column.lengths.tolist() == [len(row) for row in rows[start:]]
        assert column.values.shape[1:] == (3,)
        assert column.values.tolist() == [item for row in rows[start:] for item in row]

    def test_vectors_of_any_size_are_rows(self) -> None:
        kind = pa.struct(
            [
                ("type", pa.int8()),
                ("size", pa.int32()),
                ("indices", pa.list_(pa.int32())),
                ("values", pa.list_(pa.float64())),
            ]
        )
        rows = [
            {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]},
            {"type": 0, "size": 4, "indices": [2], "values": [5.0]},
        ]
        spec = ColumnSpec("v", torch.float32, (UNKNOWN,), encodings.VECTOR, Padding(-1))
        column = self.one(pa.array(rows, kind), spec)
        assert isinstance(column, Ragged)
        assert column.padded(-1).tolist() == [[1, 2, -1, -1], [0, 0, 5, 0]]

    def test_items_of_another_width_are_refused_with_their_row(self) -> None:
        values = pa.array([[[1.0, 2.0]], [[1.0], [2.0, 3.0]]])
        with pytest.raises(DataError, match=r"row 1 is not an array of shape \(any length, 2\)"):
            self.one(values, EVENTS)
