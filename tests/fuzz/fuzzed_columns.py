"""Rows as Spark delivers them, with values that no schema rules out.

A stranger's file, read as a DataFrame, can have any of them.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from fuzzer import Fault, Target

from sparkdl import encodings
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.reading import Reading
from sparkdl.feed.statistics.shards import DataStatistics, check_statistics
from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.protocols import UNKNOWN, ColumnSpec

VECTOR = pa.struct(
    [
        pa.field("type", pa.int8()),
        pa.field("size", pa.int32()),
        pa.field("indices", pa.list_(pa.int32())),
        pa.field("values", pa.list_(pa.float64())),
    ]
)
ODD_NUMBERS = [0, 1, -1, 2, 3, 4, 5, 100, (1 << 31) - 1, -(1 << 31), 1 << 20]
LABEL = ColumnSpec("label", torch.int64)
DENSE: dict[str, Any] = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]}
SPARSE: dict[str, Any] = {"type": 0, "size": 3, "indices": [0, 2], "values": [4.0, 5.0]}
Kind = tuple[ColumnSpec, pa.DataType, list[Any]]
KINDS: dict[str, Kind] = {
    "vector": (
        ColumnSpec("x", torch.float32, (UNKNOWN,), encodings.VECTOR),
        VECTOR,
        [DENSE, SPARSE, {**SPARSE, "indices": [], "values": []}],
    ),
    "nested": (
        ColumnSpec("x", torch.float32, (2, 2)),
        pa.list_(pa.list_(pa.float32())),
        [[[1.0, 2.0], [3.0, 4.0]]],
    ),
    "array": (ColumnSpec("x", torch.int32, (UNKNOWN,)), pa.list_(pa.int64()), [[1, 2], [3, 4]]),
    "number": (ColumnSpec("x", torch.int8), pa.float64(), [1.0, 2.0]),
    "bytes": (ColumnSpec("x", torch.int16, (2,), encodings.BYTES), pa.binary(), [b"abcd"]),
}


class ColumnsTarget(Target):
    """Two record batches of one kind of column: rows must be stored as they are, or refused."""

    name = "columns"
    deadline_s = 10.0

    def __enter__(self) -> ColumnsTarget:
        self._folder = self.folder()
        return self

    def attempt(self, draw: random.Random) -> bool:
        """One worker's rows."""
        name = draw.choice(list(KINDS))
        spec, kind, good = KINDS[name]
        rows = [copy.deepcopy(draw.choice(good)) for _ in range(draw.choice([1, 2, 5]))]
        for _ in range(draw.choice([0, 1, 1, 1, 2])):
            at = draw.randrange(len(rows))
            rows[at] = _odd_row(draw, rows[at], nested=name == "nested")
        batches = [_batch(kind, part) for part in (rows, rows[:1])]
        store, held_out = PartitionStore(self._folder), PartitionStore(self._folder)
        try:
            reading = Reading(FeedSchema((spec,), LABEL), 0, store, held_out)
            statistics = DataStatistics.of([reading.read(batches, lambda rows: None)])
            check_statistics(statistics, (spec, LABEL))
            if statistics.columns[0].fractions or statistics.columns[0].not_finite:
                return True  # the driver knows, and decides by the column's purpose
            found = store.take(torch.arange(store.rows))[0].double().numpy()
        finally:
            store.close()
            held_out.close()
        expected = [_meaning(name, row) for row in (*rows, rows[0])]
        if any(value is None for value in expected):
            raise Fault(f"a {name} that is none was taken for one", rows)
        if not np.array_equal(found, np.array(expected, dtype=np.float64), equal_nan=True):
            raise Fault(f"a {name} was stored as something else", (rows, found))
        return True


def _batch(kind: pa.DataType, rows: list[Any]) -> pa.RecordBatch:
    arrays = [pa.array(rows, kind), pa.array([0] * len(rows), pa.int64())]
    return pa.RecordBatch.from_arrays(arrays, names=["x", "label"])


def _odd_row(draw: random.Random, row: Any, *, nested: bool) -> Any:
    """The row with one of its parts changed, so that the column's type still holds it."""
    if row is None or draw.random() < 0.1:
        return None
    if isinstance(row, dict):
        key = draw.choice(list(row))
        old = row[key]
        if key == "type":
            new: Any = draw.choice([0, 1, 2, -1, 127, None])
        elif key == "size":
            new = draw.choice([*ODD_NUMBERS, None])
        else:
            odd: list[Any] = ODD_NUMBERS if key != "values" else [0.0, 1e300, float("nan")]
            new = _odd_list(draw, old, odd)
        return {**row, key: new}
    if isinstance(row, list):
        if nested and row and draw.random() < 0.7:
            at = draw.randrange(len(row))
            return [*row[:at], _odd_list(draw, row[at], [0.5, -2.0]), *row[at + 1 :]]
        return _odd_list(draw, row, [[1.0, 2.0] if nested else 1 << 40])
    if isinstance(row, bytes):
        return draw.choice([b"", row[:-1], row + b"x", row * 2])
    return draw.choice([float("nan"), float("inf"), 1e300, 0.5, 127.0, 128.0, -129.0, -0.0])


def _odd_list(draw: random.Random, old: list[Any] | None, odd: list[Any]) -> list[Any] | None:
    values = list(old or [])
    kind = draw.randrange(7)
    if kind == 0:
        return None
    if kind == 1:
        return []
    if kind == 2:
        return [*values, draw.choice(odd)]
    if kind == 3:
        return values[:-1]
    if kind == 4 and values:
        return [None, *values[1:]]
    if values:
        values[draw.randrange(len(values))] = draw.choice(odd)
    return values


def _meaning(name: str, row: Any) -> Any:
    """The tensor that a row becomes, computed the slow way; None if it cannot be trained on."""
    if row is None:
        return None
    if name == "vector":
        return _vector(row)
    if name == "bytes":
        return np.frombuffer(row, np.int16) if len(row) == 4 else None
    if name == "nested" and not all(isinstance(inner, list) for inner in row):
        return None
    return row


def _vector(row: dict[str, Any]) -> list[float] | None:
    values, indices, size = row["values"], row["indices"], row["size"]
    if row["type"] not in (0, 1) or values is None or None in values:
        return None
    if row["type"] == 1:
        return list(values)
    if indices is None or size is None or len(indices) != len(values) or None in indices:
        return None
    if not all(0 <= index < size for index in indices):
        return None
    dense = [0.0] * size
    for index, value in zip(indices, values, strict=True):
        dense[index] = value
    return dense
