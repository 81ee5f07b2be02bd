"""What pyspark.ml's vectors and matrices have in common in Spark's internal form: structs."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sparkdl.encodings.lists import numpy_of

DENSE, SPARSE = 1, 0
"""The values of the field ``type`` of a vector or matrix; no others are valid."""


def outside(indices: pa.Array, lengths: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Which rows have an index that is null, negative or not below the row's size."""
    wrong = np.zeros(len(lengths), dtype=bool)
    flat = numpy_of(indices.flatten().fill_null(-1))
    if not len(flat) or (flat.min() >= 0 and flat.max() < sizes[lengths > 0].min()):
        return wrong
    row_of = rows_of(lengths)
    wrong[row_of[(flat < 0) | (flat >= sizes[row_of])]] = True
    return wrong


def with_null_elements(lists: pa.Array) -> np.ndarray:
    """Which rows are null or hold a null."""
    wrong = null_rows(lists)
    elements = lists.flatten()
    if elements.null_count:
        wrong[rows_of(lengths_of(lists))[numpy_of(elements.is_null()).astype(bool)]] = True
    return wrong


def null_rows(values: pa.Array) -> np.ndarray:
    """Which rows are null, shape (rows,), bool."""
    if not values.null_count:
        return np.zeros(len(values), dtype=bool)
    return numpy_of(values.is_null()).astype(bool)


def lengths_of(lists: pa.Array) -> np.ndarray:
    """The number of elements of each list; -1 where there is no list."""
    return numpy_of(lists.value_lengths().fill_null(-1))


def rows_of(lengths: np.ndarray) -> np.ndarray:
    """The row of each element, for lists of the given lengths."""
    return np.repeat(np.arange(len(lengths)), np.maximum(lengths, 0))
