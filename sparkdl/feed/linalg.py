"""pyspark.ml's vectors and matrices, dense and sparse, as Spark keeps them inside: structs."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sparkdl.feed.lists import Broken, broken_where, lists_of, numpy_of
from sparkdl.protocols import ColumnSpec

DENSE, SPARSE = 1, 0
"""What the field ``type`` says of a vector or matrix; nothing else is one."""
MAX_SIZE = 1 << 24
"""Longest sparse vector. A row says by itself how long it is, and a few bytes could take gigabytes.
"""


def decode_vectors(values: pa.Array, spec: ColumnSpec) -> tuple[pa.Array, Broken | None]:
    """Vectors as lists of doubles.

    Args:
        values: structs (type, size, indices, values), no row null.
        spec: not looked at; vectors may turn out to have unequal lengths.
    """
    kind, size, indices, numbers = values.flatten()
    kinds = numpy_of(kind.fill_null(-1))
    sparse = kinds == SPARSE
    wrong = (~sparse & (kinds != DENSE)) | _nulls(numbers)
    if sparse.any():
        wrong |= _with_null_elements(numbers)
        wrong |= sparse & _wrong_vectors(size, indices, numbers)
    if wrong.any():
        row = values[int(np.flatnonzero(wrong)[0])]
        reason = (
            f"is no vector: its type is {row['type']} (1 is dense, 0 sparse), its size "
            f"{row['size']} (at most {MAX_SIZE}), it has {_count(row['indices'])} indices "
            f"(each below the size) and {_count(row['values'])} values"
        )
        kept = values.filter(pa.array(~wrong))
        return decode_vectors(kept, spec)[0], broken_where(wrong, reason)
    if not sparse.any():
        return numbers, None
    counts = numpy_of(numbers.value_lengths())
    lengths = np.where(sparse, numpy_of(size.fill_null(0)), counts)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
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
    wrong = numpy_of(heights.fill_null(-1)) != height
    wrong |= numpy_of(widths.fill_null(-1)) != width
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        found = (heights[first].as_py(), widths[first].as_py())
        reason = f"is a matrix of shape {found}, the declared shape is {spec.row_shape}"
    else:
        reason = (
            f"is no matrix of shape {spec.row_shape}: its values, row indices and column pointers "
            "do not belong together"
        )
    kinds = numpy_of(kind.fill_null(-1))
    by_rows = numpy_of(transposed.fill_null(False)).astype(bool)
    sparse = kinds == SPARSE
    wrong |= (~sparse & (kinds != DENSE)) | _with_null_elements(numbers)
    wrong |= ~sparse & (_lengths(numbers) != height * width)
    if sparse.any():
        majors, minors = np.where(by_rows, [[height], [width]], [[width], [height]])
        wrong |= sparse & _wrong_matrices(pointers, indices, numbers, majors, minors)
    if wrong.any():
        kept = values.filter(pa.array(~wrong))
        return decode_matrices(kept, spec)[0], broken_where(wrong, reason)
    flat = np.zeros((len(values), height, width))
    # Spark keeps the columns one after the other; of a transposed matrix, the rows.
    for row_major in (False, True):
        chosen = by_rows == row_major
        target = flat if row_major else flat.transpose(0, 2, 1)
        dense = chosen & ~sparse
        if dense.any():
            stored = numpy_of(numbers.filter(pa.array(dense)).flatten())
            target[dense] = stored.reshape(-1, *target.shape[1:])
        thin = chosen & sparse
        if thin.any():
            mask = pa.array(thin)
            ends = numpy_of(pointers.filter(mask).flatten()).reshape(int(thin.sum()), -1)
            counts = np.diff(ends, axis=1)
            rows = np.repeat(np.flatnonzero(thin), counts.sum(axis=1))
            major = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.reshape(-1))
            minor = numpy_of(indices.filter(mask).flatten())
            target[rows, major, minor] = numpy_of(numbers.filter(mask).flatten())
    return lists_of(flat.reshape(-1), len(values)), None


def _wrong_vectors(size: pa.Array, indices: pa.Array, numbers: pa.Array) -> np.ndarray:
    """Which rows are no sparse vectors, shape (rows,), bool."""
    sizes = numpy_of(size.fill_null(-1))
    lengths = _lengths(indices)
    wrong = _outside(indices, lengths, sizes)
    wrong |= (sizes < 0) | (sizes > MAX_SIZE) | (lengths != _lengths(numbers))
    return wrong


def _wrong_matrices(
    pointers: pa.Array, indices: pa.Array, numbers: pa.Array, majors: np.ndarray, minors: np.ndarray
) -> np.ndarray:
    """Which rows are no sparse matrices.

    Args:
        pointers: where each column begins among the indices and the numbers, and where all end.
        indices: the row of each number.
        numbers: those that are not 0.
        majors: how many columns there are, shape (rows,); of a transposed matrix, rows.
        minors: how many rows there are, shape (rows,); of a transposed matrix, columns.

    Returns:
        Shape (rows,), bool.
    """
    counts, lengths = _lengths(indices), _lengths(pointers)
    wrong = _outside(indices, counts, minors)
    wrong |= (lengths != majors + 1) | (counts != _lengths(numbers))
    flat, row_of = numpy_of(pointers.flatten().fill_null(-1)), _rows_of(lengths)
    falls = (np.diff(flat) < 0) & (np.diff(row_of) == 0)
    wrong[row_of[1:][falls]] = True
    whole = np.flatnonzero(~wrong)
    ends = np.cumsum(np.maximum(lengths, 0))[whole]
    wrong[whole] = (flat[ends - lengths[whole]] != 0) | (flat[ends - 1] != counts[whole])
    return wrong


def _outside(indices: pa.Array, lengths: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """In which rows an index is null, negative or not below the row's size."""
    wrong = np.zeros(len(lengths), dtype=bool)
    flat = numpy_of(indices.flatten().fill_null(-1))
    if not len(flat) or (flat.min() >= 0 and flat.max() < sizes[lengths > 0].min()):
        return wrong
    row_of = _rows_of(lengths)
    wrong[row_of[(flat < 0) | (flat >= sizes[row_of])]] = True
    return wrong


def _with_null_elements(lists: pa.Array) -> np.ndarray:
    """Which rows are null, or hold a null."""
    wrong = _nulls(lists)
    elements = lists.flatten()
    if elements.null_count:
        wrong[_rows_of(_lengths(lists))[numpy_of(elements.is_null()).astype(bool)]] = True
    return wrong


def _nulls(values: pa.Array) -> np.ndarray:
    if not values.null_count:
        return np.zeros(len(values), dtype=bool)
    return numpy_of(values.is_null()).astype(bool)


def _lengths(lists: pa.Array) -> np.ndarray:
    """Elements of each list; -1 where there is none."""
    return numpy_of(lists.value_lengths().fill_null(-1))


def _rows_of(lengths: np.ndarray) -> np.ndarray:
    """The row of each element of lists with ``lengths``."""
    return np.repeat(np.arange(len(lengths)), np.maximum(lengths, 0))


def _count(elements: pa.Scalar) -> int | None:
    return len(elements) if elements.is_valid else None


def _within(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... for each row; the rows have ``counts`` elements."""
    starts = np.cumsum(counts) - counts
    within: np.ndarray = np.arange(counts.sum()) - np.repeat(starts, counts)
    return within
