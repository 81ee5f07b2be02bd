"""What travels between workers and the averager: a replica's state in chunks, and their bits.

The layout alone determines what each message holds: both ends cut every segment into the same
chunks. Packings are the bits in which a chunk's values travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparkdl.protocols import Layout

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
        return values.to(self.dtype)

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
