"""Where a worker's time goes: seconds by phase, added up between two messages to the driver.

A worker is in exactly one phase at a time, so that what is counted adds up to the time that went
by. Nothing is kept of a single step: a clock costs two readings of the system's clock a minibatch.
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
compute: forward, backward and optimizer step, validation, callbacks on the worker. wait: for the
driver or the other workers, in a round. exchange: values are sent and received. idle: the worker
is there and has nothing to do yet: the model is built, or others still read their rows.
"""
READ, DECODE, COMPUTE, WAIT, EXCHANGE, IDLE = range(len(PHASES))


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """What a worker did with a stretch of its time.

    Attributes:
        began: when it began, in seconds of the driver's monotonic clock.
        ended: when it ended, of the same clock.
        seconds: by phase, in the order of ``PHASES``; they add up to ``ended - began``.
        sent: bytes that the worker has sent to the driver meanwhile.
        received: bytes that it has received from there.
        uncertainty: by how much ``began`` and ``ended`` may be wrong at most, in seconds, when
            the two clocks were compared.
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
        """Be in another phase from now on; returns the one that ends."""
        now = time.monotonic()
        before = self._phase
        self._seconds[before] += now - self._since
        self._since, self._phase = now, phase
        return before

    @contextmanager
    def phase(self, phase: int) -> Iterator[None]:
        """Be in a phase for the length of the block, then in the one before."""
        before = self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def each(self, phase: int, items: Iterable[T]) -> Iterator[T]:
        """The same items; while the next one is made it is another phase."""
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
            # As a for loop over a generator leaves it, at once and not when it is collected.
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def move(self, source: int, target: int, seconds: float) -> None:
        """Count seconds for another phase than they were counted for, as far as there are any."""
        seconds = min(max(seconds, 0.0), self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def compare(self, asked: float, theirs: float, answered: float) -> None:
        """Take note of one reading of the driver's clock; the one that came fastest counts.

        The driver read its clock at some time between question and answer, so that half of what
        went by is the most by which the middle is wrong.

        Args:
            asked: this process's clock when it asked.
            theirs: the driver's answer.
            answered: this process's clock when that came.

        Source: Cristian 1989, "Probabilistic clock synchronization".
        """
        uncertainty = (answered - asked) / 2
        if uncertainty <= self._uncertainty:
            self._uncertainty = uncertainty
            self._ahead = theirs - (asked + answered) / 2

    def forget_comparison(self) -> None:
        """Compare again: the driver's clock may be another one."""
        self._uncertainty = math.inf

    @property
    def untold_s(self) -> float:
        """Seconds since the last ``take``, as far as was seen when the phase last changed."""
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
