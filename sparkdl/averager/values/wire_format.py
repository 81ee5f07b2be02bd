"""How values travel between workers and averager, but not what they do to the center.

A wire format is the same object at both ends. ``FULL_PRECISION`` sends the values themselves.
``BFLOAT16_CHANGES`` halves the bytes: the *changes* since the last center travel as bfloat16,
because rounding the parameters themselves to 8 bits of mantissa would lose every update smaller
than 1/256 of a parameter. ``FLOAT8_CHANGES`` and ``FLOAT4_CHANGES`` round them to fewer bits.
``SPARSE_CHANGES`` sends the nonzero ones unrounded. Sums are formed in at least float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdl.averager.values.packing import AsDtype, Float4, Float8, Packing
from sparkdl.averager.values.sparse import Sparse
from sparkdl.protocols import Segment


def as_held(center: Tensor, dtype: torch.dtype) -> Tensor:
    """What a replica holds of a center, still in the center's dtype.

    A half-precision replica holds less than the full center. The part it lacks is not a change that
    it made: otherwise each round would take from the center again what the last has moved it by.

    Args:
        center: the center, never narrower than the replica.
        dtype: the replica's dtype.
    """
    return center.to(dtype).to(center.dtype)


@dataclass(frozen=True)
class WireFormat:
    """How one round's values travel; all methods see flat 1-D chunks.

    The sender packs what ``encode`` returns, and the receiver unpacks it. Values that do not travel
    as changes do so in the replica's own dtype, both ways.

    Attributes:
        name: of the format, for messages.
        up: the packing of changes that workers send, given the center's dtype.
        down: the packing of what they receive for them, likewise; None for the same.
        changes: the kinds of segments whose changes travel, integers excepted.
        replies_changes: whether that is the center's change, not the center: all workers must stay
            in step.
        given_changes: whether what a worker contributes is its change already, so that it may hold
            something back.
    """

    name: str
    up: Callable[[torch.dtype], Packing] = AsDtype
    down: Callable[[torch.dtype], Packing] | None = None
    changes: tuple[str, ...] = ("parameters", "buffers", "optimizer")
    replies_changes: bool = False
    given_changes: bool = False

    def sends_changes(self, segment: Segment) -> bool:
        """Whether workers send how a segment's values differ from the center received last.

        They then keep a copy of that center, the base.
        """
        return segment.averaged and segment.kind in self.changes

    def contribution(self, segment: Segment) -> Packing:
        """The packing in which workers send what ``encode`` returns."""
        if not self.sends_changes(segment):
            return AsDtype(segment.dtype)
        return self.up(segment.center_dtype)

    def reply(self, segment: Segment) -> Packing:
        """The packing in which they are sent what ``decode`` takes."""
        if self.down is None or not self.sends_changes(segment):
            return self.contribution(segment)
        return self.down(segment.center_dtype)

    def encode(self, values: Tensor, base: Tensor | None, segment: Segment) -> Tensor:
        """Worker: what to send for ``values``, given the last center ``base``."""
        if base is None or self.given_changes or not self.sends_changes(segment):
            return values
        return values.to(base.dtype) - as_held(base, values.dtype)

    def decode(self, reply: Tensor, values: Tensor, base: Tensor | None, segment: Segment) -> None:
        """Worker: write the new center into ``values`` (and ``base``)."""
        if base is None or not self.sends_changes(segment):
            values.copy_(reply)
        elif self.replies_changes:  # exactly as the averager moved the center
            base.add_(reply.to(base.device))
            values.copy_(base)
        else:
            values.copy_(reply)
            base.copy_(reply)


FULL_PRECISION = WireFormat("float32", changes=())
"""Every value travels in the replica's own dtype."""
CHANGES = WireFormat("changes")
"""Changes since the last center travel up, and the center travels down, in its own dtype.

For workers that exchange one by one: what one added to the center is not in another's base, and a
contribution of values would undo it.
"""
PARAMETER_CHANGES = WireFormat("parameter_changes", changes=("parameters",))
"""Parameters travel up as changes, everything else as values; the center travels down.

For rounds with contributions that began with an older center than others. Buffers and the
optimizer's state become the mean of values: a stale variance is still a variance, while a stale
change of one could make the center's negative.
"""
BFLOAT16_CHANGES = WireFormat("bfloat16", lambda _: AsDtype(torch.bfloat16), replies_changes=True)
"""Rounded changes both ways, at 2 bytes per value."""
FLOAT8_CHANGES = WireFormat("float8", lambda _: Float8(), replies_changes=True)
"""Rounded changes both ways, at a little more than 1 byte per value."""
FLOAT4_CHANGES = WireFormat("float4", lambda _: Float4(), lambda _: Float8(), replies_changes=True)
"""Rounded changes, at a little more than half a byte per value up, and twice that down.

What 4 bits lose is averaged out over the workers as far as their changes differ, as values are
rounded to the nearest; what they would lose of the mean is not.
"""
SPARSE_CHANGES = WireFormat("sparse", Sparse, replies_changes=True, given_changes=True)
"""Changes that workers choose to send travel up, and the center's change travels down.

Both are unrounded, in as few bytes as possible. Workers contribute changes, not values, so they may
hold something back.
"""
WIRE_FORMATS = {each.name: each for each in (FULL_PRECISION, BFLOAT16_CHANGES)}
"""Formats by the name that strategies give as ``wire_dtype``."""
NARROW_FORMATS = WIRE_FORMATS | {each.name: each for each in (FLOAT8_CHANGES, FLOAT4_CHANGES)}
"""The same, with those that suit changes over many steps."""
