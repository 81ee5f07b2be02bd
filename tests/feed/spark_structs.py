"""pyspark.ml's vectors and matrices as Spark keeps them, made of numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

VECTOR = pa.struct(
    [
        pa.field("type", pa.int8(), nullable=False),
        pa.field("size", pa.int32()),
        pa.field("indices", pa.list_(pa.int32())),
        pa.field("values", pa.list_(pa.float64())),
    ]
)
MATRIX = pa.struct(
    [
        pa.field("type", pa.int8(), nullable=False),
        pa.field("numRows", pa.int32(), nullable=False),
        pa.field("numCols", pa.int32(), nullable=False),
        pa.field("colPtrs", pa.list_(pa.int32())),
        pa.field("rowIndices", pa.list_(pa.int32())),
        pa.field("values", pa.list_(pa.float64())),
        pa.field("isTransposed", pa.bool_(), nullable=False),
    ]
)


def as_vector(row: np.ndarray, *, sparse: bool) -> dict[str, Any]:
    if not sparse:
        return {"type": 1, "size": None, "indices": None, "values": row.tolist()}
    (indices,) = row.nonzero()
    values = row[indices].tolist()
    return {"type": 0, "size": len(row), "indices": indices.tolist(), "values": values}


def as_matrix(matrix: np.ndarray, *, sparse: bool, transposed: bool) -> dict[str, Any]:
    """As pyspark.ml keeps it: column by column, or row by row if transposed."""
    stored = matrix if transposed else matrix.T
    row: dict[str, Any] = {
        "type": 1,
        "numRows": matrix.shape[0],
        "numCols": matrix.shape[1],
        "isTransposed": transposed,
        "values": stored.reshape(-1).tolist(),
    }
    if sparse:
        major, minor = stored.nonzero()
        counts = np.bincount(major, minlength=len(stored))
        row |= {
            "type": 0,
            "colPtrs": [0, *np.cumsum(counts).tolist()],
            "rowIndices": minor.tolist(),
            "values": stored[major, minor].tolist(),
        }
    return row
