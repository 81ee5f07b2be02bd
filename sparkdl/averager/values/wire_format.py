"""How values travel between workers and averager, but not what they do to the center.

A wire format is the same object at both ends. ``FullPrecision`` sends the values themselves.
``BFloat16Changes`` halves the bytes: the *changes* since the last center travel as bfloat16,
because rounding the parameters themselves to 8 bits of mantissa would lose every update smaller
than 1/256 of a parameter. ``Float8Changes`` and ``Float4Changes`` round them to fewer bits.
``SparseChanges`` sends the nonzero ones unrounded. Sums are formed in at least float32.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparkdl.averager.values.packing import AsDtype, Float4, Float8, Packing
from sparkdl.averager.values.sparse import Sparse
from sparkdl.protocols import Segment


class WireFormat(Protocol):
    """How one round's values travel; all methods see flat 1-D chunks.

    The sender packs what ``encode`` returns, and the receiver unpacks it.
    """

    name: str
    replies_changes: bool
    """Whether replies hold the center's change, not the center: all workers must stay in step."""

    def sends_changes(self, segment: Segment) -> bool:
        """Whether workers send how a segment's values differ from the center received last.

        They then keep a copy of that center, the base.
        """

    def contribution(self, segment: Segment) -> Packing:
        """The packing in which workers send what ``encode`` returns."""

    def reply(self, segment: Segment) -> Packing:
        """The packing in which they are sent what ``decode`` takes."""

    def encode(self, values: Tensor, base: Tensor | None, segment: Segment) -> Tensor:
        """Worker: what to send for ``values``, given the last center ``base``."""

    def decode(self, reply: Tensor, values: Tensor, base: Tensor | None, segment: Segment) -> None:
        """Worker: write the new center into ``values`` (and ``base``)."""


def as_held(center: Tensor, dtype: torch.dtype) -> Tensor:
    """What a replica holds of a center, still in the center's dtype.

    A half-precision replica holds less than the full center. The part it lacks is not a change that
    it made: otherwise each round would take from the center again what the last has moved it by.

    Args:
        center: the center, never narrower than the replica.
        dtype: the replica's dtype.
    """
    return center.to(dtype).to(center.dtype)


class FullPrecision:
    """Every value travels in the replica's own dtype."""

    name = "float32"
    replies_changes = False

    def sends_changes(self, segment: Segment) -> bool:
        """Never."""
        return False

    def contribution(self, segment: Segment) -> Packing:
        """Its own dtype."""
        return AsDtype(segment.dtype)

    reply = contribution

    def encode(self, values: Tensor, base: Tensor | None, segment: Segment) -> Tensor:
        """The values themselves, a view."""
        return values

    def decode(self, reply: Tensor, values: Tensor, base: Tensor | None, segment: Segment) -> None:
        """Overwrite the values."""
        values.copy_(reply)


class Changes:
    """Changes since the last center travel up, and the center travels down, in its own dtype.

    For workers that exchange one by one: what one added to the center is not in another's base, and
    a contribution of values would undo it.
    """

    name = "changes"
    replies_changes = False

    def sends_changes(self, segment: Segment) -> bool:
        """All but integers."""
        return segment.averaged

    def contribution(self, segment: Segment) -> Packing:
        """The center's dtype."""
        return AsDtype(segment.center_dtype)

    reply = contribution

    def encode(self, values: Tensor, base: Tensor | None, segment: Segment) -> Tensor:
        """The change."""
        if not segment.averaged or base is None:
            return values
        return values.to(base.dtype) - as_held(base, values.dtype)

    def decode(self, reply: Tensor, values: Tensor, base: Tensor | None, segment: Segment) -> None:
        """Overwrite both."""
        values.copy_(reply)
        if base is not None:
            base.copy_(reply)


class ParameterChanges(Changes):
    """Parameters travel up as changes, everything else as values; the center travels down.

    For rounds with contributions that began with an older center than others. Buffers and the
    optimizer's state become the mean of values: a stale variance is still a variance, while a stale
    change of one could make the center's negative.
    """

    name = "parameter_changes"

    def sends_changes(self, segment: Segment) -> bool:
        """Only parameters."""
        return segment.averaged and segment.kind == "parameters"

    def contribution(self, segment: Segment) -> Packing:
        """The center's dtype for changes, the replica's own for the rest."""
        return AsDtype(segment.center_dtype if self.sends_changes(segment) else segment.dtype)

    reply = contribution

    def encode(self, values: Tensor, base: Tensor | None, segment: Segment) -> Tensor:
        """The change, or the values."""
        return super().encode(values, base, segment) if self.sends_changes(segment) else values


class BothWays(Changes):
    """Changes travel up, and the center's change travels down; integer segments unchanged."""

    replies_changes = True

    def decode(self, reply: Tensor, values: Tensor, base: Tensor | None, segment: Segment) -> None:
        """Move the base by the mean change, exactly as the averager moved the center."""
        if not segment.averaged or base is None:
            values.copy_(reply)
            return
        base.add_(reply.to(base.device))
        values.copy_(base)


class RoundedChanges(BothWays):
    """Changes since the last center travel rounded, up and down; integer segments as they are."""

    up: Packing
    down: Packing

    def contribution(self, segment: Segment) -> Packing:
        """Rounded if it is averaged."""
        return self.up if segment.averaged else AsDtype(segment.dtype)

    def reply(self, segment: Segment) -> Packing:
        """Rounded if it is averaged."""
        return self.down if segment.averaged else AsDtype(segment.dtype)


class BFloat16Changes(RoundedChanges):
    """2 bytes per value."""

    name = "bfloat16"
    up = down = AsDtype(torch.bfloat16)


class Float8Changes(RoundedChanges):
    """A little more than 1 byte per value."""

    name = "float8"
    up = down = Float8()


class Float4Changes(RoundedChanges):
    """A little more than half a byte per value up, and twice that down.

    What 4 bits lose is averaged out over the workers as far as their changes differ, as values are
    rounded to the nearest; what they would lose of the mean is not.
    """

    name = "float4"
    up, down = Float4(), Float8()


class SparseChanges(BothWays):
    """Changes that workers choose to send travel up, and the center's change travels down.

    Both are unrounded, in as few bytes as possible. Workers contribute changes, not values, so they
    may hold something back. Integer segments travel unchanged.
    """

    name = "sparse"

    def contribution(self, segment: Segment) -> Packing:
        """Sparse, if the segment is averaged."""
        return Sparse(segment.center_dtype) if segment.averaged else AsDtype(segment.dtype)

    reply = contribution

    def encode(self, values: Tensor, base: Tensor | None, segment: Segment) -> Tensor:
        """The values, which are changes."""
        return values


WIRE_FORMATS: dict[str, type[FullPrecision] | type[BFloat16Changes]] = {
    "float32": FullPrecision,
    "bfloat16": BFloat16Changes,
}
"""Formats by the name that strategies give as ``wire_dtype``."""
NARROW_FORMATS: dict[str, type[FullPrecision] | type[RoundedChanges]] = {
    **WIRE_FORMATS,
    "float8": Float8Changes,
    "float4": Float4Changes,
}
"""The same, with those that suit changes over many steps."""
