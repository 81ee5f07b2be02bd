"""Hogwild elastic averaging: a replica is pulled to the center that it has read before.

You, Buluc, Demmel 2017, "Scaling Deep Learning on GPU and Knights Landing clusters": workers in
threads read and write one center without a lock, so that others may write between a worker's read
and its own write (Niu et al. 2011, "Hogwild!"). With c_i the center that worker i read last,

    d_i  <-  a * (x_i - c_i)          center  <-  center + d_i          c_i  <-  center, on its way

What differs: there, others may also write half of theirs, and an addition may be lost when two
happen at once; here one thread in the driver does it, so that each d_i is added whole and once, and
a read has some of them in full. The gain remains: nobody waits for anybody's round trip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparkdl.protocols import Batch
from sparkdl.strategies.base import Run
from sparkdl.strategies.elastic.springs import Spring
from sparkdl.strategies.on_worker import StepsAhead


class HogwildSpring(Spring):
    """One replica's end of its spring, whose exchanges are under way while it trains.

    An exchange must be over when the next one begins: its center is then the one read last.

    Args:
        run: the worker's.
        rate: the moving rate.
        momentum: of the replica's steps.
    """

    def __init__(self, run: Run, rate: float, momentum: float) -> None:
        super().__init__(run.replica, rate, momentum, from_last=True)
        self._run = run
        self._under_way = False
        self._ahead = StepsAhead(run)

    def exchange(self, run: Run, *, last: bool) -> None:
        """Send the pull; wait for the reply only in an epoch's ``last`` window."""
        self._settle()
        if last:
            super().exchange(run, last=True)
            return
        self._fill_in()
        # All pull equally, whatever their rows.
        run.averager.begin_exchange(self._other, run.close_window(last=False, stands_for=1))
        self._under_way = True

    def move(self) -> None:
        """Move like any spring, and count the step."""
        super().move()
        self._ahead.steps += self._under_way

    def skip(self, batches: Iterator[Batch]) -> Batch | None:
        """Skip what was trained on after the commit from which this worker resumes."""
        return self._ahead.skip(batches)

    def saved(self) -> dict[str, Any]:
        """For ``restore``, while the replica trains, some steps after the last commit."""
        return super().saved() | self._ahead.saved()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``, while the replica holds the center of that commit."""
        super().restore(saved)
        self._ahead.restore(saved)

    def _settle(self) -> None:
        """Read the center that the current exchange has left; the state is saved as of now."""
        if self._under_way:
            self._under_way = False
            self._run.averager.end_exchange(self._other, 0.0)
            self._ahead.steps = 0
