"""What has to be known of a column's encoding, and what it does if nothing else is said."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from sparkdl.encodings.lists import Broken

if TYPE_CHECKING:  # the process that starts the ranks of a task has no torch
    import torch
    from torch import Tensor

UNKNOWN = -1
"""A dimension of a row's shape that only the data will tell."""

Shape = tuple[int, ...]
"""Of one row: () for a number; ``UNKNOWN`` where only the data will tell."""

DecodedRows = tuple[pa.Array, Broken | None]
"""Numbers, or one list of numbers a row; and the rows that are not among them."""


class Encoding(ABC):
    """How the rows of a column arrive.

    It has no state: all objects of one name are equal, and travel with the columns that have them.

    Attributes:
        name: in messages, and in the files of saved models, where it stays what it was.
        numeric: whether the numbers of a row are the user's own, so that their range is looked at.
        paddable: whether rows of arrays may be of unequal length.
        chosen: whether no type tells that rows arrive like this, but only the user can.
        of_bytes: whether the tensor is of bytes if nothing else is said; else the numbers say it.
        needs_dtype: whether the user has to say it.
        dimension_names: of one row, where each has its own, for messages.
    """

    name: ClassVar[str]
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
            shape: of the tensor's rows.
            dtype: of the tensor.
        """

    def is_decoded(self, kind: pa.DataType) -> bool:
        """Whether rows of this Arrow type are numbers, or lists of numbers, as they arrive."""
        return False

    def reads(self, other: Encoding) -> bool:
        """Whether rows arrive as of ``other`` if the user says nothing of them."""
        return False

    def shape_fault(self, shape: Sequence[int]) -> str | None:
        """What a declared shape of a row has to be, if it is not; else None."""
        return None

    def grown_elements(self, values: pa.Array, shape: Shape) -> int:
        """Numbers a row once it is decoded, if that may be far more than arrive; else 0."""
        return 0

    def list_length(self, elements: int, dtype: torch.dtype) -> int:
        """Numbers that are decoded for a row of so many elements."""
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
    """Whether an Arrow type is of structs of these fields, in this order."""
    return bool(pa.types.is_struct(kind)) and [field.name for field in kind] == list(names)
