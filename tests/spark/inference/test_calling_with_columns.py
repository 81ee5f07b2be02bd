"""What a model as a function says of columns that it does not take."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
import torch

from sparkdl.encodings import NUMBERS
from sparkdl.errors import DataError
from sparkdl.feed.record_batches.decode import tensors_of
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding
from sparkdl.spark.inference.columns import _as_it_comes, _without_decimals

ONE, THREE = (ColumnSpec("x", torch.float32, shape) for shape in ((), (3,)))


def test_columns_of_other_types_are_refused() -> None:
    cases = [
        (THREE, pa.array([1.0]), r"of double, but 'x' takes arrays of 3 numbers.*array\(x, ...\)"),
        (ONE, pa.array([[1.0]]), r"list.*, but 'x' takes one number per row.*x\[0\]"),
        (ONE, pa.array(["1"]), r"of string, but 'x' takes one number per row.*CAST\(x AS DOUBLE\)"),
        (THREE, pa.array([["1"] * 3]), r"string.*CAST\(x AS ARRAY<DOUBLE>\)"),
        (ONE, pa.array([[("a", 1.0)]], pa.map_(pa.string(), pa.float64())), "of map<string"),
    ]
    for spec, rows, message in cases:
        with pytest.raises(DataError, match=message):
            _as_it_comes(spec, rows)


def test_decimals_become_the_nearest_doubles() -> None:
    texts = ["0.1", "123456789012345678.1234567891", "0.0000000001", "-7.25", "99.995"]
    decimals = [Decimal(text) for text in texts]
    nearest, kind = list(map(float, texts)), pa.decimal128(38, 10)
    assert _without_decimals(pa.array([*decimals, None], kind)).to_pylist() == [*nearest, None]
    for kinds in (pa.list_(kind), pa.large_list(kind)):
        assert _without_decimals(pa.array([decimals, None, []], kinds)).to_pylist() == [
            nearest,
            None,
            [],
        ]
    rows = pa.array([[1.5]])
    assert _without_decimals(rows) is rows


def test_padded_columns_take_arrays_of_any_length() -> None:
    padded = ColumnSpec("x", torch.float32, (UNKNOWN,), padding=Padding(0.0))
    with pytest.raises(DataError, match="'x' takes arrays of numbers"):
        _as_it_comes(padded, pa.array([1.0]))
    assert _as_it_comes(padded, pa.array([[1.0], [1.0, 2.0]])).encoding == NUMBERS


def test_numbers_of_any_kind_are_taken() -> None:
    for rows in (pa.array([1, 2]), pa.array([True, False]), pa.array([1.0, 2.0])):
        (found,) = tensors_of([rows], [_as_it_comes(ONE, rows)])
        assert isinstance(found, torch.Tensor)
        assert found.tolist() == [float(row) for row in rows.to_pylist()]


def test_a_column_of_nulls_is_refused_as_nulls() -> None:
    rows = pa.nulls(2)
    with pytest.raises(DataError, match="2 null values"):
        tensors_of([rows], [_as_it_comes(ONE, rows)])
