"""What has to be known about a column's encoding, and the Arrow lists that encodings return.

Lists are made and taken apart without running Python for each row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:  # the process that starts the ranks of a task has no torch
    import torch
    from torch import Tensor

UNKNOWN = -1
"""A dimension of a row's shape that only the data can tell."""

Shape = tuple[int, ...]
"""The shape of one row: () for a number; ``UNKNOWN`` where only the data can tell."""


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


DecodedRows = tuple[pa.Array, Broken | None]
"""Numbers, or one list of numbers per row, without broken rows; and the broken rows, if any."""


class Encoding(ABC):
    """How the rows of a column arrive.

    It has no state: all objects of one name are equal, and travel with the columns that have them.

    Attributes:
        name: its name in messages, and in the files of saved models, so it must never change.
        numeric: whether a row's numbers are the user's own, so that their range is checked.
        paddable: whether rows of arrays may have unequal lengths.
        chosen: whether only the user, and no column type, can say that rows arrive like this.
        of_bytes: whether the tensor's default dtype is that of bytes; else the numbers decide it.
        needs_dtype: whether the user has to say the dtype.
        dimension_names: the names of a row's dimensions, where they have any, for messages.
    """

    name: str
    numeric: ClassVar[bool] = True
    paddable: ClassVar[bool] = False
    chosen: ClassVar[bool] = False
    of_bytes: ClassVar[bool] = False
    needs_dtype: ClassVar[bool] = False
    dimension_names: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def takes(self, kind: pa.DataType) -> bool:
        """Whether rows of this Arrow type arrive like this."""

    @abstractmethod
    def decode(self, values: pa.Array, shape: Shape, dtype: torch.dtype) -> DecodedRows:
        """Turn rows into numbers, or lists of numbers; all at once wherever that is possible.

        Args:
            values: as Spark delivers them, no row null.
            shape: the shape of the tensor's rows.
            dtype: the tensor's dtype.
        """

    def is_decoded(self, kind: pa.DataType) -> bool:
        """Whether rows of this Arrow type arrive as numbers or lists of numbers already."""
        return False

    def reads(self, other: Encoding) -> bool:
        """Whether this decodes rows that, without the user's word, would arrive as ``other``."""
        return False

    def shape_fault(self, shape: Sequence[int]) -> str | None:
        """What a row's declared shape has to be if it is wrong; else None."""
        return None

    def grown_elements(self, values: pa.Array, shape: Shape) -> int:
        """Numbers per row once decoded, if that may be far more than arrive; else 0."""
        return 0

    def list_length(self, elements: int, dtype: torch.dtype) -> int:
        """How many numbers are decoded for a row of ``elements`` elements."""
        return elements

    def tensor(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Decoded numbers, of any shape, as elements of the tensor."""
        return numbers.to(dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Encoding) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name


def has_fields(kind: pa.DataType, names: Sequence[str]) -> bool:
    """Whether an Arrow type is a struct with these fields, in this order."""
    return bool(pa.types.is_struct(kind)) and [field.name for field in kind] == list(names)


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
