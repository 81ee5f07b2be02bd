"""What part of a full round the windows of a round are.

A round moves the center by the part of a full round's weight that it has, so that a row weighs the
same whoever else is in its round. Otherwise a round of one would move the center as far as a round
of all, and a slow worker, whose last windows of an epoch are rounds of its own, would count several
times.

A full round is the one that a window would be in if all were equally fast: with the window of each
rank that begins after as many rows of the epoch. Ranks whose rows have come to an end by then have
none, so that the last windows of the rank with the most rows are full rounds, as they are where
everyone is waited for. How many rows a rank has is known once it has ended an epoch, and may change
a little when rows are exchanged; until then it is taken to have enough. Rows of ranks that are not
in a round are taken to weigh as much as the mean row so far.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from sparkdl.events import WindowReport, WindowSums

ROUNDING = 1e-9
"""By how much the sum of a full round's parts may differ from 1."""


class FullRound:
    """What everyone's rounds would be, of one run.

    Args:
        world_size: number of ranks.
        sums: what the windows committed in the epoch under way add up to.
    """

    def __init__(self, world_size: int, sums: Iterable[WindowSums] = ()) -> None:
        # By rank: rows committed in the epoch under way, and in a whole epoch if that is known.
        self._done = [0] * world_size
        self._rows: list[float] = [math.inf] * world_size
        # The known numbers of rows in ascending order, and sums of the first 0, 1, ... of them.
        self._sorted: list[float] = []
        self._sums: list[float] = []
        self._is_sorted = False
        # The most rows in a window, in the epoch before and in the one under way.
        self._longest_before = self._longest = 0
        self._examples, self._weight = 0, 0.0
        for each in sums:
            self._note(each, each.longest)

    def share(self, windows: Sequence[WindowReport]) -> float:
        """Take note of a round's windows; returns what part of a full round's weight they have.

        Args:
            windows: all that are committed together, each of another rank.

        Returns:
            In (0, 1], and exactly 1 if all that a full round has are in it.
        """
        begun = [self._done[window.rank] for window in windows]
        for window in windows:
            self._note(window, window.examples)
        present = sum(window.examples for window in windows)
        weight = sum(window.weight for window in windows)
        if not present or not weight:
            return 1.0
        full = [
            self._rows_from(start, self._length(window))
            for start, window in zip(begun, windows, strict=True)
        ]
        pairs = zip(windows, full, strict=True)
        parts = sum(window.examples / rows for window, rows in pairs if window.examples)
        if parts > 1 - ROUNDING:
            return 1.0
        missing = (present / parts - present) * self._weight / self._examples
        return weight / (weight + missing)

    def end_epoch(self) -> None:
        """Begin another epoch."""
        self._done = [0] * len(self._done)
        self._longest_before, self._longest = self._longest, 0

    def _note(self, window: WindowReport | WindowSums, longest: int) -> None:
        rank = window.rank
        self._done[rank] += window.examples
        self._longest = max(self._longest, longest)
        self._examples += window.examples
        self._weight += window.weight
        done = self._done[rank]
        if done > self._rows[rank] or (window.last and done != self._rows[rank]):
            self._rows[rank] = done if window.last else math.inf
            self._is_sorted = False

    def _length(self, window: WindowReport) -> int:
        """Rows of a window that is as long as windows are; an epoch's last may be shorter."""
        if not window.last:
            return window.examples
        return max(self._longest, self._longest_before)

    def _rows_from(self, start: int, length: int) -> float:
        """Rows of all ranks among their rows ``start`` to ``start + length`` of the epoch."""
        return self._rows_before(start + length) - self._rows_before(start)

    def _rows_before(self, stop: int) -> float:
        """Rows of all ranks among their first ``stop`` ones of the epoch."""
        if not self._is_sorted:
            self._sorted = sorted(rows for rows in self._rows if rows < math.inf)
            self._sums = [0.0, *accumulate(self._sorted)]
            self._is_sorted = True
        shorter = bisect_right(self._sorted, stop)
        return self._sums[shorter] + stop * (len(self._rows) - shorter)
