"""Where the workers of ``sparkdl.run`` meet, print and fail: a small service in the driver.

    worker                              driver
    {"join": rank, "host": ...} ------>
    {"gather": object}          ------> wait for all ranks
                                <------ {"gathered": [object of rank 0, ...]}
    {"shard": what its rows are} -----> wait for all ranks
                                <------ {"gathered": [what the rows of all are together]}
    {"lines": [...], "left_out": n} --> shown in the driver
    {"report": {name: number}}  ------> handed to the caller
    {"files": {...}}            ------> see ``driver_files.py``
                                <------ {"done": ...} or {"refused": text}
                                <------ {"stacks": true}, at any time; see ``stacks.py``
    {"stacks": text}            ------>
    {"failure": {...}}          ------> the run ends, with the worker's traceback
    {"returned": true}          ------> its function has come to its end
                                <------ {"gathered": []} once all have
    {"finish": true}            ------>

Connections and their proof of the job's token are the averager's. There is no limit to how long a
function may be silent; a worker whose process ends without a word breaks its connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import reprlib
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from sparkdl.averager.headers import (
    facts_header,
    read_facts,
    read_gather,
    read_shard,
    shard_header,
)
from sparkdl.checkpoint.storage import OpenElsewhere
from sparkdl.errors import SparkDLError, StoppedError, TrainingError, WorkerLostError
from sparkdl.feed.facts import DataFacts, ShardFacts
from sparkdl.spark.diagnostics.board_headers import (
    Lines,
    Report,
    named,
    read_failure,
    read_join,
    read_lines,
    read_report,
    read_stacks,
    unreadable,
)
from sparkdl.spark.diagnostics.stacks import Stacks, describe_threads
from sparkdl.spark.storage.driver_files import DriverFiles
from sparkdl.transport.connecting import introduced, reach
from sparkdl.transport.connection import Connection, ConnectionLostError, SilenceError
from sparkdl.transport.port import Port

logger = logging.getLogger(__name__)

JOIN_S = 120.0
"""Seconds for all workers to start, once there are slots for them."""
CLOSE_S = 5.0
"""Seconds to wait for the driver to read what was sent last."""


@dataclass(frozen=True)
class BoardAddress:
    """Where the board is, and the run's secret; travels with the task."""

    host: str
    port: int
    token: str = field(repr=False)
    fingerprint: str | None = None


class Board:
    """The driver's end; a context manager that opens and closes the port.

    Args:
        world_size: number of workers.
        host: interface to bind to.
        advertised_host: the name under which workers reach it.
        tls: whether connections are encrypted.
        open_uri: opens file systems that workers cannot; None for those of nobody.
    """

    def __init__(
        self,
        world_size: int,
        host: str,
        advertised_host: str,
        *,
        tls: bool = False,
        open_uri: OpenElsewhere | None = None,
    ) -> None:
        self.world_size = world_size
        self._open_uri = open_uri or _open_nothing
        self.events: queue.SimpleQueue[Lines | Report | None] = queue.SimpleQueue()
        self.failure: SparkDLError | None = None
        self._lock = threading.Lock()
        self._hosts: dict[int, str] = {}
        self._finished: set[int] = set()
        self._returned: dict[int, tuple[float, Connection]] = {}
        self.stacks = Stacks()
        self._giving: dict[int, tuple[Any, Connection]] = {}
        token = secrets.token_urlsafe(32)
        self._port = Port(host, token, self._serve, advertised_host=advertised_host, encrypted=tls)
        self.address = BoardAddress(
            advertised_host, self._port.number, token, self._port.fingerprint
        )

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.fail(TrainingError("the driver left the run"))
        self._port.close()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return sorted(set(range(self.world_size)) - self._hosts.keys())

    @property
    def finished(self) -> bool:
        """Whether every rank has left as it should."""
        return len(self._finished) == self.world_size

    def left_behind(self, seconds: float) -> tuple[list[int], list[int]]:
        """Ranks whose functions have returned, and those that still run so much later.

        Args:
            seconds: since the last of the former has.
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
            if self.failure is None and not self.finished:
                self.failure = error
                self.events.put(None)
            for _, connection in [*self._giving.values(), *self._returned.values()]:
                connection.interrupt()  # it waits for others

    def _serve(self, connection: Connection) -> None:
        rank = -1
        try:
            joined = connection.receive_header()
            rank = self._join(*read_join(joined))
            with (
                self.stacks.of(rank, joined, connection),
                contextlib.closing(DriverFiles(self._open_uri)) as files,
            ):
                while not (header := connection.receive_header()).get("finish"):
                    self._answer(rank, header, connection, files)
            with self._lock:
                self._finished.add(rank)
        except SparkDLError as error:
            self.fail(error)
        except (ConnectionLostError, SilenceError) as error:
            self.fail(
                WorkerLostError(
                    f"rank {rank} on {self._hosts.get(rank, 'an unknown host')} ended without a "
                    f"word ({error})"
                )
            )
        except Exception as error:  # nobody may wait for a rank to which nobody listens any more
            self.fail(TrainingError(f"what rank {rank} sent could not be handled: {error!r}"))

    def _join(self, rank: int, host: str) -> int:
        with self._lock:
            if rank not in self.missing:
                raise TrainingError(f"rank {rank} on {host} is none of this run, or joined before")
            self._hosts[rank] = host
        return rank

    def _answer(
        self, rank: int, header: Mapping[str, Any], connection: Connection, files: DriverFiles
    ) -> None:
        if "gather" in header:
            value = read_gather(dict(header), rank, self.world_size)
            self._gather(rank, value, connection)
        elif "shard" in header:
            self._gather(rank, read_shard(dict(header), rank), connection)
        elif "failure" in header:
            raise read_failure(rank, header, sorted(self._returned))
        elif header.get("returned") is True:
            self._return(rank, connection)
        elif "files" in header:
            try:
                answer = files.answer(header["files"])
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise unreadable(rank, header) from error
            connection.send_header(answer)
        elif header.keys() & {"lines", "report", "stacks"}:
            self._show(rank, header)
        else:
            raise unreadable(rank, header)

    def _show(self, rank: int, header: Mapping[str, Any]) -> None:
        """Take what is only to be seen: the run can do without it."""
        try:
            if "lines" in header:
                self.events.put(read_lines(rank, header))
            elif "report" in header:
                self.events.put(read_report(rank, header))
            else:
                self.stacks.note(rank, read_stacks(rank, header))
        except TrainingError as error:
            logger.warning("%s; it is left out", error)

    def _return(self, rank: int, connection: Connection) -> None:
        """Note that a rank's function has; the last one has everybody told."""
        with self._lock:
            if self.failure is not None:
                raise StoppedError(f"the run ended: {self.failure}")
            self._returned[rank] = time.monotonic(), connection
            self._require_no_waiting_in_vain()
            if len(self._returned) < self.world_size:
                return
        for _, other in self._returned.values():
            with contextlib.suppress(ConnectionLostError):  # its own thread will say so
                other.send_header({"gathered": []})

    def _require_no_waiting_in_vain(self) -> None:
        if self._giving and self._returned:
            raise TrainingError(
                f"{named(sorted(self._giving))} waits for all ranks, as save_checkpoint does, but "
                f"{named(sorted(self._returned))} has returned: all have to call it equally often"
            )

    def _gather(self, rank: int, value: Any, connection: Connection) -> None:
        """Take what a rank gives; the last one has everybody told."""
        with self._lock:
            if self.failure is not None:
                raise StoppedError(f"the run ended: {self.failure}")
            if rank in self._giving:
                raise TrainingError(f"rank {rank} gave a second object before it had the first's")
            self._giving[rank] = value, connection
            self._require_no_waiting_in_vain()
            if len(self._giving) < self.world_size:
                return
            given, self._giving = self._giving, {}
        gathered = _together([given[each][0] for each in sorted(given)])
        for _, other in given.values():
            with contextlib.suppress(ConnectionLostError):  # its own thread will say so
                other.send_header({"gathered": gathered})


def _together(values: list[Any]) -> list[Any]:
    """What every rank is told of what all have given: of their rows, only the sum of the facts."""
    shards = [value for value in values if isinstance(value, ShardFacts)]
    if not shards:
        return values
    if len(shards) < len(values) or len({len(shard.columns) for shard in shards}) > 1:
        raise TrainingError("the ranks did not all tell what they found in the same columns")
    return [facts_header(DataFacts.of(shards))]


class BoardClient:
    """A worker's end; a context manager. Any thread may send.

    Args:
        address: where the board is.
        rank: this worker's rank.
        patience_s: for how long to try to reach it, in seconds.

    Attributes:
        address: as given.

    Raises:
        DisconnectedError: the board cannot be reached.
        StoppedError: it is another run's.
    """

    def __init__(self, address: BoardAddress, rank: int, patience_s: float = 0.0) -> None:
        self.address = address
        self._rank = rank
        self._asking = threading.Lock()
        self._answers: queue.SimpleQueue[dict[str, Any] | StoppedError] = queue.SimpleQueue()
        self._connection = reach(partial(_introduced, address, rank), patience_s)
        self._send({"join": rank, "host": socket.gethostname(), "pid": os.getpid()})
        self._listener = threading.Thread(target=self._listen, name="sparkdl-board", daemon=True)
        self._listener.start()

    def __enter__(self) -> BoardClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.end_sending()
        self._listener.join(CLOSE_S)  # until the driver has read what was sent last
        self._connection.interrupt()
        self._listener.join(CLOSE_S)
        self._connection.close()

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Give an object and receive those of all ranks, in their order.

        Raises:
            StoppedError: the run ended.
        """
        gathered: list[dict[str, Any]] = self._ask({"gather": value})["gathered"]
        return gathered

    def gather_facts(self, shard: ShardFacts) -> DataFacts:
        """Say what this worker has found in its rows, and learn what all have together.

        Raises:
            DataError: it is more than can be said.
            StoppedError: the run ended.
        """
        (facts,) = self._ask(shard_header(shard))["gathered"]
        return read_facts(facts)

    def ask_for_files(self, asked: dict[str, Any]) -> Any:
        """Have the driver do something with a file; see ``driver_files.Ask``.

        Raises:
            OSError: it could not.
            StoppedError: the run ended.
        """
        answer = self._ask({"files": asked})
        if "refused" in answer:
            raise OSError(str(answer["refused"]))
        return answer["done"]

    def send_lines(self, lines: list[str], left_out: int) -> None:
        """Send what was printed.

        Raises:
            BrokenPipeError: the driver is gone.
        """
        try:
            self._send({"lines": lines, "left_out": left_out})
        except StoppedError as error:
            raise BrokenPipeError(str(error)) from error

    def send_report(self, metrics: Mapping[str, float]) -> None:
        """Hand numbers to the caller of ``run``.

        Raises:
            StoppedError: the run ended.
        """
        self._send({"report": dict(metrics)})

    def report_failure(
        self, message: str, traceback: str, *, of_data: bool = False, of_exchange: bool = False
    ) -> None:
        """End the run for everyone.

        Args:
            message: what happened, on which rank.
            traceback: the worker's own.
            of_data: whether the rows cannot be fed, which is nobody's fault here.
            of_exchange: whether an exchange with other ranks broke.
        """
        failure = {
            "message": message,
            "traceback": traceback,
            "of_data": of_data,
            "of_exchange": of_exchange,
        }
        self._send({"failure": failure})

    def say_returned(self) -> None:
        """Say that this rank's function has come to its end, and wait until that of every rank has.

        Raises:
            StoppedError: the run ended.
        """
        self._ask({"returned": True})

    def finish(self) -> None:
        """Leave as one should."""
        self._send({"finish": True})

    def _ask(self, header: dict[str, Any]) -> dict[str, Any]:
        with self._asking:
            self._send(header)
            answer = self._answers.get()
        if isinstance(answer, StoppedError):
            raise answer
        return answer

    def _send(self, header: dict[str, Any]) -> None:
        try:
            self._connection.send_header(header)
        except (ConnectionLostError, SilenceError) as error:
            raise StoppedError(f"rank {self._rank} was stopped by the driver: {error}") from error

    def _listen(self) -> None:
        """Hand on what is gathered and say what this process is doing, until the driver is gone."""
        try:
            while True:
                header = self._connection.receive_header()
                if "stacks" in header:
                    self._send({"stacks": describe_threads()})
                elif isinstance(header.get("gathered"), list) or header.keys() & {
                    "done",
                    "refused",
                }:
                    self._answers.put(header)
                else:
                    raise TrainingError(f"it sent what no driver sends: {reprlib.repr(header)}")
        except (ConnectionLostError, SilenceError, TrainingError) as error:
            told = StoppedError(f"rank {self._rank} was stopped by the driver: {error}")
            self._answers.put(told)


def _introduced(address: BoardAddress, rank: int) -> Connection:
    host, port, token, fingerprint = astuple(address)
    name = f"the driver at {host}:{port}"
    return introduced(rank, name, (host, port), token, fingerprint, None)


def _open_nothing(uri: str) -> NoReturn:
    raise OSError(f"the driver opens no {uri}")
