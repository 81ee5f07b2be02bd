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
    {"files": {...}}            ------> see ``driver_files.py``
                                <------ {"done": ...} or {"refused": text}
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
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NoReturn

from sparkdl.averager.messages.headers import read_gather, read_shard, statistics_header
from sparkdl.checkpoint.storage import OpenElsewhere
from sparkdl.errors import SparkDLError, StoppedError, TrainingError, WorkerLostError
from sparkdl.feed.statistics.shards import DataStatistics, ShardStatistics
from sparkdl.spark.diagnostics.console import Console, ReportingWorker
from sparkdl.spark.diagnostics.messages import (
    Lines,
    Report,
    Unread,
    named,
    read,
    read_failure,
    read_lines,
    unreadable,
)
from sparkdl.spark.storage.driver_files import DriverFiles
from sparkdl.transport.channel import PAUSE, Conversation, LeftError
from sparkdl.transport.framing import header_message
from sparkdl.transport.service import Service

logger = logging.getLogger(__name__)


class RunService(Console):
    """The driver's end; a context manager that ends the run.

    Args:
        service: accepts the workers' connections.
        world_size: number of workers.
        open_uri: opens file systems that workers cannot; None to open none.

    Attributes:
        events: what workers print and report; None once the run has failed.
        failure: why it failed.
    """

    def __init__(
        self, service: Service, world_size: int, *, open_uri: OpenElsewhere | None = None
    ) -> None:
        super().__init__(service)
        self.world_size = world_size
        self.events = Unread()
        self.failure: SparkDLError | None = None
        self.handlers = {
            "gather": self._gather,
            "shard": self._gather,
            "failure": self._take_failure,
            "returned": self._return,
            "files": self._answer_for_files,
            "lines": self._show,
            "report": self._show,
            "stacks": self._show,
        }
        self._open_uri = open_uri or _open_nothing
        self._files: dict[ReportingWorker, DriverFiles] = {}
        self._lock = threading.Lock()
        self._hosts: dict[int, str] = {}
        self._done: set[int] = set()
        self._returned: dict[int, tuple[float, ReportingWorker]] = {}
        self._giving: dict[int, tuple[Any, ReportingWorker]] = {}
        service.on_break(self.fail)

    def __exit__(self, *error: object) -> None:
        self.fail(TrainingError("the driver left the run"))
        super().__exit__(*error)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return sorted(set(range(self.world_size)) - self._hosts.keys())

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
            returned = sorted(self._returned)
            last = max((when for when, _ in self._returned.values()), default=0.0)
            running = sorted(self._hosts.keys() - self._returned.keys())
        if not returned or time.monotonic() < last + seconds:
            return [], []
        return returned, running

    def fail(self, error: SparkDLError) -> None:
        """End the run; later failures are consequences of the first and are dropped."""
        with self._lock:
            if first := self.failure is None and not self.all_finished:
                self.failure = error
            waiting = [each for _, each in [*self._giving.values(), *self._returned.values()]]
        if first:
            self.events.end()
        self._service.post(lambda: self._end(waiting))

    # Called by the service's thread.

    def joined(self, worker: ReportingWorker) -> None:
        """Take note of a rank, which may join only once."""
        super().joined(worker)
        rank, host = worker.rank, worker.host
        with self._lock:
            if rank not in self.missing:
                raise TrainingError(
                    f"rank {rank} on {host} is not part of this run, or has already joined"
                )
            self._hosts[rank] = host
        self._files[worker] = DriverFiles(self._open_uri)

    def finished(self, worker: ReportingWorker) -> None:
        """Take note of a rank that is done."""
        with self._lock:
            self._done.add(worker.rank)

    def left(self, worker: ReportingWorker, error: LeftError) -> None:
        """End the run: a process has ended."""
        if worker.rank < 0:
            # A worker that was too late to be let in comes back; one that never comes is missing.
            logger.info("a worker disconnected before giving its rank: %s", error)
            return
        where = self._hosts.get(worker.rank, "an unknown host")
        self.fail(
            WorkerLostError(f"rank {worker.rank} on {where} exited without reporting why ({error})")
        )

    def failed(self, worker: ReportingWorker, error: SparkDLError) -> None:
        """End the run."""
        self.fail(error)
        self._service.close_channel(worker.channel)

    def closed(self, worker: ReportingWorker) -> None:
        """Close what the worker has left open."""
        super().closed(worker)
        if worker in self._files:
            # This may wait for a file that is being written, or for a file system that is gone.
            self._service.elsewhere(self._files.pop(worker).close, _note_left_open)

    def _take_failure(self, worker: ReportingWorker, header: Mapping[str, Any]) -> NoReturn:
        raise read_failure(worker.rank, header, sorted(self._returned))

    def _answer_for_files(self, worker: ReportingWorker, header: Mapping[str, Any]) -> Conversation:
        files = self._files[worker]
        try:
            answer = yield from worker.elsewhere(lambda: files.answer(header["files"]))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise unreadable(worker.rank, header) from error
        worker.channel.send_header(answer)

    def _show(self, worker: ReportingWorker, header: Mapping[str, Any]) -> Conversation:
        """Take what is only for display: the run can do without it."""
        rank = worker.rank
        told: Lines | Report
        try:
            if "lines" in header:
                told = read_lines(rank, header)
            elif "report" in header:
                told = Report(rank, *read("report", rank, header))
            else:
                self._note_stacks(worker, header)
                return
        except TrainingError as error:
            logger.warning("%s; it is left out", error)
            return
        service, channel = self._service, worker.channel

        def wake() -> None:
            service.post(lambda: service.guard(channel, channel.wake))

        if self.events.put(told, wake):
            yield PAUSE

    def _return(self, worker: ReportingWorker, header: Mapping[str, Any]) -> None:
        """Note that a rank's function has returned; after the last one, everybody is told."""
        read("returned", worker.rank, header)
        with self._lock:
            self._require_no_failure()
            self._returned[worker.rank] = time.monotonic(), worker
            self._require_no_waiting_in_vain()
            if len(self._returned) < self.world_size:
                return
        _tell((each for _, each in self._returned.values()), [])

    def _gather(self, worker: ReportingWorker, header: Mapping[str, Any]) -> None:
        """Take what a rank gives; after the last one, everybody is told."""
        rank, value = worker.rank, self._given(worker.rank, dict(header))
        with self._lock:
            self._require_no_failure()
            if rank in self._giving:
                raise TrainingError(f"rank {rank} sent a second object while the first was pending")
            self._giving[rank] = value, worker
            self._require_no_waiting_in_vain()
            if len(self._giving) < self.world_size:
                return
            given = self._giving
            # Until the result is known they wait, and are told if this fails.
            gathered = _merged([given[each][0] for each in sorted(given)])
            self._giving = {}
        _tell((each for _, each in given.values()), gathered)

    def _given(self, rank: int, header: dict[str, Any]) -> Any:
        if "gather" in header:
            return read_gather(header, rank, self.world_size)
        return read_shard(header, rank)

    def _require_no_failure(self) -> None:
        if self.failure is not None:
            raise StoppedError(f"the run ended: {self.failure}")

    def _require_no_waiting_in_vain(self) -> None:
        if self._giving and self._returned:
            raise TrainingError(
                f"{named(sorted(self._giving))} would wait for all ranks, as save_checkpoint "
                f"does, but {named(sorted(self._returned))} already returned: all must call it "
                "the same number of times"
            )


def _tell(workers: Iterable[ReportingWorker], gathered: list[Any]) -> None:
    message = memoryview(header_message({"gathered": gathered}))
    for worker in workers:
        worker.channel.send([message])


def _merged(values: list[Any]) -> list[Any]:
    """What every rank is told: the objects that all gave, or the sum of their rows' statistics."""
    shards = [value for value in values if isinstance(value, ShardStatistics)]
    if not shards:
        return values
    if len(shards) < len(values) or len({len(shard.columns) for shard in shards}) > 1:
        raise TrainingError("the ranks did not all report the same columns")
    return [statistics_header(DataStatistics.of(shards))]


def _note_left_open(closed: Future[None]) -> None:
    if (error := closed.exception()) is not None:
        logger.warning("a file left open by a worker could not be closed: %s", error)


def _open_nothing(uri: str) -> NoReturn:
    raise OSError(f"the driver will not open {uri}")
