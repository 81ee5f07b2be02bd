"""What a model as a function takes of columns, and an evaluation of weights."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
import torch
from every_row import every

from sparkdl.encodings import NUMBERS
from sparkdl.errors import DataError
from sparkdl.feed.record_batches.decode import tensors_of
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding
from sparkdl.spark.inference.columns import _as_it_comes, _without_decimals
from sparkdl.spark.inference.evaluation import _weights

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


WEIGHT = ColumnSpec("w", torch.float32)


def test_weights_are_numbers_of_any_type() -> None:
    for numbers in (pa.array([2.0, 0.0]), pa.array([2, 0], pa.int16())):
        assert _weights(numbers, WEIGHT).tolist() == [2.0, 0.0]


@every(
    ("wrong", "words"),
    [
        (None, "column 'w' has 1 null"),
        (-1.0, "'w' holds -1; weights are numbers >= 0"),
        (float("nan"), "'w' holds nan"),
        (float("inf"), "'w' holds inf"),
    ],
)
def test_a_weight_that_weighs_nothing_meaningful_is_refused(wrong: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        _weights(pa.array([1.0, wrong], pa.float32()), WEIGHT)
