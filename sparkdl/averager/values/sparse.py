"""Mostly zero values, sent without loss in the shortest of three forms.

A message has 8 bytes for its form and a number t, followed, for n values of w bytes of which k are
nonzero, by:

    ====== ============================================ =====================
    form   what follows                                 bytes of the message
    ====== ============================================ =====================
    signs  where values are t or -t: k times 4 bytes    8 + 4 k
    pairs  k times where, k times what                  8 + (4 + w) k
    whole  the values                                   8 + w n
    ====== ============================================ =====================

The first is for values that are all 0, t or -t, the way Strom 2015 ("Scalable Distributed DNN
Training Using Commodity GPU Cloud Computing") and Deeplearning4j send gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import TrainingError

SIGNS, PAIRS, WHOLE = range(3)
HEADER_BYTES = 8
PLACE_BYTES = 4
_HEADER = np.dtype([("form", "<u4"), ("number", "<f4")])
_NEGATIVE = np.uint32(1 << 31)
"""Set where a value is -t."""
_POSITIVE = np.uint32(0)
MOST = 1 << 31
"""The most values that a message can hold."""


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
        places = np.flatnonzero(numbers != 0)
        where, nonzero = places.astype("<u4"), numbers[places]
        number = _common(nonzero)
        bodies = {
            PAIRS: (PLACE_BYTES + self.of.itemsize) * len(where),
            WHOLE: self.of.itemsize * len(numbers),
        }
        if number is not None:
            bodies[SIGNS] = PLACE_BYTES * len(where)
        form = min(bodies, key=lambda each: bodies[each])
        message = np.empty(HEADER_BYTES + bodies[form], np.uint8)
        message[:HEADER_BYTES].view(_HEADER)[0] = (form, number or 0)
        body = message[HEADER_BYTES:]
        if form == WHOLE:
            body[:] = numbers.view(np.uint8)
        elif form == SIGNS:
            body.view("<u4")[:] = where | np.where(nonzero < 0, _NEGATIVE, _POSITIVE)
        else:
            body[: where.nbytes] = where.view(np.uint8)
            body[where.nbytes :] = nonzero.view(np.uint8)
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
            PAIRS: len(body) // (PLACE_BYTES + wide) * (PLACE_BYTES + wide),
            WHOLE: wide * size,
        }
        if lengths.get(form) != len(body):
            raise TrainingError(
                f"a message of {len(message)} bytes in form {form} cannot hold {size} values"
            )
        if form == WHOLE:
            into += _weighed(body.view(into.dtype), weight)
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
    number = abs(float(nonzero[0]))
    with np.errstate(over="ignore"):
        kept = number < np.inf and float(np.float32(number)) == number
    return number if kept and (np.abs(nonzero) == number).all() else None


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
