"""The driver's service through which the workers of ``sparkdl.run`` meet, print and fail.

    worker                              driver
    {"attend": rank, "host": ...,
     "pid": ...}                ------>
    {"gather": object}          ------> wait for all ranks
                                <------ {"gathered": [object of rank 0, ...]}
    {"shard": statistics of its rows} > wait for all ranks
                                <------ {"gathered": [those of all rows together]}
    {"lines": [...], "left_out": n} --> shown in the driver
    {"report": {name: number}}  ------> passed to the caller
                                <------ {"stacks": true}, at any time; see ``stacks.py``
    {"stacks": text}            ------>
    {"failure": {...}}          ------> the run ends, with the worker's traceback
    {"returned": true}          ------> its function has returned
                                <------ {"gathered": []} once all have
    {"finish": true}            ------>

A function may be silent for any length of time; if a worker's process ends without a word, its
connection breaks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from sparkdl.averager.messages.headers import (
    Types,
    checked,
    read_gather,
    read_shard,
    statistics_header,
)
from sparkdl.errors import (
    DataError,
    SparkDLError,
    StoppedError,
    TrainingError,
    WorkerError,
    WorkerLostError,
)
from sparkdl.feed.statistics.shards import DataStatistics, ShardStatistics
from sparkdl.spark.diagnostics.console import Console, ReportingWorker, Show
from sparkdl.transport.channel import PAUSE, Conversation, LeftError
from sparkdl.transport.framing import header_message
from sparkdl.transport.service import Service

logger = logging.getLogger(__name__)

OnReport = Callable[[int, Mapping[str, float]], None]
"""(rank, numbers by name)."""

_FAILURE: Types = {
    "message": (str,),
    "traceback": (str,),
    "of_data": (bool,),
    "of_exchange": (bool,),
}


class _Waiting(NamedTuple):
    """A rank that waits for all others: what it gives them, or that its function has returned."""

    worker: ReportingWorker
    value: Any
    returned: bool
    since: float


class RunService(Console):
    """The driver's end; a context manager that ends the run.

    Args:
        service: accepts the workers' connections.
        world_size: number of workers.
        on_lines: called with what workers print, by ``show_next``.
        on_report: called with what they report, by ``show_next``; None to show that too.

    Attributes:
        failure: why the run failed.
    """

    def __init__(
        self,
        service: Service,
        world_size: int,
        on_lines: Show,
        on_report: OnReport | None = None,
    ) -> None:
        super().__init__(service, on_lines)
        self.world_size = world_size
        self.failure: SparkDLError | None = None
        self.handlers |= {
            "gather": self._gather,
            "shard": self._gather,
            "failure": self._take_failure,
            "returned": self._gather,
            "report": self._report,
        }
        self._on_report = on_report
        # What is to be shown, at most one thing of each rank: what else a rank prints waits there,
        # and not in the driver's memory. None once the run has failed.
        self._unshown: queue.SimpleQueue[tuple[ReportingWorker, Callable[[], None]] | None]
        self._unshown = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._joined: set[int] = set()
        self._done: set[int] = set()
        self._waiting: dict[int, _Waiting] = {}
        service.on_break(self.fail)

    def __exit__(self, *error: object) -> None:
        self.fail(TrainingError("the driver left the run"))
        super().__exit__(*error)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return sorted(set(range(self.world_size)) - self._joined)

    @property
    def all_finished(self) -> bool:
        """Whether every rank has left properly."""
        return len(self._done) == self.world_size

    def left_behind(self, seconds: float) -> tuple[list[int], list[int]]:
        """Ranks whose functions have returned, and those still running some time later.

        Args:
            seconds: how long since the last of the former returned.
        """
        with self._lock:
            returned = {rank: each.since for rank, each in self._waiting.items() if each.returned}
            running = sorted(self._joined - returned.keys())
        if not returned or time.monotonic() < max(returned.values()) + seconds:
            return [], []
        return sorted(returned), running

    def show_next(self, timeout_s: float) -> bool:
        """Show the next thing that a worker has sent; False if there is none, or the run ends.

        Args:
            timeout_s: how long to wait for it, in seconds.
        """
        try:
            unshown = self._unshown.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if unshown is None:
            return False
        worker, call = unshown
        call()
        self._service.post(worker.wake)
        return True

    def fail(self, error: SparkDLError) -> None:
        """End the run; later failures are consequences of the first and are dropped."""
        with self._lock:
            if first := self.failure is None and not self.all_finished:
                self.failure = error
        if first:
            self._unshown.put(None)
        self.end()

    # Called by the service's thread.

    def joined(self, worker: ReportingWorker) -> None:
        """Take note of a rank, which may join only once."""
        super().joined(worker)
        if self.failure is not None:
            raise StoppedError(f"the run ended: {self.failure}")
        if worker.rank not in self.missing:
            raise TrainingError(
                f"rank {worker.rank} on {worker.host} is not part of this run, or has already "
                "joined"
            )
        with self._lock:
            self._joined.add(worker.rank)

    def show(self, worker: ReportingWorker, call: Callable[[], None]) -> Conversation:
        """Have something shown by the thread that waits for the run's end."""
        self._unshown.put((worker, call))
        yield PAUSE

    def finished(self, worker: ReportingWorker) -> None:
        """Take note of a rank that is done."""
        with self._lock:
            self._done.add(worker.rank)

    def lost(self, worker: ReportingWorker, error: LeftError | SparkDLError) -> None:
        """End the run: a process has ended, or has failed."""
        if isinstance(error, SparkDLError):
            self.fail(error)
        elif worker.rank < 0:
            # A worker that was too late to be let in comes back; one that never comes is missing.
            logger.info("a worker disconnected before giving its rank: %s", error)
        else:
            self.fail(
                WorkerLostError(
                    f"rank {worker.rank} on {worker.host} exited without reporting why ({error})"
                )
            )

    def _take_failure(self, worker: ReportingWorker, header: Mapping[str, Any]) -> NoReturn:
        failure = checked(header["failure"], _FAILURE, worker.rank)
        message = failure["message"]
        if failure["of_data"]:
            raise DataError(message)
        returned = sorted(rank for rank, each in self._waiting.items() if each.returned)
        if failure["of_exchange"] and returned:
            message = (
                f"{named(returned)} had returned when an exchange failed on rank {worker.rank}: "
                f"all ranks must take the same number of steps\n{message}"
            )
        raise WorkerError(
            message, rank=worker.rank, epoch=0, step=0, worker_traceback=failure["traceback"]
        )

    def _report(self, worker: ReportingWorker, header: Mapping[str, Any]) -> Conversation:
        rank, metrics = worker.rank, header["report"]
        if self._on_report is not None:
            yield from self.show(worker, partial(self._on_report, rank, metrics))
            return
        text = ", ".join(f"{name} {value:g}" for name, value in metrics.items())
        yield from self.show(worker, partial(self._on_lines, rank, [text], 0))

    def _gather(self, worker: ReportingWorker, header: Mapping[str, Any]) -> None:
        """Take what a rank gives, or that it has returned; after the last one, all are told."""
        rank, value = worker.rank, self._given(worker.rank, dict(header))
        with self._lock:
            if rank in self._waiting:
                raise TrainingError(f"rank {rank} sent a second object while the first was pending")
            self._waiting[rank] = _Waiting(worker, value, "returned" in header, time.monotonic())
            returned = sorted(each for each, at in self._waiting.items() if at.returned)
            gives = sorted(self._waiting.keys() - set(returned))
            if returned and gives:
                raise TrainingError(
                    f"{named(gives)} would wait for all ranks, as save_checkpoint does, but "
                    f"{named(returned)} already returned: all must call it the same number of times"
                )
            if len(self._waiting) < self.world_size:
                return
            waiting = [self._waiting[each] for each in sorted(self._waiting)]
            self._waiting = {}
        gathered = _merged([each.value for each in waiting if not each.returned])
        message = memoryview(header_message({"gathered": gathered}))
        for each in waiting:
            each.worker.channel.send([message])

    def _given(self, rank: int, header: dict[str, Any]) -> Any:
        if "gather" in header:
            return read_gather(header, rank, self.world_size)
        return read_shard(header, rank) if "shard" in header else None


def named(ranks: Sequence[int]) -> str:
    """Ranks, formatted for a message."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _merged(values: list[Any]) -> list[Any]:
    """What every rank is told: the objects that all gave, or the sum of their rows' statistics."""
    shards = [value for value in values if isinstance(value, ShardStatistics)]
    if not shards:
        return values
    if len(shards) < len(values) or len({len(shard.columns) for shard in shards}) > 1:
        raise TrainingError("the ranks did not all report the same columns")
    return [statistics_header(DataStatistics.of(shards))]
