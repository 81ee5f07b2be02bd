"""Packed record batches are taken apart into the columns that were packed."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
from every_row import every_row
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.feed.packed import (
    ELEMENTS,
    ORDER_COLUMN,
    lists_of_spark,
    name_of_numbers,
    names_of_lists,
    unpacked,
)

CODES = {"tinyint": "b", "smallint": "h", "int": "i", "bigint": "q", "float": "f", "double": "d"}


def unsafe_array(row: list[Any] | None, element: str) -> bytes | None:
    """The memory of Spark's UnsafeArrayData, as its documentation describes it."""
    if row is None:
        return None
    words = bytearray(8 * -(-len(row) // 64))
    for index, value in enumerate(row):
        if value is None:
            words[index // 8] |= 1 << (index % 8)
    values = struct.pack(f"<{len(row)}{CODES[element]}", *(value or 0 for value in row))
    return struct.pack("<q", len(row)) + bytes(words) + values + bytes(-len(values) % 8)


@st.composite
def columns_of_lists(draw: st.DrawFn) -> tuple[str, list[list[Any] | None]]:
    element = draw(st.sampled_from(sorted(ELEMENTS)))
    numbers = st.integers(-100, 100).map(float if element in ("float", "double") else int)
    value = draw(st.sampled_from([numbers, st.none() | numbers]))
    length = draw(st.integers(0, 130))
    shortest = draw(st.sampled_from([length, 0]))
    row = st.lists(value, min_size=shortest, max_size=length)
    return element, draw(st.lists(draw(st.sampled_from([row, st.none() | row])), max_size=6))


@given(column=columns_of_lists(), large=st.booleans(), data=st.data())
def test_the_bytes_of_sparks_arrays_become_their_lists(
    column: tuple[str, list[list[Any] | None]], large: bool, data: st.DataObject
) -> None:
    element, rows = column
    kind = pa.large_binary() if large else pa.binary()
    start = data.draw(st.integers(0, len(rows)))
    packed = pa.array([unsafe_array(row, element) for row in rows], kind).slice(start)

    lists = lists_of_spark(packed, ELEMENTS[element])

    assert lists.type == pa.list_(pa.from_numpy_dtype(ELEMENTS[element]))
    assert lists.to_pylist() == rows[start:]


@given(data=st.data(), rows=st.integers(0, 5), width=st.integers(2, 6))
def test_numbers_that_came_together_are_columns_again(
    data: st.DataObject, rows: int, width: int
) -> None:
    value = data.draw(st.sampled_from([st.integers(-9, 9), st.none() | st.integers(-9, 9)]))
    row = st.lists(value, min_size=width, max_size=width)
    table = data.draw(st.lists(row, min_size=rows, max_size=rows))
    names = [f"c{index}" for index in range(width)]
    together = pa.array(table, pa.list_(pa.int32()))

    batch = unpacked(pa.record_batch({name_of_numbers(names): together}))

    assert batch.schema.names == names
    assert [list(row) for row in zip(*batch.to_pydict().values(), strict=True)] == table


def test_columns_are_back_in_their_order_with_the_rows_order_behind() -> None:
    in_bytes, rest = names_of_lists("c10", "float")
    batch = pa.record_batch(
        {
            in_bytes: pa.array([unsafe_array([1.0, 2.0], "float")]),
            rest: pa.array([[]], pa.list_(pa.float32())),
            ORDER_COLUMN: pa.array([77]),
            "c2": pa.array(["text"]),
            "c0,c11": pa.array([[0, 11]]),
            "c1,c3": pa.array([[1, 3]]),
        }
    )

    expected = {"c0": [0], "c1": [1], "c2": ["text"], "c3": [3], "c10": [[1.0, 2.0]], "c11": [11]}
    assert unpacked(batch).to_pydict() == {**expected, ORDER_COLUMN: [77]}


@every_row(
    ([[1.0], None, None], [[], [2.0, 3.0], None]),
    ([None, None, None], [[1.0], [2.0, 3.0], None]),
    ([[1.0], [2.0, 3.0], None], [[], [], None]),
)
def test_lists_come_from_where_they_are(in_bytes: list[Any], rest: list[Any]) -> None:
    names = names_of_lists("c0", "double")
    batch = pa.record_batch(
        [
            pa.array([unsafe_array(row, "double") for row in in_bytes], pa.binary()),
            # As of a constant array, which Spark says has no nulls within.
            pa.array(rest, pa.list_(pa.field("element", pa.float64(), nullable=False))),
        ],
        names=names,
    )
    (lists,) = unpacked(batch)
    assert lists.to_pylist() == [[1.0], [2.0, 3.0], None]
    assert lists.type == pa.list_(pa.float64())  # of each batch: a rank is fed one stream of them
