"""Arrow's list arrays, made and taken apart without running Python for each row; rows of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.encodings.encoding import DecodedRows, Encoding, Shape

if TYPE_CHECKING:  # the process that starts the ranks of a task has no torch
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Broken:
    """Rows that cannot be decoded.

    Attributes:
        rows: their positions, ascending, shape (n,).
        reason: what is wrong with the first of them, as the end of a sentence about it.
    """

    rows: np.ndarray
    reason: str

    def at(self, positions: np.ndarray) -> Broken:
        """The same rows, at their positions before others were taken out.

        Args:
            positions: the position of every row that was left, shape (rows left,).
        """
        return Broken(positions[self.rows], self.reason)


def broken_where(wrong: np.ndarray, reason: str) -> Broken | None:
    """The rows for which ``wrong`` is true; None if there are none.

    Args:
        wrong: shape (rows,), bool.
        reason: what is wrong with the first.
    """
    return Broken(np.flatnonzero(wrong), reason) if wrong.any() else None


def lists_of(flat: pa.Array | np.ndarray, rows: int) -> pa.Array:
    """Lists of equal length.

    Args:
        flat: the elements of all rows.
        rows: how many lists to cut them into.
    """
    elements = flat if isinstance(flat, pa.Array) else pa.array(flat)
    width = len(elements) // rows if rows else 0
    offsets = np.arange(rows + 1, dtype=np.int64) * width
    return pa.LargeListArray.from_arrays(pa.array(offsets), elements)


def numpy_of(values: pa.Array) -> np.ndarray:
    """The values that are not null, as a view where Arrow's memory allows; booleans as bytes."""
    present = values.drop_null() if values.null_count else values
    numbers: np.ndarray = present.to_numpy(zero_copy_only=False)
    return numbers.view(np.uint8) if numbers.dtype == np.bool_ else numbers


def binary_bytes(values: pa.Array) -> pa.Array:
    """The bytes of all rows, concatenated, without a copy.

    Args:
        values: binary rows, none null.
    """
    kind = pa.large_list if pa.types.is_large_binary(values.type) else pa.list_
    _, offsets, data = values.buffers()
    if data is None:
        return pa.array([], pa.uint8())
    elements = pa.Array.from_buffers(pa.uint8(), data.size, [None, data])
    # Arrow keeps binary rows the way it keeps lists of bytes.
    lists = pa.Array.from_buffers(
        kind(pa.uint8()),
        len(values),
        [None, offsets],
        offset=values.offset,
        children=[elements],
    )
    return lists.flatten()


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
