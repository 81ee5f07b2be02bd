"""Virtual time: what happens next is whatever is due first."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """A queue of calls, each at its time; equal times in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have something happen later."""
        self.at(self.now + seconds, call)

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Have something happen at a time; what is due already, after all else that is."""
        self._count += 1
        heapq.heappush(self._due, (max(time, self.now), self._count, call))

    def step(self) -> bool:
        """Let happen what is due first; returns whether there was anything."""
        if not self._due:
            return False
        at, _, call = heapq.heappop(self._due)
        self.now = at
        call()
        return True

    def forget(self) -> None:
        """Let nothing happen of what is due."""
        self._due.clear()
