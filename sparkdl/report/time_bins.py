"""Sums by time, in constant memory however long a training takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS = 256
"""An even number; once widened, between half and all of the bins are in use."""
FIRST_WIDTH_S = 1 / 64


@dataclass(eq=False)
class TimeBins:
    """Sums values by time, in constant memory however long it takes.

    When all bins are full, every two neighbours become one.

    Attributes:
        sums: shape (BINS, *shape).
        width_s: seconds per bin.
        ended: the latest time for which anything was added, in seconds from the beginning.

    Raises:
        ValueError: they do not end behind that.
    """

    sums: NDArray[np.float64]
    width_s: float = FIRST_WIDTH_S
    ended: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.ended < BINS * self.width_s < math.inf:
            raise ValueError(f"{BINS} bins of {self.width_s} s do not end at {self.ended} s")

    @classmethod
    def of(cls, *shape: int) -> TimeBins:
        """Make empty bins for what is added at a time; () for a number."""
        return cls(np.zeros((BINS, *shape)))

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
