"""pyspark.ml's vectors, dense and sparse, in Spark's internal form: structs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.encodings.encoding import (
    DecodedRows,
    Encoding,
    Shape,
    broken_where,
    has_fields,
    numpy_of,
)

if TYPE_CHECKING:  # the process that starts the ranks of a task has no torch
    import torch

DENSE, SPARSE = 1, 0
"""The values of the field ``type`` of a vector; no others are valid."""


MAX_SIZE = 1 << 24
"""The longest sparse vector. A row itself says how long it is, so a few bytes could take gigabytes.
"""
VECTOR_TYPE = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)
VECTOR_FIELDS = [field.name for field in VECTOR_TYPE]


class Vectors(Encoding):
    """Vectors of doubles. Their lengths may turn out to be unequal."""

    name = "vector"
    paddable = True

    def takes(self, kind: pa.DataType) -> bool:
        """Structs with a vector's fields."""
        return has_fields(kind, VECTOR_FIELDS)

    def grown_elements(self, values: pa.Array, shape: Shape) -> int:
        """The size of the longest sparse vector."""
        longest: int = pc.max(pc.struct_field(values, "size")).as_py() or 0
        return min(longest, MAX_SIZE)

    def decode(self, values: pa.Array, shape: Shape, dtype: torch.dtype) -> DecodedRows:
        """Lists of doubles."""
        kind, size, indices, numbers = values.flatten()
        kinds, counts = numpy_of(kind.fill_null(-1)), _lengths(numbers)
        sparse = kinds == SPARSE
        wrong = (~sparse & (kinds != DENSE)) | (counts < 0)
        if sparse.any():
            sizes, lengths = numpy_of(size.fill_null(-1)), _lengths(indices)
            wrong |= _with_nulls(numbers, counts)
            wrong |= sparse & ((sizes < 0) | (sizes > MAX_SIZE) | (lengths != counts))
            wrong |= sparse & _outside(indices, lengths, sizes)
        if wrong.any():
            row = values[int(np.flatnonzero(wrong)[0])]
            reason = (
                f"is not a vector: its type is {row['type']} (1 is dense, 0 sparse), its size "
                f"{row['size']} (at most {MAX_SIZE}), it has {_count(row['indices'])} indices "
                f"(each below the size) and {_count(row['values'])} values"
            )
            kept = values.filter(pa.array(~wrong))
            return self.decode(kept, shape, dtype)[0], broken_where(wrong, reason)
        if not sparse.any():
            return numbers, None
        lengths = np.where(sparse, numpy_of(size.fill_null(0)), counts)
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        rows = np.repeat(np.arange(len(values)), counts)
        columns = _within(counts)
        columns[sparse[rows]] = numpy_of(indices.filter(pa.array(sparse)).flatten())
        flat = np.zeros(starts[-1])
        flat[starts[rows] + columns] = numpy_of(numbers.flatten())
        return pa.LargeListArray.from_arrays(pa.array(starts), pa.array(flat)), None


VECTOR = Vectors()


def _lengths(lists: pa.Array) -> np.ndarray:
    """The number of elements of each list; -1 where there is no list."""
    return numpy_of(lists.value_lengths().fill_null(-1))


def _with_nulls(lists: pa.Array, lengths: np.ndarray) -> np.ndarray:
    """Which rows hold a null."""
    wrong, elements = np.zeros(len(lists), dtype=bool), lists.flatten()
    if elements.null_count:
        wrong[_rows(lengths)[numpy_of(elements.is_null()).astype(bool)]] = True
    return wrong


def _outside(indices: pa.Array, lengths: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Which rows have an index that is null, negative or not below the row's size."""
    wrong = np.zeros(len(lengths), dtype=bool)
    flat = numpy_of(indices.flatten().fill_null(-1))
    if len(flat) and (flat.min() < 0 or flat.max() >= sizes[lengths > 0].min()):
        row_of = _rows(lengths)
        wrong[row_of[(flat < 0) | (flat >= sizes[row_of])]] = True
    return wrong


def _rows(lengths: np.ndarray) -> np.ndarray:
    """The row of each element, for lists of the given lengths."""
    return np.repeat(np.arange(len(lengths)), np.maximum(lengths, 0))


def _count(elements: pa.Scalar) -> int | None:
    return len(elements) if elements.is_valid else None


def _within(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... within each row; the rows have ``counts`` elements."""
    starts = np.cumsum(counts) - counts
    within: np.ndarray = np.arange(counts.sum()) - np.repeat(starts, counts)
    return within
