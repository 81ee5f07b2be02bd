"""How values travel between workers and averager, but not what they do to the center.

A wire format is the same object at both ends. ``FULL_PRECISION`` sends the values themselves.
``BFLOAT16_CHANGES`` halves the bytes: the *changes* since the last center travel as bfloat16,
because rounding the parameters themselves to 8 bits of mantissa would lose every update smaller
than 1/256 of a parameter. ``FLOAT8_CHANGES`` and ``FLOAT4_CHANGES`` round them to fewer bits.
``SPARSE_CHANGES`` sends the nonzero ones unrounded. Sums are formed in at least float32.

What travels between workers and the averager: a replica's state in chunks, and their bits.

The layout alone determines what each message holds: both ends cut every segment into the same
chunks. Packings are the bits in which a chunk's values travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparkdl.averager.values.sparse import Sparse
from sparkdl.protocols import Layout, Segment

MAX_CHUNK_BYTES = 1 << 20
MIN_CHUNK_BYTES = 64 << 10
HELD_BYTES = 64 << 20
"""How much of contributions waiting for their turn the averager holds, for all workers together."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message's worth of a segment: elements ``start`` to ``stop``."""

    segment: int
    start: int
    stop: int

    def of(self, segments: list[Tensor]) -> Tensor:
        """The chunk's elements, a view."""
        return segments[self.segment][self.start : self.stop]


def chunk_bytes(world_size: int) -> int:
    """Size of a message, such that the averager can hold one from every worker."""
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, HELD_BYTES // world_size))


def plan_chunks(layout: Layout, size: int) -> list[Chunk]:
    """Cut every segment into chunks of at most ``size`` bytes in its center's dtype."""
    (chunks,) = plan_fragments(layout, size, 1)
    return chunks


def plan_fragments(layout: Layout, size: int, fragments: int) -> list[list[Chunk]]:
    """Cut the state into fragments, and these into chunks.

    Args:
        layout: kinds and sizes of the segments.
        size: the most bytes that a chunk may have in its center's dtype.
        fragments: how many; each has an equal stretch of every segment.
    """
    return [
        [
            Chunk(index, start, min(start + step, stop))
            for index, segment in enumerate(layout)
            for step in [max(1, size // segment.center_dtype.itemsize)]
            for stop in [segment.numel * (fragment + 1) // fragments]
            for start in range(segment.numel * fragment // fragments, stop, step)
        ]
        for fragment in range(fragments)
    ]


class Packing(Protocol):
    """How a stretch of values is turned into what is sent; the same at both ends."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of what is sent."""

    @property
    def varies(self) -> bool:
        """Whether what is sent may have fewer elements than ``numel``."""

    def numel(self, values: int) -> int:
        """Number of elements sent for this many values, or the most if it varies."""

    def pack(self, values: Tensor) -> Tensor:
        """What to send for 1-D values; may be the tensor itself."""

    def unpack(self, packed: Tensor, values: int) -> Tensor:
        """The values, ``values`` in number; may be the tensor that was sent."""


@dataclass(frozen=True)
class AsDtype:
    """Each value separately, rounded to a dtype."""

    dtype: torch.dtype
    varies: ClassVar[bool] = False

    def numel(self, values: int) -> int:
        """As many elements as values."""
        return values

    def pack(self, values: Tensor) -> Tensor:
        """Rounded, if they have another dtype."""
        return values if values.dtype is self.dtype else values.to(self.dtype)

    def unpack(self, packed: Tensor, values: int) -> Tensor:
        """Unchanged."""
        return packed


BLOCK = 128
"""Values that share a scale, a power of two that takes one byte: its exponent in a float32."""
_SMALLEST, _LARGEST = 1, 253
"""Limits of those exponents, such that the reciprocal of the scale is a float32 too."""
_BIAS, _FRACTION_BITS = 127, 23
"""A float32's exponent bias and number of fraction bits."""
_FLOAT8_TOP = 0.875, 9
"""Fraction and exponent of the largest number of float8_e4m3fn, 448."""
_FLOAT4_POWERS = 7
"""Powers of two that a 4-bit number can have besides 0; the largest is the scale."""
_FLOAT4_NUMBERS = torch.tensor(
    [
        sign * (2.0 ** (power - _FLOAT4_POWERS) if power else 0.0)
        for sign in (1, -1)
        for power in range(_FLOAT4_POWERS + 1)
    ]
)


@dataclass(frozen=True)
class Float8:
    """8 bits per value: float8_e4m3fn, with a scale shared by each block of values.

    Values down to 1/28,000 of their block's largest lose at most 1/16.
    """

    dtype: ClassVar[torch.dtype] = torch.uint8
    varies: ClassVar[bool] = False

    def numel(self, values: int) -> int:
        """A byte per value, and one per block."""
        return _blocks(values) + values

    def pack(self, values: Tensor) -> Tensor:
        """Scales, then values."""
        blocks = _in_blocks(values)
        fraction, exponent = torch.frexp(blocks.abs().amax(1))
        top, top_exponent = _FLOAT8_TOP
        scale = exponent - top_exponent + (fraction > top) + _BIAS
        scale.clamp_(_SMALLEST, _LARGEST)
        rounded = blocks.mul_(_power(2 * _BIAS - scale)[:, None]).to(torch.float8_e4m3fn)
        octets = rounded.view(torch.uint8).flatten()[: len(values)]
        return torch.cat([scale.to(torch.uint8), octets])

    def unpack(self, packed: Tensor, values: int) -> Tensor:
        """The values in float32."""
        scale, octets = _scales(packed, values)
        return _scaled(octets.view(torch.float8_e4m3fn).float(), scale)


@dataclass(frozen=True)
class Float4:
    """4 bits per value: a sign, and 0 or one of seven powers of two (E3M0); one scale per block.

    Rounded to the nearest: values down to 1/64 of their block's largest lose at most 1/3, and those
    below 1/192 become 0.
    """

    dtype: ClassVar[torch.dtype] = torch.uint8
    varies: ClassVar[bool] = False

    def numel(self, values: int) -> int:
        """Half a byte per value, and a byte per block."""
        return _blocks(values) + (values + 1) // 2

    def pack(self, values: Tensor) -> Tensor:
        """Scales, then pairs of values."""
        blocks = _in_blocks(values)
        bits = blocks.abs().view(torch.int32)
        # Exponents of the next lower and of the nearest power of two.
        below = bits >> _FRACTION_BITS
        nearest = (bits + (1 << (_FRACTION_BITS - 1))) >> _FRACTION_BITS
        scale = nearest.amax(1).clamp_(_SMALLEST, _LARGEST)
        power = nearest - scale[:, None] + _FLOAT4_POWERS
        # Values nearer to the smallest power than to 0, though nearest to the next lower power.
        power += (power == 0) & (below == nearest)
        power.clamp_(0, _FLOAT4_POWERS)
        power += ((blocks < 0) & (power > 0)) * (_FLOAT4_POWERS + 1)
        pairs = power.to(torch.uint8).view(-1, 2)
        octets = pairs[:, 0] | pairs[:, 1] << 4
        return torch.cat([scale.to(torch.uint8), octets[: (len(values) + 1) // 2]])

    def unpack(self, packed: Tensor, values: int) -> Tensor:
        """The values in float32."""
        scale, octets = _scales(packed, values)
        codes = torch.stack([octets & 15, octets >> 4], 1).flatten()[:values]
        return _scaled(_FLOAT4_NUMBERS.index_select(0, codes.int()), scale)


def _blocks(values: int) -> int:
    return -(-values // BLOCK)


def _in_blocks(values: Tensor) -> Tensor:
    """A copy as float32 of shape (blocks, BLOCK), the last block padded with zeros."""
    blocks = _blocks(len(values))
    padded = torch.empty(blocks * BLOCK, dtype=torch.float32)
    padded[: len(values)] = values
    padded[len(values) :] = 0
    return padded.view(blocks, BLOCK)


def _power(exponent: Tensor) -> Tensor:
    """The power of two that has this exponent as a float32."""
    return (exponent << _FRACTION_BITS).view(torch.float32)


def _scales(packed: Tensor, values: int) -> tuple[Tensor, Tensor]:
    """The scale of each block, and what follows the scales."""
    blocks = _blocks(values)
    return _power(packed[:blocks].int()), packed[blocks:]


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    whole = len(values) // BLOCK * BLOCK
    values[:whole].view(-1, BLOCK).mul_(scale[: whole // BLOCK, None])
    values[whole:].mul_(scale[-1:])
    return values


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
