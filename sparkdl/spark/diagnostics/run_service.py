"""The driver's service to which workers send all but their rounds: output, stacks, failures.

    worker                              driver
    {"attend": rank, "host": ...,
     "pid": ...}                ------>
    {"lines": [...], "left_out": n} --> shown in the driver
                                <------ {"stacks": true}, at any time; see ``stacks.py``
    {"stacks": text}            ------>
    {"finish": true}            ------> the driver closes the connection

    the workers of ``sparkdl.run`` also:
    {"gather": object}          ------> wait for all ranks
                                <------ {"gathered": [object of rank 0, ...]}
    {"shard": statistics of its rows} > wait for all ranks
                                <------ {"gathered": [those of all rows together]}
    {"report": {name: number}}  ------> passed to the caller
    {"failure": {...}}          ------> the run ends, with the worker's traceback
    {"returned": true}          ------> its function has returned
                                <------ {"gathered": []} once all have

The connection is separate from that of the rounds: there, nothing is read from a worker that waits
for its turn to contribute, and one that was dropped or dismissed can no longer be asked anything.
A function may be silent for any length of time; if its process ends without a word, its connection
breaks.
"""

from __future__ import annotations

import logging
import queue
import reprlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from typing_extensions import Self

from sparkdl.averager.headers import (
    read_gather,
    received,
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
from sparkdl.feed.shards import DataStatistics, ShardStatistics
from sparkdl.spark.diagnostics.run_client import JOIN_S, SAVED
from sparkdl.spark.diagnostics.stacks import ReportingWorker, Stacks
from sparkdl.transport.channel import HEADER, PAUSE, Conversation, LeftError
from sparkdl.transport.framing import header_message
from sparkdl.transport.service import Service

logger = logging.getLogger(__name__)

Show = Callable[[int, Sequence[str], int], None]
"""Shows a rank's lines, and how many were left out after them."""
OnReport = Callable[[int, Mapping[str, float]], None]
"""(rank, numbers by name)."""

ONLY_SHOWN = ("lines", "report", "stacks")
"""The messages that a run can do without."""
_ATTEND: Any = {"attend": int, "host": str}
_FAILURE: Any = {"message": str, "traceback": str, "of_data": bool, "of_exchange": bool}


class _Waiting(NamedTuple):
    """A rank that waits for all others: what it gives them, or that its function has returned."""

    worker: ReportingWorker
    value: Any
    returned: bool
    since: float


class RunService:
    """The driver's end; a context manager that ends the connections, and with them the run.

    Args:
        service: accepts the workers' connections.
        world_size: number of workers of ``sparkdl.run``, of which the loss of one ends the run.
            None in a fit, whose averager notices losses: here a lost worker's lines merely end.
        on_lines: called with what workers print, by ``show_next``, which a fit has a thread for: a
            slow reader delays only the workers whose lines it has not taken.
        on_report: called with what they report, by ``show_next``; None to show that too.

    Attributes:
        address: the service's address.
        world_size: as given.
        stacks: asks the workers what they are doing.
        failure: why the run failed.
        messages: by the field that a header has: the types of its fields, and what to do with it;
            the worker is not listened to before a conversation about it has ended.
        connected: the workers that are connected; of the service's thread.
        dropped: none, as functions may be silent for any length of time.
    """

    dropped: Sequence[int] = ()

    def __init__(
        self,
        service: Service,
        world_size: int | None,
        on_lines: Show,
        on_report: OnReport | None = None,
    ) -> None:
        self.address, self.world_size = service.address, world_size
        self.failure: SparkDLError | None = None
        self.connected = list[ReportingWorker]()
        self.stacks = Stacks(self.connected, service.post)
        self.messages: dict[str, tuple[Any, Callable[..., Conversation | None]]] = {
            "lines": ({"lines": list[str], "left_out": int}, self._show_lines),
            "report": ({"report": dict[str, float]}, self._report),
            "stacks": ({"stacks": str}, lambda worker, header: worker.note(header["stacks"])),
            "failure": ({"failure": dict[str, object]}, self._take_failure),
            "returned": ({"returned": bool}, self._gather),
            "gather": ({}, self._gather),
            "shard": ({}, self._gather),
        }
        self._service, self._on_lines, self._on_report = service, on_lines, on_report
        # What is to be shown, at most one thing of each rank: what else a rank prints waits there,
        # and not in the driver's memory. None once the run has failed.
        self._unshown: queue.SimpleQueue[tuple[ReportingWorker, Callable[[], None]] | None]
        self._unshown = queue.SimpleQueue()
        self._failing = threading.Lock()
        self._joined, self._done = set[int](), set[int]()
        self._waiting: dict[int, _Waiting] = {}
        self.postpone_deadline()
        service.handlers["attend"] = partial(ReportingWorker, self)
        service.on_break(self.fail)

    def __enter__(self) -> Self:
        if self.world_size is None:
            threading.Thread(target=self._show_all, name="sparkdl-console", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.fail(TrainingError("the driver left the run"))

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return sorted(set(range(self.world_size or 0)) - self._joined)

    @property
    def anyone_joined(self) -> bool:
        """Whether a worker has ever joined."""
        return bool(self._joined)

    def postpone_deadline(self) -> None:
        """Restart the time within which workers have to join."""
        self._join_due = time.monotonic() + JOIN_S

    @property
    def late(self) -> bool:
        """Whether ranks should have joined by now."""
        return bool(self.missing) and time.monotonic() > self._join_due

    @property
    def all_finished(self) -> bool:
        """Whether every rank has left properly."""
        return len(self._done) == self.world_size

    def stragglers(self, seconds: float) -> tuple[str, list[int]]:
        """Who has returned or waits to save, and the ranks still running so many seconds later."""
        waiting = {r: w for r, w in self._waiting.copy().items() if w.returned or w.value == SAVED}
        if not waiting or time.monotonic() < max(at.since for at in waiting.values()) + seconds:
            return "", []
        saving = any(not at.returned for at in waiting.values())
        does = "called save_checkpoint, as all ranks must" if saving else "already returned"
        return f"{named(sorted(waiting))} {does}", sorted(self._joined - waiting.keys())

    def show_next(self, timeout_s: float | None = None) -> bool:
        """Show the next thing that a worker sends; False if none comes in time, or the run ends."""
        try:
            unshown = self._unshown.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if unshown is None:
            return False
        worker, call = unshown
        call()
        self._service.post(partial(self._service.guard, worker.channel, worker.channel.wake))
        return True

    def fail(self, error: SparkDLError) -> None:
        """End the run; later failures are consequences of the first and are dropped."""
        with self._failing:
            if first := self.failure is None and not self.all_finished:
                self.failure = error
        if first:
            self._unshown.put(None)
        self._service.post(self._close_all)

    # Called by the service's thread.

    def listen(self, worker: ReportingWorker, first: Mapping[str, Any]) -> Conversation:
        """Listen to a worker until it leaves; ``first`` is the header with which it joins."""
        try:
            self._join(worker, first)
            while not (header := (yield HEADER)).get("finish"):
                yield from self._answer(worker, header) or ()
            self._done.add(worker.rank)
        except SparkDLError:
            raise
        except Exception as error:  # nobody may wait for a rank that is no longer listened to
            raise TrainingError(
                f"what rank {worker.rank} sent could not be handled: {error!r}"
            ) from error
        self._service.part(worker.channel)

    def lost(self, worker: ReportingWorker, error: LeftError | SparkDLError) -> None:
        """Close a worker's connection, and end the run unless it is a fit's."""
        if self.world_size is None:
            level = logging.DEBUG if isinstance(error, LeftError) else logging.WARNING
            logger.log(level, "the output of a worker is no longer shown: %s", error)
        elif isinstance(error, SparkDLError):
            self.fail(error)
        elif worker.rank < 0:
            # A worker that was too late to be let in comes back; one that never comes is missing.
            logger.info("a worker disconnected before giving its rank: %s", error)
        else:
            self.fail(WorkerLostError(f"{worker.where} exited without reporting why ({error})"))
        self._service.close_channel(worker.channel)

    def _join(self, worker: ReportingWorker, first: Mapping[str, Any]) -> None:
        """Take note of a rank, which may join a run only once."""
        try:
            received(_ATTEND, {field: first.get(field) for field in _ATTEND}, worker.rank)
        except TrainingError as error:
            raise TrainingError(
                f"a worker must join with a rank and a host, not with {reprlib.repr(first)}"
            ) from error
        worker.rank = first["attend"]
        worker.where = f"rank {worker.rank} on {first['host']}, process {first.get('pid')}"
        if self.failure is not None:
            raise StoppedError(f"the run ended: {self.failure}")
        if self.world_size is not None and worker.rank not in self.missing:
            raise TrainingError(
                f"{worker.where} is not part of this run, or the rank has already joined"
            )
        self._joined.add(worker.rank)

    def _answer(self, worker: ReportingWorker, header: Mapping[str, Any]) -> Conversation | None:
        """Handle a worker's header; what is only shown is left out if it cannot be read."""
        name = next((name for name in self.messages if name in header), None)
        if name is None:
            raise TrainingError(
                f"rank {worker.rank} sent a header that no worker sends: {reprlib.repr(header)}"
            )
        hints, handle = self.messages[name]
        try:
            received(hints, {field: header.get(field) for field in hints}, worker.rank)
        except TrainingError as error:
            if name not in ONLY_SHOWN:
                raise
            logger.warning("%s; it is left out", error)
            return None
        return handle(worker, header)

    def _show(self, worker: ReportingWorker, call: Callable[[], None]) -> Conversation:
        """Have something shown; until it is, its worker is not listened to."""
        self._unshown.put((worker, call))
        yield PAUSE

    def _show_lines(self, worker: ReportingWorker, header: Mapping[str, Any]) -> Conversation:
        lines, left_out = tuple(header["lines"]), header["left_out"]
        return self._show(worker, partial(self._on_lines, worker.rank, lines, left_out))

    def _report(self, worker: ReportingWorker, header: Mapping[str, Any]) -> Conversation:
        metrics = header["report"]
        if self._on_report is not None:
            return self._show(worker, partial(self._on_report, worker.rank, metrics))
        text = ", ".join(f"{name} {_digits(value)}" for name, value in metrics.items())
        return self._show(worker, partial(self._on_lines, worker.rank, [text], 0))

    def _take_failure(self, worker: ReportingWorker, header: Mapping[str, Any]) -> NoReturn:
        failure = received(_FAILURE, header["failure"], worker.rank)
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

    def _gather(self, worker: ReportingWorker, header: dict[str, Any]) -> None:
        """Take what a rank gives, or that it has returned; after the last one, all are told."""
        rank, value = worker.rank, None
        if "gather" in header:
            value = read_gather(header, rank, self.world_size or 1)
        elif "shard" in header:
            value = received(ShardStatistics, header["shard"], rank)
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
        if len(self._waiting) != self.world_size:
            return
        waiting, self._waiting = [at for _, at in sorted(self._waiting.items())], {}
        gathered = _merged([each.value for each in waiting if not each.returned])
        message = memoryview(header_message({"gathered": gathered}))
        for each in waiting:
            each.worker.channel.send([message])

    def _show_all(self) -> None:
        while self.show_next():
            pass

    def _close_all(self) -> None:
        for worker in self.connected.copy():
            self._service.close_channel(worker.channel)


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


def _digits(value: float) -> str:
    """A number as it is printed: of a whole one all digits, of others six."""
    whole = abs(value) < 2**53 and float(value).is_integer()
    return f"{value:.0f}" if whole else f"{value:g}"
