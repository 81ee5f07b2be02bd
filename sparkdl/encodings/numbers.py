"""Numbers, booleans, and arrays of them, including nested ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sparkdl.encodings.encoding import UNKNOWN, DecodedRows, Encoding, Shape
from sparkdl.encodings.lists import broken_where, lists_of, numpy_of

if TYPE_CHECKING:  # the process that starts the ranks of a task has no torch
    import torch


class Numbers(Encoding):
    """Numbers as they are; nested arrays as one list per row."""

    name = "numbers"
    paddable = True

    def takes(self, kind: pa.DataType) -> bool:
        """Numbers and arrays; also columns of nothing but nulls, which are refused as such."""
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        return bool(
            pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_boolean(kind)
            or pa.types.is_null(kind)
        )

    def is_decoded(self, kind: pa.DataType) -> bool:
        """True except for nested arrays."""
        return not _nested(kind)

    def decode(self, values: pa.Array, shape: Shape, dtype: torch.dtype) -> DecodedRows:
        """Flatten nested lists into one list per row."""
        inner, parents = values, np.arange(len(values))
        wrong = np.zeros(len(values), dtype=bool)
        ends = None
        for length in shape:
            lengths = numpy_of(inner.value_lengths().fill_null(-1))
            if length == UNKNOWN:
                ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            elif (lengths != length).any():
                wrong[parents[lengths != length]] = True
            if not _nested(inner.type):
                break
            parents = np.repeat(parents, np.maximum(lengths, 0))  # a null list has no elements
            inner = inner.flatten()
        told = str(shape).replace(str(UNKNOWN), "any length")
        broken = broken_where(wrong, f"is not an array of shape {told}")
        if broken is not None:
            return self.decode(values.filter(pa.array(~wrong)), shape, dtype)[0], broken
        if ends is not None:
            ends *= math.prod(shape[1:])
            return pa.LargeListArray.from_arrays(pa.array(ends), inner.flatten()), None
        return lists_of(inner.flatten(), len(values)), None


NUMBERS = Numbers()


def _nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) and pa.types.is_list(kind.value_type))
