"""pyspark.ml's matrices, dense and sparse, in Spark's internal form: structs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sparkdl.encodings.encoding import DecodedRows, Encoding, Shape, has_fields
from sparkdl.encodings.linalg import (
    DENSE,
    SPARSE,
    lengths_of,
    outside,
    rows_of,
    with_null_elements,
)
from sparkdl.encodings.lists import broken_where, lists_of, numpy_of

if TYPE_CHECKING:  # the process that starts the ranks of a task has no torch
    import torch

FIELDS = ["type", "numRows", "numCols", "colPtrs", "rowIndices", "values", "isTransposed"]


class Matrices(Encoding):
    """Matrices of doubles, all of one shape (rows, columns)."""

    name = "matrix"

    def takes(self, kind: pa.DataType) -> bool:
        """Structs with a matrix's fields."""
        return has_fields(kind, FIELDS)

    def grown_elements(self, values: pa.Array, shape: Shape) -> int:
        """All elements, including those that a sparse matrix leaves out."""
        return math.prod(shape)

    def decode(self, values: pa.Array, shape: Shape, dtype: torch.dtype) -> DecodedRows:
        """Lists of doubles, row by row."""
        kind, heights, widths, pointers, indices, numbers, transposed = values.flatten()
        height, width = shape
        wrong = numpy_of(heights.fill_null(-1)) != height
        wrong |= numpy_of(widths.fill_null(-1)) != width
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            found = (heights[first].as_py(), widths[first].as_py())
            reason = f"is a matrix of shape {found}, but the declared shape is {shape}"
        else:
            reason = (
                f"is not a valid matrix of shape {shape}: its values, row indices and column "
                "pointers do not match"
            )
        kinds = numpy_of(kind.fill_null(-1))
        by_rows = numpy_of(transposed.fill_null(False)).astype(bool)
        sparse = kinds == SPARSE
        wrong |= (~sparse & (kinds != DENSE)) | with_null_elements(numbers)
        wrong |= ~sparse & (lengths_of(numbers) != height * width)
        if sparse.any():
            majors, minors = np.where(by_rows, [[height], [width]], [[width], [height]])
            wrong |= sparse & _wrong_matrices(pointers, indices, numbers, majors, minors)
        if wrong.any():
            kept = values.filter(pa.array(~wrong))
            return self.decode(kept, shape, dtype)[0], broken_where(wrong, reason)
        flat = np.zeros((len(values), height, width))
        # Spark stores column after column; for a transposed matrix, row after row.
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
                major = np.repeat(
                    np.tile(np.arange(counts.shape[1]), len(counts)), counts.reshape(-1)
                )
                minor = numpy_of(indices.filter(mask).flatten())
                target[rows, major, minor] = numpy_of(numbers.filter(mask).flatten())
        return lists_of(flat.reshape(-1), len(values)), None


MATRIX = Matrices()


def _wrong_matrices(
    pointers: pa.Array, indices: pa.Array, numbers: pa.Array, majors: np.ndarray, minors: np.ndarray
) -> np.ndarray:
    """Which rows are not valid sparse matrices.

    Args:
        pointers: where each column begins in the indices and the numbers, and where the last ends.
        indices: the row of each number.
        numbers: the nonzero elements.
        majors: the number of columns, shape (rows,); for a transposed matrix, of rows.
        minors: the number of rows, shape (rows,); for a transposed matrix, of columns.

    Returns:
        Shape (rows,), bool.
    """
    counts, lengths = lengths_of(indices), lengths_of(pointers)
    wrong = outside(indices, counts, minors)
    wrong |= (lengths != majors + 1) | (counts != lengths_of(numbers))
    flat, row_of = numpy_of(pointers.flatten().fill_null(-1)), rows_of(lengths)
    falls = (np.diff(flat) < 0) & (np.diff(row_of) == 0)
    wrong[row_of[1:][falls]] = True
    whole = np.flatnonzero(~wrong)
    ends = np.cumsum(np.maximum(lengths, 0))[whole]
    wrong[whole] = (flat[ends - lengths[whole]] != 0) | (flat[ends - 1] != counts[whole])
    return wrong
