"""pyspark.ml's vectors as Spark keeps them, made of numpy arrays."""

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


def as_vector(row: np.ndarray, *, sparse: bool) -> dict[str, Any]:
    if not sparse:
        return {"type": 1, "size": None, "indices": None, "values": row.tolist()}
    (indices,) = row.nonzero()
    values = row[indices].tolist()
    return {"type": 0, "size": len(row), "indices": indices.tolist(), "values": values}
