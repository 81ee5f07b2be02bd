"""In which bits values travel: what both ends do to a chunk before it is sent and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Packing(Protocol):
    """How a stretch of values is turned into what is sent; the same at both ends."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of what is sent."""

    def numel(self, values: int) -> int:
        """Elements of what is sent for so many values."""

    def pack(self, values: Tensor) -> Tensor:
        """What to send for 1-D values; may be the values themselves."""

    def unpack(self, packed: Tensor, values: int) -> Tensor:
        """The values, so many of them; may be what was sent itself."""


@dataclass(frozen=True)
class AsDtype:
    """Each value by itself, rounded to a dtype.

    Attributes:
        dtype: that one.
    """

    dtype: torch.dtype

    def numel(self, values: int) -> int:
        """As many."""
        return values

    def pack(self, values: Tensor) -> Tensor:
        """Rounded, if they are of another type."""
        return values.to(self.dtype)

    def unpack(self, packed: Tensor, values: int) -> Tensor:
        """As they came."""
        return packed
