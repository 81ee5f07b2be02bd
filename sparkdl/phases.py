"""Where a worker's time goes: seconds by phase, added up between two messages to the driver.

A worker is in exactly one phase at a time, so the phases add up to the elapsed time. Nothing is
kept per step: a clock costs two readings of the system's clock per minibatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")

PHASES: Final = ("read", "decode", "compute", "wait", "exchange", "idle")
"""What a worker does with its time, in the order in which seconds are reported.

read: rows arrive, from Spark or from other workers. decode: rows become tensors, and minibatches.
compute: forward, backward and optimizer step, validation, callbacks on the worker. wait: waiting
for the driver or the other workers, in a round. exchange: values are sent and received. idle: the
worker is up but has nothing to do yet: its model is being built, or others are still reading rows.
"""
READ, DECODE, COMPUTE, WAIT, EXCHANGE, IDLE = range(len(PHASES))


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """What a worker did with a stretch of its time.

    Attributes:
        began: when it began, in seconds of the driver's monotonic clock.
        ended: when it ended, by the same clock.
        seconds: by phase, in the order of ``PHASES``; they add up to ``ended - began``.
        sent: bytes that the worker sent to the driver meanwhile.
        received: bytes that it received from the driver meanwhile.
        uncertainty: the most by which ``began`` and ``ended`` may be wrong, in seconds, as of the
            comparison of the two clocks.
    """

    began: float
    ended: float
    seconds: tuple[float, ...]
    sent: int = 0
    received: int = 0
    uncertainty: float = 0.0


class PhaseClock:
    """Counts the seconds that one thread spends in each phase; used by that thread alone.

    Attributes:
        sent: bytes sent to the driver since the last ``take``.
        received: bytes received from it since then.
    """

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._seconds = [0.0] * len(PHASES)
        self._phase = IDLE
        self._since = self._taken = time.monotonic()
        self._ahead, self._uncertainty = 0.0, math.inf

    def switch(self, phase: int) -> int:
        """Enter another phase; returns the one that ends."""
        now = time.monotonic()
        before = self._phase
        self._seconds[before] += now - self._since
        self._since, self._phase = now, phase
        return before

    @contextmanager
    def phase(self, phase: int) -> Iterator[None]:
        """Be in a phase for the length of the block, then in the previous one again."""
        before = self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def each(self, phase: int, items: Iterable[T]) -> Iterator[T]:
        """Yield the same items; while the next one is being made, the clock is in this phase."""
        iterator = iter(items)
        try:
            while True:
                before = self.switch(phase)
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                finally:
                    self.switch(before)
                yield item
        finally:
            # Closed at once, and not only when it is garbage-collected.
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def move(self, source: int, target: int, seconds: float) -> None:
        """Move seconds from one phase to another, at most as many as were counted there."""
        seconds = min(max(seconds, 0.0), self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def compare(self, asked: float, theirs: float, answered: float) -> None:
        """Take note of one reading of the driver's clock; the one that arrived fastest counts.

        The driver read its clock at some time between question and answer, so the midpoint is wrong
        by at most half of the time between them.

        Args:
            asked: this process's clock when it asked.
            theirs: the driver's answer.
            answered: this process's clock when the answer came.

        Source: Cristian 1989, "Probabilistic clock synchronization".
        """
        uncertainty = (answered - asked) / 2
        if uncertainty <= self._uncertainty:
            self._uncertainty = uncertainty
            self._ahead = theirs - (asked + answered) / 2

    def forget_comparison(self) -> None:
        """Start comparing afresh: it may be another driver with another clock."""
        self._uncertainty = math.inf

    @property
    def untold_s(self) -> float:
        """Seconds counted since the last ``take``, up to the last change of phase."""
        return self._since - self._taken

    def take(self) -> PhaseTimes:
        """What was counted since the last time, or since the clock was made."""
        self.switch(self._phase)
        times = PhaseTimes(
            began=self._taken + self._ahead,
            ended=self._since + self._ahead,
            seconds=tuple(self._seconds),
            sent=self.sent,
            received=self.received,
            uncertainty=self._uncertainty if math.isfinite(self._uncertainty) else 0.0,
        )
        self._seconds = [0.0] * len(PHASES)
        self._taken = self._since
        self.sent = self.received = 0
        return times
