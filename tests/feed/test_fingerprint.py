"""What tells rows apart: their fingerprint, and the range of their numbers."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from every_row import every
from feeds import SCHEMA, VECTOR, as_vector, open_feed
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rows import ragged

from sparkdl import encodings
from sparkdl.feed.column_statistics import places_from, scan
from sparkdl.feed.fingerprint import fingerprint
from sparkdl.feed.schema import FeedSchema, Ragged
from sparkdl.feed.shards import DataStatistics
from sparkdl.protocols import UNKNOWN, ColumnSpec

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def of(*columns: Any) -> int:
    return fingerprint(columns)


@st.composite
def tables(draw: st.DrawFn) -> list[torch.Tensor]:
    """Columns of few different values, so that rows repeat."""
    rows = draw(st.integers(1, 12))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    shapes = draw(st.lists(st.sampled_from([(), (1,), (2,), (3,), (5, 3), (0,)]), min_size=1))
    return [
        torch.randint(0, 2, (rows, *shape), generator=generator).to(draw(st.sampled_from(DTYPES)))
        for shape in shapes
    ]


@settings(max_examples=60)
@given(columns=tables(), data=st.data())
def test_the_order_of_rows_and_the_calls_they_come_in_make_no_difference(
    columns: list[torch.Tensor], data: Any
) -> None:
    rows = len(columns[0])
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    cut = data.draw(st.integers(0, rows))
    parts = [order[:cut], order[cut:]]
    found = sum(of(*(column[part] for column in columns)) for part in parts if len(part))
    assert found % 2**64 == of(*columns)


@settings(max_examples=60)
@given(columns=tables(), data=st.data())
def test_another_value_in_one_row_makes_a_difference(
    columns: list[torch.Tensor], data: Any
) -> None:
    places = [
        (index, place) for index, column in enumerate(columns) for place in range(column.numel())
    ]
    if not places:
        return
    index, place = data.draw(st.sampled_from(places))
    changed = [column.clone() for column in columns]
    changed[index].view(-1)[place] += data.draw(st.sampled_from([1, 2, 3]))
    assert of(*changed) != of(*columns)


@every("dtype", DTYPES[:4])
def test_signs_do_not_cancel(dtype: torch.dtype) -> None:
    """A sign is a word's highest bit, of which a product modulo 2^64 keeps nothing else."""
    row = torch.arange(1, 17).to(dtype)
    seen = set()
    for bits in range(256):
        signs = torch.tensor([-1 if bits >> k & 1 else 1 for k in range(8)] * 2)
        seen.add(of((row * signs.to(dtype))[None]))
    assert len(seen) == 256


def test_a_row_in_place_of_the_duplicate_of_another_makes_a_difference() -> None:
    rows = torch.arange(4.0)[:, None]
    doubled = [torch.tensor(order) for order in ([0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2])]
    assert len({of(rows[order]) for order in doubled}) == 3
    # Pairs would cancel in a sum without carries.
    assert of(rows[torch.tensor([0, 0])]) != of(rows[torch.tensor([1, 1])])


def test_values_that_change_places_among_rows_or_columns_make_a_difference() -> None:
    x, y = torch.arange(6.0).view(3, 2), torch.arange(3)
    found = {
        of(x, y),
        of(x, y[torch.tensor([1, 0, 2])]),
        of(x.flip(1), y),
        of(x.view(2, 3).t().contiguous(), y),
    }
    assert len(found) == 4


def test_every_nan_is_the_same_and_minus_zero_is_another_zero() -> None:
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32)
    assert len({of(nan.view(1).view(torch.float32)) for nan in nans}) == 1
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))


def test_it_is_the_same_as_in_the_checkpoints_that_there_are() -> None:
    x = torch.arange(24, dtype=torch.float32).view(4, 6)
    assert of(x, torch.arange(4), torch.ones(4, 3, dtype=torch.uint8)) == 795654449796557623


def test_columns_of_many_rows_and_wide_ones_are_read_in_blocks_that_leave_none_out() -> None:
    for shape in ((70_000, 1), (5, 70_000), (999, 33)):
        values = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        whole = of(values)
        pieces = sum(of(piece) for piece in values.split(7 if shape[0] < 1000 else 9999))
        assert pieces % 2**64 == whole
        values[-1, -1] += 1
        assert of(values) != whole


def read(source: list[pa.RecordBatch], folder: Path, schema: FeedSchema = SCHEMA) -> DataStatistics:
    with open_feed(folder, schema=schema) as feed:
        return DataStatistics.of([feed.fill(source)])


def test_rows_are_the_same_in_whatever_way_spark_brings_them(tmp_path: Path) -> None:
    generator = random.Random(3)
    rows = [[generator.random() for _ in range(3)] for _ in range(50)]
    sparse = [[value if generator.random() < 0.5 else 0.0 for value in row] for row in rows]
    label = pa.array(range(50), pa.int64())
    spec = ColumnSpec("x", torch.float32, (UNKNOWN,))
    plain = FeedSchema((spec,), ColumnSpec("y", torch.int64))

    def found(values: pa.Array, spec: ColumnSpec = spec, size: int = 50) -> int:
        batch = pa.record_batch([values, label], names=["x", "y"])
        pieces = [batch.slice(start, size) for start in range(0, 50, size)]
        schema = FeedSchema((spec,), plain.label)
        return read(pieces, tmp_path, schema).fingerprint

    lists = pa.array(sparse, pa.list_(pa.float64()))
    narrow = pa.array(np.float32(sparse).tolist(), pa.list_(pa.float32()))
    raw = pa.array([np.float32(row).tobytes() for row in sparse], pa.binary())
    pairs = zip(np.array(sparse), [True, False] * 25, strict=True)
    vectors = pa.array([as_vector(row, sparse=is_sparse) for row, is_sparse in pairs], VECTOR)
    vector = ColumnSpec("x", torch.float32, (UNKNOWN,), encodings.VECTOR)
    octets = ColumnSpec("x", torch.float32, (3,), encodings.BYTES)
    assert {
        found(lists),
        found(lists, size=7),
        found(narrow),
        found(narrow.cast(pa.large_list(pa.float32())), size=1),
        found(raw, octets),
        found(vectors, vector),
    } == {found(lists)}


def test_rows_to_validate_with_are_told_apart_from_those_to_train_on(tmp_path: Path) -> None:
    x, y = ColumnSpec("x", torch.float32), ColumnSpec("y", torch.int64)
    schema = FeedSchema((x,), y, validation=ColumnSpec("held", torch.bool))

    def found(held: list[bool]) -> tuple[int, int]:
        columns = [pa.array([1.0, 2.0, 3.0]), pa.array([0, 1, 2]), pa.array(held)]
        statistics = read([pa.record_batch(columns, names=["x", "y", "held"])], tmp_path, schema)
        return statistics.fingerprint, statistics.held_out_fingerprint

    first, second = found([True, False, False]), found([False, True, False])
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert sum(first) % 2**64 == sum(second) % 2**64


@settings(max_examples=60)
@given(rows=st.lists(st.lists(st.integers(-3, 3), max_size=6), min_size=1, max_size=8))
def test_that_of_unequal_rows_is_the_sum_over_the_rows_in_any_order(
    rows: list[list[float]],
) -> None:
    for dtype in (torch.int64, torch.float32, torch.uint8, torch.bfloat16):
        column = ragged(rows, torch.int64)
        column = Ragged(column.values.to(dtype), column.lengths)
        alone = (column.pick(torch.tensor([k])) for k in reversed(range(len(rows))))
        assert of(column) == sum(map(of, alone)) % (1 << 64)


def test_in_unequal_rows_one_value_one_place_and_trailing_zeros_change_it() -> None:
    variants: list[list[list[float]]] = [
        *([[1, 2], [3]], [[1, 2], [4]], [[2, 1], [3]], [[1, 2, 0], [3]]),
        *([[1, 2], [3, 0]], [[1], [2, 3]], [[1, 2, 3], []], [[1, 2], [3], []]),
    ]
    assert len({of(ragged(rows)) for rows in variants}) == len(variants)


def test_in_unequal_rows_nan_is_one_value() -> None:
    values = torch.tensor([1.0, float("nan")])
    other = values.view(torch.int32).clone()
    other[1] ^= 1
    both = (Ragged(v, torch.tensor([2])) for v in (values, other.view(torch.float32)))
    assert len({*map(of, both)}) == 1


def test_what_is_out_of_range_is_counted_by_rows_with_its_place() -> None:
    numbers = pa.array([1.0, -1e6, 7e4, math.inf])
    found = scan(numbers, ColumnSpec("x", torch.float16), places_from(2, 100, 20))
    assert (found.out_of_range, found.where("out_of_range")) == (2, "row 101 of partition 2")
    arrays = pa.array([[1.0, 2.0], None, [1e39, 1e300], [math.nan, 3.0]])
    found = scan(arrays, ColumnSpec("x", torch.float32, (UNKNOWN,)), places_from(0, 5, 20))
    assert (found.out_of_range, found.where("out_of_range")) == (1, "row 7 of partition 0")
    assert (found.not_finite, found.where("not_finite")) == (1, "row 8 of partition 0")
    whole = pa.array([[1, 2], [3, 300]])
    found = scan(whole, ColumnSpec("x", torch.uint8, (UNKNOWN,)))
    assert (found.out_of_range, found.where("out_of_range")) == (1, "row 1 of partition 0")


def test_only_zero_and_one_can_become_booleans_and_only_whole_numbers_integers() -> None:
    numbers = pa.array([[0.0, 1.0], [0.5, 1.0], [math.nan, -3.0], [1e300, 1.5]])
    for dtype, out_of_range in ((torch.bool, 2), (torch.int64, 1)):
        found = scan(numbers, ColumnSpec("x", dtype, (UNKNOWN,)), places_from(0, 5, 20))
        assert (found.out_of_range, found.not_finite, found.fractions) == (out_of_range, 1, 3)
        assert found.where("fractions") == "row 6 of partition 0"
    assert scan(pa.array([0, 700]), ColumnSpec("x", torch.bool)).out_of_range == 1
