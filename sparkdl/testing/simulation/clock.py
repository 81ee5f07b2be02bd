"""Virtual time: what happens next is whatever is due first."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """A queue of timed calls; those due at the same time run in the order of their scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedule a call after some seconds."""
        self.at(self.now + seconds, call)

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Schedule a call at a time; one in the past goes behind all others that are due."""
        self._count += 1
        heapq.heappush(self._due, (max(time, self.now), self._count, call))

    def step(self) -> bool:
        """Make the call that is due first; returns whether there was one."""
        if not self._due:
            return False
        at, _, call = heapq.heappop(self._due)
        self.now = at
        call()
        return True

    def forget(self) -> None:
        """Drop all scheduled calls."""
        self._due.clear()
