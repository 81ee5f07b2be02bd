"""What is sent for a segment, and what the averager does with the mean of what arrived.

A codec is the same object at both ends. ``FullPrecision`` sends the values themselves and the mean
becomes the center. ``BFloat16Changes`` halves the bytes: the *changes* since the last center travel
as bfloat16, because rounding the parameters themselves to 8 bits of mantissa would lose every
update smaller than 1/256 of a parameter.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparkdl.protocols import Segment


class Codec(Protocol):
    """How one round's values travel; all methods see flat 1-D chunks."""

    name: str
    keeps_base: bool
    """Whether workers must keep a copy of the last center."""

    def wire_dtype(self, segment: Segment) -> torch.dtype:
        """Element type of contributions and replies."""

    def encode(self, values: Tensor, base: Tensor | None, segment: Segment) -> Tensor:
        """Worker: what to send for ``values``, given the last center ``base``."""

    def decode(self, reply: Tensor, values: Tensor, base: Tensor | None, segment: Segment) -> None:
        """Worker: write the new center into ``values`` (and ``base``)."""

    def commit(self, center: list[Tensor], mean: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Averager: make the mean the new center.

        Args:
            center: the last center, a tensor a segment.
            mean: the mean of the contributions, a tensor a segment.

        Returns:
            The new center, and the tensors to reply with; the buffers given are reused.
        """

    def unchanged(self, center: list[Tensor], spare: list[Tensor]) -> list[Tensor]:
        """Averager: the tensors to reply with after a round to which nobody has contributed.

        Args:
            center: the center, which stays as it is.
            spare: of the same shapes and dtypes; may be overwritten.
        """


class FullPrecision:
    """Every value travels in the replica's own dtype."""

    name = "float32"
    keeps_base = False

    def wire_dtype(self, segment: Segment) -> torch.dtype:
        """The replica's own."""
        return segment.dtype

    def encode(self, values: Tensor, base: Tensor | None, segment: Segment) -> Tensor:
        """The values themselves, a view."""
        return values

    def decode(self, reply: Tensor, values: Tensor, base: Tensor | None, segment: Segment) -> None:
        """Overwrite the values."""
        values.copy_(reply)

    def commit(self, center: list[Tensor], mean: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The mean is the center."""
        return mean, mean

    def unchanged(self, center: list[Tensor], spare: list[Tensor]) -> list[Tensor]:
        """The center once more."""
        return center


class BFloat16Changes:
    """Changes since the last center travel as bfloat16; integer segments travel as they are."""

    name = "bfloat16"
    keeps_base = True

    def wire_dtype(self, segment: Segment) -> torch.dtype:
        """bfloat16 for everything that is averaged."""
        return torch.bfloat16 if segment.averaged else segment.dtype

    def encode(self, values: Tensor, base: Tensor | None, segment: Segment) -> Tensor:
        """The rounded change."""
        if not segment.averaged or base is None:
            return values
        return (values - base).to(torch.bfloat16)

    def decode(self, reply: Tensor, values: Tensor, base: Tensor | None, segment: Segment) -> None:
        """Move the base by the mean change, exactly as the averager moved the center."""
        if not segment.averaged or base is None:
            values.copy_(reply)
            return
        base.add_(reply.to(base.device))
        values.copy_(base)

    def commit(self, center: list[Tensor], mean: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Round the mean change as the workers will see it, then move the center by it."""
        for middle, change in zip(center, mean, strict=True):
            if middle.is_floating_point():
                change.copy_(change.to(torch.bfloat16))
                middle.add_(change)
            else:
                middle.copy_(change)
        return center, mean

    def unchanged(self, center: list[Tensor], spare: list[Tensor]) -> list[Tensor]:
        """No change, and integers once more."""
        for middle, change in zip(center, spare, strict=True):
            if middle.is_floating_point():
                change.zero_()
            else:
                change.copy_(middle)
        return spare


CODECS: dict[str, type[FullPrecision] | type[BFloat16Changes]] = {
    "float32": FullPrecision,
    "bfloat16": BFloat16Changes,
}
"""Codecs by the name that strategies give as ``wire_dtype``."""
