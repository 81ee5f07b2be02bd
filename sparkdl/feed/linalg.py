"""pyspark.ml's vectors and matrices, dense and sparse, as Spark keeps them inside: structs."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sparkdl.feed.lists import Broken, broken_where, lists_of, numpy_of
from sparkdl.protocols import ColumnSpec

SPARSE = 0
"""What the field ``type`` says of a sparse vector or matrix; 1 says dense."""


def decode_vectors(values: pa.Array, spec: ColumnSpec) -> tuple[pa.Array, Broken | None]:
    """Vectors as lists of doubles.

    Args:
        values: structs (type, size, indices, values), no row null.
        spec: not looked at; vectors may turn out to have unequal lengths.
    """
    kind, size, indices, numbers = values.flatten()
    sparse = numpy_of(kind) == SPARSE
    if not sparse.any():
        return numbers, None
    counts = numpy_of(numbers.value_lengths())
    lengths = np.where(sparse, numpy_of(size.fill_null(0)), counts)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.repeat(np.arange(len(values)), counts)
    columns = _within(counts)
    columns[sparse[rows]] = numpy_of(indices.filter(pa.array(sparse)).flatten())
    flat = np.zeros(starts[-1])
    flat[starts[rows] + columns] = numpy_of(numbers.flatten())
    return pa.LargeListArray.from_arrays(pa.array(starts), pa.array(flat)), None


def decode_matrices(values: pa.Array, spec: ColumnSpec) -> tuple[pa.Array, Broken | None]:
    """Matrices as lists of doubles, row by row.

    Args:
        values: structs (type, numRows, numCols, colPtrs, rowIndices, values, isTransposed), no
            row null.
        spec: its row shape is (rows, columns).
    """
    kind, heights, widths, pointers, indices, numbers, transposed = values.flatten()
    height, width = spec.row_shape
    wrong = (numpy_of(heights) != height) | (numpy_of(widths) != width)
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        found = (heights[first].as_py(), widths[first].as_py())
        broken = broken_where(
            wrong, f"is a matrix of shape {found}, the declared shape is {spec.row_shape}"
        )
        return decode_matrices(values.filter(pa.array(~wrong)), spec)[0], broken
    flat = np.zeros((len(values), height, width))
    # Spark keeps the columns one after the other; of a transposed matrix, the rows.
    for row_major in (False, True):
        chosen = numpy_of(transposed).astype(bool) == row_major
        target = flat if row_major else flat.transpose(0, 2, 1)
        dense = chosen & (numpy_of(kind) != SPARSE)
        if dense.any():
            stored = numpy_of(numbers.filter(pa.array(dense)).flatten())
            target[dense] = stored.reshape(-1, *target.shape[1:])
        sparse = chosen & ~dense
        if sparse.any():
            mask = pa.array(sparse)
            ends = numpy_of(pointers.filter(mask).flatten()).reshape(int(sparse.sum()), -1)
            counts = np.diff(ends, axis=1)
            rows = np.repeat(np.flatnonzero(sparse), counts.sum(axis=1))
            major = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.reshape(-1))
            minor = numpy_of(indices.filter(mask).flatten())
            target[rows, major, minor] = numpy_of(numbers.filter(mask).flatten())
    return lists_of(flat.reshape(-1), len(values)), None


def _within(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... for each row; the rows have ``counts`` elements."""
    starts = np.cumsum(counts) - counts
    within: np.ndarray = np.arange(counts.sum()) - np.repeat(starts, counts)
    return within
