"""Numbers, booleans, arrays of them, including nested ones, and rows of bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.encodings.encoding import (
    UNKNOWN,
    DecodedRows,
    Encoding,
    Shape,
    binary_bytes,
    broken_where,
    lists_of,
    numpy_of,
)

if TYPE_CHECKING:  # the process that starts the ranks of a task has no torch
    import torch
    from torch import Tensor


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


class RawBytes(Encoding):
    """The raw memory of a row, in the tensor's dtype, row-major."""

    name = "bytes"
    numeric = False
    of_bytes = True
    needs_dtype = True

    def takes(self, kind: pa.DataType) -> bool:
        """Binary rows."""
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    def decode(self, values: pa.Array, shape: Shape, dtype: torch.dtype) -> DecodedRows:
        """The bytes of a row as a list of bytes."""
        size = self.list_length(math.prod(shape), dtype)
        lengths = numpy_of(pc.binary_length(values))
        wrong = lengths != size
        if wrong.any():
            found = int(lengths[wrong][0])
            reason = f"has {found} bytes, but {dtype} of shape {shape} takes {size}"
            broken = broken_where(wrong, reason.replace("torch.", ""))
            return self.decode(values.filter(pa.array(~wrong)), shape, dtype)[0], broken
        return lists_of(binary_bytes(values), len(values)), None

    def list_length(self, elements: int, dtype: torch.dtype) -> int:
        """The number of bytes that the elements take."""
        return elements * dtype.itemsize

    def tensor(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """View the same memory as the tensor's dtype."""
        return numbers.view(dtype)


BYTES = RawBytes()
