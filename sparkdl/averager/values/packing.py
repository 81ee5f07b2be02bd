"""The form in which values travel: what both ends do to a chunk before and after it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Packing(Protocol):
    """How a stretch of values is turned into what is sent; the same at both ends."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of what is sent."""

    @property
    def varies(self) -> bool:
        """Whether what is sent may have fewer elements than ``numel``."""

    def numel(self, values: int) -> int:
        """Elements of what is sent for this many values, or the most there can be."""

    def pack(self, values: Tensor) -> Tensor:
        """What to send for 1-D values; may be the values themselves."""

    def unpack(self, packed: Tensor, values: int) -> Tensor:
        """The given number of values; may be what was sent itself."""


@dataclass(frozen=True)
class AsDtype:
    """Each value on its own, rounded to a dtype.

    Attributes:
        dtype: the dtype that is sent.
    """

    dtype: torch.dtype
    varies: ClassVar[bool] = False

    def numel(self, values: int) -> int:
        """The same number."""
        return values

    def pack(self, values: Tensor) -> Tensor:
        """The values, rounded if they are of another type."""
        return values.to(self.dtype)

    def unpack(self, packed: Tensor, values: int) -> Tensor:
        """The values as they came."""
        return packed


BLOCK = 128
"""Values that share a scale: a power of two in one byte, its exponent in a float32."""
_SMALLEST, _LARGEST = 1, 253
"""The range of those exponents, such that the scale's reciprocal is a float32 too."""
_BIAS, _FRACTION_BITS = 127, 23
"""Bits of a float32's exponent, and of its fraction."""
_FLOAT8_TOP = 0.875, 9
"""Fraction and exponent of the largest number of float8_e4m3fn, 448."""
_FLOAT4_POWERS = 7
"""Powers of two that a 4-bit number has besides 0, the largest of which is the scale."""
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

    Values down to 1/28,000 of their block's largest lose no more than 1/16.
    """

    dtype: ClassVar[torch.dtype] = torch.uint8
    varies: ClassVar[bool] = False

    def numel(self, values: int) -> int:
        """One byte each, and one per block."""
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
        """In float32."""
        scale, octets = _scales(packed, values)
        return _scaled(octets.view(torch.float8_e4m3fn).float(), scale)


@dataclass(frozen=True)
class Float4:
    """4 bits per value: a sign, and 0 or one of seven powers of two (E3M0), a scale for each block.

    Values are rounded to the nearest: those down to 1/64 of their block's largest lose no more than
    1/3; those below 1/192 become 0.
    """

    dtype: ClassVar[torch.dtype] = torch.uint8
    varies: ClassVar[bool] = False

    def numel(self, values: int) -> int:
        """Half a byte each, and one byte per block."""
        return _blocks(values) + (values + 1) // 2

    def pack(self, values: Tensor) -> Tensor:
        """Scales, then pairs of values."""
        blocks = _in_blocks(values)
        bits = blocks.abs().view(torch.int32)
        # The exponents of the next lower power of two, and of the nearest.
        below = bits >> _FRACTION_BITS
        nearest = (bits + (1 << (_FRACTION_BITS - 1))) >> _FRACTION_BITS
        scale = nearest.amax(1).clamp_(_SMALLEST, _LARGEST)
        power = nearest - scale[:, None] + _FLOAT4_POWERS
        # Values nearer to the smallest power than to 0, though nearer still to the next smaller
        # one.
        power += (power == 0) & (below == nearest)
        power.clamp_(0, _FLOAT4_POWERS)
        power += ((blocks < 0) & (power > 0)) * (_FLOAT4_POWERS + 1)
        pairs = power.to(torch.uint8).view(-1, 2)
        octets = pairs[:, 0] | pairs[:, 1] << 4
        return torch.cat([scale.to(torch.uint8), octets[: (len(values) + 1) // 2]])

    def unpack(self, packed: Tensor, values: int) -> Tensor:
        """In float32."""
        scale, octets = _scales(packed, values)
        codes = torch.stack([octets & 15, octets >> 4], 1).flatten()[:values]
        return _scaled(_FLOAT4_NUMBERS.index_select(0, codes.int()), scale)


def _blocks(values: int) -> int:
    return -(-values // BLOCK)


def _in_blocks(values: Tensor) -> Tensor:
    """A float32 copy of shape (blocks, BLOCK), the last one padded with zeros."""
    blocks = _blocks(len(values))
    padded = torch.empty(blocks * BLOCK, dtype=torch.float32)
    padded[: len(values)] = values
    padded[len(values) :] = 0
    return padded.view(blocks, BLOCK)


def _power(exponent: Tensor) -> Tensor:
    """The power of two with this exponent in a float32."""
    return (exponent << _FRACTION_BITS).view(torch.float32)


def _scales(packed: Tensor, values: int) -> tuple[Tensor, Tensor]:
    """The scale of each block, and what follows them."""
    blocks = _blocks(values)
    return _power(packed[:blocks].int()), packed[blocks:]


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    whole = len(values) // BLOCK * BLOCK
    values[:whole].view(-1, BLOCK).mul_(scale[: whole // BLOCK, None])
    values[whole:].mul_(scale[-1:])
    return values
