"""A bounded queue of what workers have reported and the driver's caller has not taken yet.

A worker may print faster than its output can be shown. Beyond the bound it is not listened to, so
that the rest waits at the worker and not in the driver's memory.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable

from sparkdl.spark.diagnostics.run_headers import Lines, Report

MOST_UNREAD = 64
"""The most unread items of one rank."""
MOST_UNREAD_BYTES = 1 << 20
"""Their most bytes, approximately."""
_NUMBER_BYTES = 64

Told = Lines | Report


class Unread:
    """What is to be shown, in the order of arrival; any thread may take it."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[Told | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._number: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()
        self._waiting: dict[int, Callable[[], None]] = {}
        self._ended = False

    def put(self, told: Told, wake: Callable[[], None]) -> bool:
        """Add an item, unless the queue has ended.

        Args:
            told: what a rank has reported.
            wake: if this item fills the queue, called once as soon as there is room again.

        Returns:
            Whether the rank has to wait for that call.
        """
        with self._lock:
            if self._ended:
                return False
            self._count(told, 1)
            self._told.put(told)
            if not self._is_full(told.rank):
                return False
            self._waiting[told.rank] = wake
            return True

    def get(self, timeout: float) -> Told | None:
        """Take the first item; None at the end.

        Raises:
            queue.Empty: none has come within the timeout, in seconds.
        """
        told = self._told.get(timeout=timeout)
        if told is None:
            return None
        with self._lock:
            self._count(told, -1)
            full = self._is_full(told.rank)
            wake = None if full else self._waiting.pop(told.rank, None)
        if wake is not None:
            wake()
        return told

    def end(self) -> None:
        """Accept nothing more, and let nobody wait."""
        with self._lock:
            self._ended = True
            self._told.put(None)
            waiting, self._waiting = self._waiting, {}
        for wake in waiting.values():
            wake()

    def __len__(self) -> int:
        return self._told.qsize()

    def _is_full(self, rank: int) -> bool:
        return self._number[rank] >= MOST_UNREAD or self._bytes[rank] >= MOST_UNREAD_BYTES

    def _count(self, told: Told, sign: int) -> None:
        size = (
            sum(map(len, told.lines))
            if isinstance(told, Lines)
            else _NUMBER_BYTES * len(told.metrics)
        )
        self._number[told.rank] += sign
        self._bytes[told.rank] += sign * size
