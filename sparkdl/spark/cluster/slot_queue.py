"""Runs of one application queue when together they need more slots than there are.

All workers of a run have to be there before any of them trains. Two runs that each got some of the
slots would wait for each other's, so the second one starts when the first has ended. A tuner that
fits several models at once (``CrossValidator(parallelism=4)``) need not know how many of them fit.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparkdl.spark.cluster.slots import most_slots

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two checks of how many slots there are; executors come and go."""


class SlotQueue:
    """Which runs hold slots and which wait, first come, first served."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running: dict[object, int] = {}
        self._waiting: deque[object] = deque()

    @contextmanager
    def take(self, workers: int, count_slots: Callable[[], float]) -> Iterator[None]:
        """Wait until the runs ahead leave enough slots, and hold those within the context.

        The caller has to know that the cluster has that many at all: with nobody ahead of it, a
        run starts at once.

        Args:
            workers: slots that the run needs.
            count_slots: counts the slots there are, including those taken.
        """
        ticket = object()
        with self._condition:
            self._waiting.append(ticket)
            try:
                if not self._may_start(ticket, workers, count_slots):
                    logger.warning(
                        "%d workers are waiting for other runs of this application to free "
                        "enough slots",
                        workers,
                    )
                while not self._may_start(ticket, workers, count_slots):
                    self._condition.wait(LOOK_S)
                self._running[ticket] = workers
            finally:
                self._waiting.remove(ticket)
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                del self._running[ticket]
                self._condition.notify_all()

    def _may_start(self, ticket: object, workers: int, count_slots: Callable[[], float]) -> bool:
        if self._waiting[0] is not ticket:
            return False
        taken = sum(self._running.values())
        return not taken or taken + workers <= count_slots()


_SLOT_QUEUE = SlotQueue()
"""The queue of this process's Spark application; there is never more than one."""


def queued(
    spark: SparkSession, workers: int, profile: ResourceProfile | None
) -> AbstractContextManager[None]:
    """Wait for the slots that a run needs, while other runs of this process hold them.

    Args:
        spark: the session.
        workers: slots that the run needs, at most as many as the cluster can have.
        profile: what each of them needs; None for what the session's settings say.
    """
    return _SLOT_QUEUE.take(workers, lambda: most_slots(spark, profile))
