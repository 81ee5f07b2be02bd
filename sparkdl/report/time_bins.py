"""Sums by time, in constant memory however long a training takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

BINS = 256
"""An even number; once widened, between half and all of the bins are in use."""
FIRST_WIDTH_S = 1 / 64


class TimeBins:
    """Sums values by time, in constant memory however long it takes.

    When all bins are full, every two neighbours become one.

    Args:
        *shape: of what is added at a time; () for a number.

    Attributes:
        sums: shape (BINS, *shape), float64.
        width_s: seconds per bin.
        ended: the latest time for which anything was added, in seconds from the beginning.
    """

    def __init__(self, *shape: int) -> None:
        self.sums: NDArray[np.float64] = np.zeros((BINS, *shape))
        self.width_s = FIRST_WIDTH_S
        self.ended = 0.0

    @property
    def used(self) -> int:
        """How many bins there are until the latest time for which anything was added."""
        return min(BINS, int(np.ceil(self.ended / self.width_s)))

    def add(
        self, began: float, ended: float, values: NDArray[np.float64] | float, at: int | None = None
    ) -> None:
        """Spread values evenly over a stretch of time.

        Args:
            began: seconds from the beginning, >= 0.
            ended: the same, >= ``began``.
            values: their total over that stretch.
            at: the index in the shape to add them at; None for all of it.
        """
        self._reach(ended)
        first, last = int(began / self.width_s), int(ended / self.width_s)
        sums = self.sums if at is None else self.sums[:, at]
        if first == last:
            sums[first] += values
            return
        edges = np.arange(first, last + 2) * self.width_s
        edges[0], edges[-1] = began, ended
        shares = np.diff(edges) / (ended - began)
        sums[first : last + 1] += np.multiply.outer(shares, values)

    def merged(self, most: float) -> tuple[NDArray[np.float64], float]:
        """Return the sums of at most so many stretches of time, and the seconds of each."""
        together = 1
        while together < BINS and self.used > most * together:
            together *= 2
        sums = self.sums.reshape(-1, together, *self.sums.shape[1:]).sum(axis=1)
        return sums[: math.ceil(self.used / together)], self.width_s * together

    def _reach(self, ended: float) -> None:
        # The end itself belongs to the bin that begins there: into the last one of now, it would
        # be in the wrong one of those that are twice as wide.
        while ended >= BINS * self.width_s:
            self._widen()
        self.ended = max(self.ended, ended)

    def _widen(self) -> None:
        pairs = self.sums.reshape(BINS // 2, 2, *self.sums.shape[1:]).sum(axis=1)
        self.sums[: BINS // 2] = pairs
        self.sums[BINS // 2 :] = 0
        self.width_s *= 2

    def as_json(self) -> dict[str, Any]:
        """Return all of it in JSON's types, for ``from_json``."""
        return {"sums": self.sums.tolist(), "width_s": self.width_s, "ended": self.ended}

    @classmethod
    def from_json(cls, told: Mapping[str, Any], *shape: int) -> TimeBins:
        """Restore what ``as_json`` has returned.

        Args:
            told: that.
            *shape: as it was made with.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        bins = cls(*shape)
        bins.sums = array_of(told["sums"], (BINS, *shape))
        bins.width_s, bins.ended = float(told["width_s"]), float(told["ended"])
        if not 0 <= bins.ended < BINS * bins.width_s < math.inf:
            raise ValueError(f"{BINS} bins of {bins.width_s} s do not end at {bins.ended} s")
        return bins


def array_of(told: Any, shape: tuple[int, ...], dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Read an array from nested lists.

    Raises:
        TypeError, ValueError: they hold something other than numbers, or have another shape.
    """
    values = np.asarray(told, dtype=dtype)
    if values.shape != shape:
        raise ValueError(f"an array has shape {values.shape}, not {shape}")
    return values
