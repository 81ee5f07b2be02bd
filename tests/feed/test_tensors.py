"""Columns of record batches become tensors, ragged ones too."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every, every_row
from feeds import VECTOR as VECTORS
from feeds import as_vector
from ragged_rows import EVENTS

from sparkdl.encodings import IMAGE, NUMBERS, VECTOR, Encoding
from sparkdl.errors import DataError
from sparkdl.feed.decode import (
    instead_of_nulls,
    tensors_of,
    to_column,
    to_tensor,
    valid_tensors,
)
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding

SCALAR = ColumnSpec("x", torch.float32)


def test_a_column_without_rows_keeps_its_shape_and_dtype() -> None:
    scalar = to_tensor(pa.array([], pa.float64()), SCALAR)
    wide = to_tensor(pa.array([], pa.list_(pa.float64())), ColumnSpec("x", torch.float64, (4,)))
    assert (scalar.shape, scalar.dtype) == ((0,), torch.float32)
    assert (wide.shape, wide.dtype) == ((0, 4), torch.float64)


def test_large_integers_are_exact_as_int64() -> None:
    values = [2**53 + 1, -(2**62) - 1]
    assert to_tensor(pa.array(values), ColumnSpec("x", torch.int64)).tolist() == values


def test_a_column_in_its_final_type_is_not_copied() -> None:
    values = pa.array(np.arange(5, dtype=np.float32))
    tensor = to_tensor(values, SCALAR)
    assert tensor.data_ptr() == values.buffers()[1].address


LISTS = pa.list_(pa.float64())


@every(
    ("values", "shape", "words"),
    [
        (pa.array([1.0, None, 3.0, None]), (), r"2 null values in .* 4 rows\. Drop .*IS NOT"),
        (pa.array([[1.0], None], LISTS), (1,), "1 null value in a batch of 2 rows"),
        (pa.array([[1.0, None], [None, None]], LISTS), (2,), "3 null elements inside its arrays"),
        (pa.array([[1], None]), None, "1 null value .* an empty array"),
        (pa.array([[1, None], [2]]), None, "1 null element inside its arrays"),
        *(
            (pa.array(rows), (2,), f" {found} elements .* must have 2")
            for rows, found in (
                ([[1, 2], [1, 2, 3]], "2, 3"),
                ([[1], [1, 2, 3]], "1, 3"),
                ([[1, 2], []], "0, 2"),
                ([[1, 2, 3], [1, 2, 3]], "3"),
            )
        ),
    ],
)
def test_nulls_and_other_lengths_are_refused_with_column_and_count(
    values: pa.Array, shape: tuple[int, ...] | None, words: str
) -> None:
    padding = Padding(0) if shape is None else None
    spec = ColumnSpec("x", torch.float32, (UNKNOWN,) if shape is None else shape, padding=padding)
    with pytest.raises(DataError, match=f"column 'x' .*{words}"):
        to_column(values, spec)


def test_nulls_outside_a_slice_do_not_count() -> None:
    values = pa.array([None, 1.0, 2.0, None]).slice(1, 2)
    assert to_tensor(values, SCALAR).tolist() == [1.0, 2.0]
    lists = pa.array([[None], [1.0], [2.0]], pa.list_(pa.float64())).slice(1, 2)
    assert to_tensor(lists, ColumnSpec("x", torch.float32, (1,))).tolist() == [[1.0], [2.0]]


@every_row(
    ((), NUMBERS, None, "a number: F.coalesce('`a.b`', F.lit(0))"),
    ((3,), NUMBERS, None, "an array: F.coalesce('`a.b`', F.array(F.lit(0.0), ...))"),
    ((UNKNOWN,), NUMBERS, Padding(0.0), "an empty array: F.coalesce('`a.b`', F.array())"),
    ((3,), VECTOR, None, ""),
    ((3, 2, 2), IMAGE, None, ""),
)
def test_what_to_do_about_nulls_works_for_the_type_of_the_column(
    shape: tuple[int, ...], encoding: Encoding, padding: Padding | None, value: str
) -> None:
    advice = instead_of_nulls(ColumnSpec("a.b", torch.float32, shape, encoding, padding))
    assert advice.startswith('Drop these rows first with df.where("`a.b` IS NOT NULL")')
    assert advice.endswith(value)
    assert ("coalesce" in advice) == bool(value)


@every_row(
    (300, pa.int64(), torch.uint8),
    (-1, pa.int8(), torch.uint8),
    (2**40, pa.int64(), torch.int32),
    (1e30, pa.float64(), torch.int64),
    (1e6, pa.float32(), torch.float16),
    (1e39, pa.float64(), torch.float32),
    (1.5, pa.float64(), torch.int32),
    (float("nan"), pa.float32(), torch.int64),
    (2, pa.int8(), torch.bool),
)
def test_a_number_that_the_tensor_cannot_hold_is_refused_with_its_row(
    number: float, kind: pa.DataType, dtype: torch.dtype
) -> None:
    told = rf"'x' holds {number} \(.*\) in row 2 of a batch of 3, which {str(dtype)[6:]}, .*hold"
    told = told.replace("+", r"\+")
    padded = ColumnSpec("x", dtype, (UNKNOWN,), padding=Padding(0, None))
    for spec, rows in (
        (ColumnSpec("x", dtype), [1, 0, number]),
        (ColumnSpec("x", dtype, (2,)), [[1, 0], [0, 1], [0, number]]),
        (padded, [[], [1, 0], [number]]),
    ):
        values = pa.array(rows, pa.list_(kind) if spec.is_array else kind)
        with pytest.raises(DataError, match=told):
            tensors_of([values], [spec])
        with pytest.raises(DataError, match=told):
            tensors_of([pa.concat_arrays([values[:1], values])[1:]], [spec])
        if number == number:  # noqa: PLR0124 - is it no NaN?
            with pytest.raises(DataError, match=r" in row 3 of a batch"):
                valid_tensors([pa.concat_arrays([pa.nulls(1, values.type), values])], [spec])


@every_row((255, torch.uint8), (1, torch.bool), (0.1, torch.float32), (65519, torch.float16))
def test_a_number_that_is_rounded_at_most_is_held(number: float, dtype: torch.dtype) -> None:
    (tensor,) = tensors_of([pa.array([0, number])], [ColumnSpec("x", dtype)])
    assert torch.equal(tensor, torch.tensor([0, number]).to(dtype))  # type: ignore[arg-type]


def test_vectors_of_any_size_are_rows() -> None:
    rows = [
        as_vector(np.array([1.0, 2.0]), sparse=False),
        as_vector(np.array([0.0, 0.0, 5.0, 0.0]), sparse=True),
    ]
    spec = ColumnSpec("v", torch.float32, (UNKNOWN,), VECTOR, Padding(-1))
    (column,) = tensors_of([pa.array(rows, VECTORS)], [spec])
    assert column.padded(-1).tolist() == [[1, 2, -1, -1], [0, 0, 5, 0]]


def test_items_of_another_width_are_refused_with_their_row() -> None:
    values = pa.array([[[1.0, 2.0]], [[1.0], [2.0, 3.0]]])
    with pytest.raises(DataError, match=r"row 1 is not an array of shape \(any length, 2\)"):
        tensors_of([values], [EVENTS])
