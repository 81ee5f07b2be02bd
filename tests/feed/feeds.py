"""Feeds of made-up rows, and Spark's structs for vectors."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from hypothesis import strategies as st

from sparkdl.feed.feed import Feed, FeedOptions
from sparkdl.feed.packed import ORDER_COLUMN
from sparkdl.feed.schema import FeedSchema
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec

SCHEMA = FeedSchema((ColumnSpec("wide", torch.float32, (UNKNOWN,)),), ColumnSpec("id", torch.int64))


def record_batch(ids: Sequence[int], keys: Sequence[int] | None = None) -> pa.RecordBatch:
    """Row i is ([i, -i], i), and its place in the order where keys are given."""
    columns = {
        "wide": pa.array([[i, -i] for i in ids], pa.list_(pa.float64())),
        "id": pa.array(ids, pa.int32()),
    }
    if keys is not None:
        columns[ORDER_COLUMN] = pa.array(keys, pa.int64())
    return pa.record_batch(columns)


def record_batches(sizes: Sequence[int]) -> list[pa.RecordBatch]:
    """Record batches of the given sizes; ids count up."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        record_batch(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)
    ]


def open_feed(
    directory: Path,
    schema: FeedSchema = SCHEMA,
    batch_size: int = 4,
    *,
    seed: int = 1,
    rank: int = 0,
    **options: Any,
) -> Feed:
    settings: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "rank": rank}
    return Feed(schema, **settings, directory=directory, options=FeedOptions(**options))


def epochs_of(
    source: Iterable[pa.RecordBatch], *, epochs: int = 3, **settings: Any
) -> list[list[Batch]]:
    with tempfile.TemporaryDirectory() as name, open_feed(Path(name), **settings) as feed:
        feed.fill(source)
        return [list(feed.epoch(epoch)) for epoch in range(1, epochs + 1)]


def read(sizes: Sequence[int], **settings: Any) -> list[list[Batch]]:
    return epochs_of(record_batches(sizes), **settings)


def ids_of(batches: Sequence[Batch]) -> list[int]:
    return [int(i) for batch in batches for i in batch.targets]


record_batch_sizes = st.lists(st.integers(0, 12), max_size=8)


VECTOR = pa.struct(
    [
        pa.field("type", pa.int8(), nullable=False),
        pa.field("size", pa.int32()),
        pa.field("indices", pa.list_(pa.int32())),
        pa.field("values", pa.list_(pa.float64())),
    ]
)


def as_vector(row: np.ndarray, *, sparse: bool) -> dict[str, Any]:
    if not sparse:
        return {"type": 1, "size": None, "indices": None, "values": row.tolist()}
    (indices,) = row.nonzero()
    values = row[indices].tolist()
    return {"type": 0, "size": len(row), "indices": indices.tolist(), "values": values}
