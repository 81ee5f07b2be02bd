"""Mostly zero values, sent without loss in the shortest of four forms.

A message has 8 bytes for its form and a number t, followed, for n values of w bytes of which k are
nonzero, by:

    ====== ============================================ =====================
    form   what follows                                 bytes of the message
    ====== ============================================ =====================
    signs  where values are t or -t: k times 4 bytes    8 + 4 k
    bits   whether they are t, whether they are -t      8 + 2 ceil(n / 8)
    pairs  k times where, k times what                  8 + (4 + w) k
    whole  the values                                   8 + w n
    ====== ============================================ =====================

The first two are for values that are all 0, t or -t, the way Strom 2015 ("Scalable Distributed DNN
Training Using Commodity GPU Cloud Computing") and Deeplearning4j send gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import TrainingError

SIGNS, BITS, PAIRS, WHOLE = range(4)
HEADER_BYTES = 8
PLACE_BYTES = 4
_HEADER = np.dtype([("form", "<u4"), ("number", "<f4")])
_NEGATIVE = np.uint32(1 << 31)
"""Set where a value is -t."""
_POSITIVE = np.uint32(0)
MOST = 1 << 31
"""The most values that a message can hold."""
_BLOCK = 1 << 15
"""Number of values processed together; they stay in the cache."""


def _bodies(values: int, nonzero: int, itemsize: int, *, signs: bool) -> dict[int, int]:
    """How many bytes would follow the header in each form."""
    of_signs = {SIGNS: PLACE_BYTES * nonzero, BITS: 2 * _octets(values)} if signs else {}
    return {
        **of_signs,
        PAIRS: (PLACE_BYTES + itemsize) * nonzero,
        WHOLE: itemsize * values,
    }


def _octets(values: int) -> int:
    return -(-values // 8)


@dataclass(frozen=True)
class Sparse:
    """As few bytes as the values allow, without rounding.

    Attributes:
        of: the values' dtype, float32 or float64.
    """

    of: torch.dtype
    dtype: ClassVar[torch.dtype] = torch.uint8
    varies: ClassVar[bool] = True

    def numel(self, values: int) -> int:
        """The most bytes that the values can take."""
        return HEADER_BYTES + self.of.itemsize * values

    def pack(self, values: Tensor) -> Tensor:
        """The shortest message.

        Args:
            values: 1-D, on the CPU.

        Raises:
            TrainingError: there are more than 2,147,483,648 values.
        """
        if len(values) > MOST:
            raise TrainingError(f"{len(values)} values are more than fit into a message ({MOST})")
        numbers = values.detach().to(self.of).numpy()
        places = _places(numbers, most=len(numbers) // 16)
        if places is not None:
            return self._message(numbers, len(places), _common(numbers[places]), places)
        bits = _Bits(numbers)
        return self._message(numbers, bits.nonzero, bits.number, None, bits)

    def _message(
        self,
        numbers: np.ndarray,
        nonzero: int,
        number: float | None,
        places: np.ndarray | None,
        bits: _Bits | None = None,
    ) -> Tensor:
        bodies = _bodies(len(numbers), nonzero, self.of.itemsize, signs=number is not None)
        form = min(bodies, key=lambda each: bodies[each])
        message = np.empty(HEADER_BYTES + bodies[form], np.uint8)
        message[:HEADER_BYTES].view(_HEADER)[0] = (form, number or 0)
        body = message[HEADER_BYTES:]
        if form == WHOLE:
            body[:] = numbers.view(np.uint8)
        elif form == BITS:
            body[:] = (bits or _Bits(numbers)).octets
        else:
            if places is None:
                places = np.flatnonzero(numbers)
            where = places.astype("<u4")
            if form == SIGNS:
                body.view("<u4")[:] = where | np.where(numbers[places] < 0, _NEGATIVE, _POSITIVE)
            else:
                body[: where.nbytes] = where.view(np.uint8)
                body[where.nbytes :] = numbers[places].view(np.uint8)
        return torch.from_numpy(message)

    def unpack(self, packed: Tensor, values: int) -> Tensor:
        """The values.

        Raises:
            TrainingError: it is not a message of this many values.
        """
        numbers = np.zeros(values, _numpy(self.of))
        self.add(packed, numbers, 1.0)
        return torch.from_numpy(numbers)

    def add(self, packed: Tensor, into: np.ndarray, weight: float) -> None:
        """Add a message's values to others, at a cost proportional to its nonzero values.

        Args:
            packed: what ``pack`` returned for as many values.
            into: what to add to; 1-D, of the same dtype.
            weight: factor on the values.

        Raises:
            TrainingError: it is not a message of this many values.
        """
        message = packed.numpy()
        form, number = _read_header(message)
        body, size, wide = message[HEADER_BYTES:], len(into), self.of.itemsize
        lengths = {
            SIGNS: len(body) // PLACE_BYTES * PLACE_BYTES,
            BITS: 2 * _octets(size),
            PAIRS: len(body) // (PLACE_BYTES + wide) * (PLACE_BYTES + wide),
            WHOLE: wide * size,
        }
        if lengths.get(form) != len(body):
            raise TrainingError(
                f"a message of {len(message)} bytes in form {form} cannot hold {size} values"
            )
        if form == WHOLE:
            into += _weighed(body.view(into.dtype), weight)
        elif form == BITS:
            plus, minus = (np.unpackbits(half, count=size) for half in np.split(body, 2))
            signs = plus.view(np.int8) - minus.view(np.int8)
            into += signs * into.dtype.type(number * weight)
        elif form == SIGNS:
            places = body.view("<u4")
            signed = into.dtype.type(number * weight)
            into[_within(places & ~_NEGATIVE, size)] += np.where(
                places & _NEGATIVE, -signed, signed
            )
        else:
            count = len(body) // (PLACE_BYTES + wide)
            places = _within(body[: PLACE_BYTES * count].view("<u4"), size)
            into[places] += _weighed(_as(body[PLACE_BYTES * count :], into.dtype), weight)


def _common(nonzero: np.ndarray) -> float | None:
    """The common magnitude of some values, in float32; 0 if there are none, None if they differ."""
    if not len(nonzero):
        return 0.0
    number = _as_header_has_it(nonzero[0])
    return number if number is not None and (np.abs(nonzero) == number).all() else None


def _as_header_has_it(value: np.floating[Any]) -> float | None:
    number = abs(float(value))
    with np.errstate(over="ignore"):
        kept = 0 < number < np.inf and float(np.float32(number)) == number
    return number if kept else None


def _places(numbers: np.ndarray, most: int) -> np.ndarray | None:
    """Where values are nonzero; None if there are more than ``most``, or appear to be at first."""
    found = []
    for start in range(0, len(numbers), _BLOCK):
        is_nonzero = numbers[start : start + _BLOCK] != 0
        if not start and np.count_nonzero(is_nonzero) * len(numbers) > most * len(is_nonzero):
            return None
        places = is_nonzero.nonzero()[0]
        most -= len(places)
        if most < 0:
            return None
        places += start
        found.append(places)
    return np.concatenate(found) if found else np.empty(0, np.int64)


class _Bits:
    """Values as two bits each, if the nonzero ones differ only in sign.

    Args:
        numbers: the values, at least one of which is nonzero.

    Attributes:
        nonzero: how many are nonzero.
        number: their common magnitude; None if they differ.
        octets: the bits.
    """

    def __init__(self, numbers: np.ndarray) -> None:
        self.nonzero = same = 0
        self.number = _as_header_has_it(numbers[np.argmax(numbers != 0)])
        number = numbers.dtype.type(self.number or 0)
        halves: list[list[np.ndarray]] = [[], []]
        for start in range(0, len(numbers), _BLOCK):
            block = numbers[start : start + _BLOCK]
            self.nonzero += int(np.count_nonzero(block != 0))
            for half, signed in zip(halves, (number, -number), strict=True):
                found = block == signed
                same += int(np.count_nonzero(found))
                half.append(np.packbits(found))
        if same != self.nonzero:
            self.number = None
        self.octets = np.concatenate(halves[0] + halves[1])


def _read_header(message: np.ndarray) -> tuple[int, float]:
    if len(message) < HEADER_BYTES:
        raise TrainingError(
            f"a message of {len(message)} bytes is shorter than its {HEADER_BYTES}-byte header"
        )
    form, number = message[:HEADER_BYTES].view(_HEADER)[0]
    return int(form), float(number)


def _within(places: np.ndarray, size: int) -> np.ndarray:
    """Check places, which ascend in every message of ours, so that each occurs once.

    Raises:
        TrainingError: they do not ascend, or one is out of range.
    """
    if len(places) and (places[-1] >= size or not (places[1:] > places[:-1]).all()):
        raise TrainingError(f"a message of {size} values has indices out of order or out of range")
    return places


def _weighed(values: np.ndarray, weight: float) -> np.ndarray:
    return values if weight == 1.0 else values * values.dtype.type(weight)


def _as(octets: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Octets as numbers, whatever their alignment."""
    return np.frombuffer(octets.tobytes(), dtype)


def _numpy(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype
