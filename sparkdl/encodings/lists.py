"""Arrow's list arrays, made and taken apart without running Python for each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa


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
