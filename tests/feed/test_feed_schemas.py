"""Drawn schemas and partitionings: every row comes once an epoch, with the values numpy has."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spark_structs import VECTOR, as_vector
from torch import Tensor

from sparkdl import encodings
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import Feed
from sparkdl.protocols import UNKNOWN, ColumnSpec

NUMBERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.float32(), pa.float64(), pa.bool_()),
]
DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
Column = tuple[pa.Array, ColumnSpec, np.ndarray]
"""As Spark delivers it, what it becomes, and its values, shape (rows, *row_shape)."""


def values_of(draw: Any, *shape: int, largest: int = 100) -> np.ndarray:
    """Whole numbers that every dtype can hold."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return generator.integers(0, largest, shape, endpoint=True)


def numbers(draw: Any, name: str, rows: int) -> Column:
    """A number, or an array of numbers of any depth; flat ones may leave their length open."""
    kind = draw(st.sampled_from(NUMBERS))
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    values = values_of(draw, rows, *shape, largest=1 if kind == pa.bool_() else 100)
    arrow = kind
    for _ in shape:
        arrow = pa.list_(arrow)
    declared = shape if len(shape) != 1 or draw(st.booleans()) else (UNKNOWN,)
    as_kind = values.astype(kind.to_pandas_dtype())
    spec = ColumnSpec(name, draw(st.sampled_from(DTYPES)), declared)
    return pa.array(as_kind.tolist(), arrow), spec, values


def vectors(draw: Any, name: str, rows: int) -> Column:
    values = values_of(draw, rows, draw(st.integers(1, 4)), largest=2)
    column = [as_vector(row.astype(float), sparse=draw(st.booleans())) for row in values]
    spec = ColumnSpec(name, draw(st.sampled_from(DTYPES)), (UNKNOWN,), encodings.VECTOR)
    return pa.array(column, VECTOR), spec, values


def raw_bytes(draw: Any, name: str, rows: int) -> Column:
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    values = values_of(draw, rows, *shape)
    tensors = torch.from_numpy(values).to(dtype)
    column = [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    return pa.array(column, pa.binary()), ColumnSpec(name, dtype, shape, encodings.BYTES), values


@st.composite
def columns(draw: Any) -> list[Column]:
    """The row's id, then columns of drawn types, all with the same number of rows."""
    rows = draw(st.integers(0, 30))
    kinds = draw(st.lists(st.sampled_from([numbers, vectors, raw_bytes]), max_size=5))
    ids = np.arange(rows)
    return [
        (pa.array(ids), ColumnSpec("id", torch.int64), ids),
        *(kind(draw, f"c{index}", rows) for index, kind in enumerate(kinds)),
    ]


@settings(max_examples=100, deadline=None)
@given(table=columns(), data=st.data(), batch_size=st.integers(1, 9))
def test_every_worker_feeds_its_rows_once_an_epoch_with_the_values_that_numpy_has(
    table: list[Column], data: Any, batch_size: int
) -> None:
    rows = len(table[0][0])
    cuts = st.lists(st.integers(0, rows), max_size=6)
    ends = sorted([0, *data.draw(cuts, "cuts"), rows])
    whole = pa.record_batch([arrow for arrow, _, _ in table], [spec.name for _, spec, _ in table])
    record_batches = [whole.slice(start, stop - start) for start, stop in pairwise(ends)]
    workers = data.draw(st.integers(1, 3), "workers")
    seen: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for rank in range(workers):
        for epoch, batch in epochs_of(record_batches[rank::workers], table, rank, batch_size):
            for (_, spec, values), found in zip(table, batch, strict=True):
                assert found.dtype is spec.dtype
                np.testing.assert_array_equal(found.double().numpy(), values[batch[0].numpy()])
            seen[epoch] += batch[0].tolist()
    assert [sorted(ids) for ids in seen.values()] == [list(range(rows))] * 3


def epochs_of(
    source: list[pa.RecordBatch], table: list[Column], rank: int, batch_size: int
) -> list[tuple[int, tuple[Tensor, ...]]]:
    """(epoch, features) of every minibatch of three epochs."""
    schema = FeedSchema(tuple(spec for _, spec, _ in table), label=())
    with (
        tempfile.TemporaryDirectory() as name,
        Feed(schema, batch_size=batch_size, seed=2, rank=rank, directory=Path(name)) as feed,
    ):
        statistics = feed.fill(source)
        assert all(column.sound for column in statistics.columns)
        return [(e, tuple(batch.features)) for e in (1, 2, 3) for batch in feed.epoch(e)]
