"""What workers report to the driver while they train: what they print, and their stacks.

    worker                              driver
    {"attend": rank, "host": ...,
     "pid": ...}                ------>
    {"lines": [...], "left_out": n} --> shown in the driver
                                <------ {"stacks": true}, at any time; see ``stacks.py``
    {"stacks": text}            ------>
    {"finish": true}            ------> the driver closes the connection

The connection is separate from that of the rounds: there, nothing is read from a worker that waits
for its turn to contribute, and one that was dropped or dismissed can no longer be asked anything.
"""

from __future__ import annotations

import logging
import re
import reprlib
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from pyspark.sql import SparkSession
from typing_extensions import Self

from sparkdl.arguments import counted
from sparkdl.averager.messages.headers import Types, checked
from sparkdl.errors import SparkDLError, TrainingError
from sparkdl.spark.catalyst.jvm import is_of_connect
from sparkdl.spark.diagnostics.stacks import Stacks
from sparkdl.transport.channel import HEADER, PAUSE, Channel, Conversation, LeftError, Need
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.transport.daemon_pool import DaemonPool
from sparkdl.transport.service import Service
from sparkdl.user_code.tracebacks import message_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

Show = Callable[[int, Sequence[str], int], None]
"""Shows a rank's lines, and how many were left out after them."""

MESSAGES: dict[str, Types] = {
    "attend": {"attend": (int,), "host": (str,)},
    "lines": {"lines": (list,), "left_out": (int,)},
    "report": {"report": (dict,)},
    "stacks": {"stacks": (str,)},
    "failure": {"failure": (dict,)},
    "returned": {"returned": (bool,)},
}
"""By name: the fields that a message has. What is not in here is checked by whom it is for."""
ONLY_SHOWN = ("lines", "report", "stacks")
"""The messages that a run can do without."""

_showing = threading.Lock()


class Display:
    """Writes what workers print to the driver's standard output, each line with its rank.

    What cannot be written leads to one warning, and nothing else.

    Args:
        log: where the lines are that are left out, for example "the executor's log".
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._failed = False

    def __call__(self, rank: int, lines: Sequence[str], left_out: int) -> None:
        """Show a rank's lines, and how many were left out after them."""
        shown = [f"[rank {rank}] {line}\n" for line in lines]
        if left_out:
            shown.append(
                f"[rank {rank}] ({counted(left_out, 'line')} left out; {self._log} has them)\n"
            )
        try:
            encoding = sys.stdout.encoding or "utf-8"
            # A character that the driver cannot show, such as an accent under LANG=C, is no error.
            text = "".join(shown).encode(encoding, "backslashreplace").decode(encoding)
            with _showing:
                sys.stdout.write(text)
                sys.stdout.flush()
        except Exception as error:  # a full disk, a reader that is gone, a closed or replaced file
            if not self._failed:
                self._failed = True
                logger.warning(
                    "what the workers print cannot be shown on the driver's standard output: %s; "
                    "%s has it",
                    message_of(error),
                    self._log,
                )


def driver_hosts(spark: SparkSession) -> tuple[str, str]:
    """The interface that services in the driver bind to, and the host name that workers use."""
    conf = spark.sparkContext.getConf()
    advertised = conf.get("spark.driver.host") or "127.0.0.1"
    return conf.get("spark.driver.bindAddress") or advertised, advertised


def echoes(spark: SparkSession) -> bool:
    """Whether workers have logs of their own; with a local master they share the driver's."""
    if is_of_connect(spark):
        return True
    return not re.fullmatch(r"local(\[.*\])?", spark.sparkContext.master or "")


def display(spark: SparkSession) -> Display:
    """What shows the lines of a session's workers."""
    return Display("the executor's log" if echoes(spark) else "the driver's standard error")


class Console:
    """Shows what a service's workers print; a context manager that ends their connections.

    The loss of a worker is noticed elsewhere; here its lines merely end.

    Args:
        service: accepts their connections.
        on_lines: called with what arrives, in a thread of its own: a slow reader of the output
            may delay that thread and the workers whose lines it has not taken, but nobody else.

    Attributes:
        address: the service's address.
        stacks: asks the workers what they are doing.
        handlers: by the field that a header has, what to do with it. Anything slow is a
            conversation, and the worker is not listened to until that has ended.
    """

    def __init__(self, service: Service, on_lines: Show) -> None:
        self.address: ServiceAddress = service.address
        self.stacks = Stacks()
        self.handlers: dict[
            str, Callable[[ReportingWorker, Mapping[str, Any]], Conversation | None]
        ] = {
            "lines": self._show_lines,
            "stacks": self._note_stacks,
        }
        self._service = service
        self._on_lines = on_lines
        self._showing = DaemonPool(1, "sparkdl-console")
        self._workers: set[ReportingWorker] = set()
        service.handlers["attend"] = partial(ReportingWorker, self, service)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._showing.close()

    def end(self) -> None:
        """End all connections."""
        self._service.post(self._close_all)

    # Called by the service's thread.

    def joined(self, worker: ReportingWorker) -> None:
        """Take note of a worker that has introduced itself."""
        self._workers.add(worker)

    def answer(self, worker: ReportingWorker, header: Mapping[str, Any]) -> Conversation | None:
        """Handle a worker's header; what is only shown is left out if it cannot be read."""
        name = next((name for name in self.handlers if name in header), None)
        if name is None:
            raise unreadable(worker.rank, header)
        try:
            require(name, worker.rank, header)
        except TrainingError as error:
            if name not in ONLY_SHOWN:
                raise
            logger.warning("%s; it is left out", error)
            return None
        return self.handlers[name](worker, header)

    def show(self, worker: ReportingWorker, call: Callable[[], None]) -> Conversation:
        """Have something shown; until it is, its worker is not listened to."""
        yield from worker.elsewhere(call, self._showing)

    def finished(self, worker: ReportingWorker) -> None:
        """Take note of a worker that leaves properly."""

    def lost(self, worker: ReportingWorker, error: LeftError | SparkDLError) -> None:
        """Take note of a worker that leaves without saying so, or cannot be understood."""
        level = logging.DEBUG if isinstance(error, LeftError) else logging.WARNING
        logger.log(level, "the output of a worker is no longer shown: %s", error)

    def closed(self, worker: ReportingWorker) -> None:
        """Take note that a worker's connection is closed."""
        self._workers.discard(worker)

    def _close_all(self) -> None:
        for worker in list(self._workers):
            self._service.close_channel(worker.channel)

    def _show_lines(self, worker: ReportingWorker, header: Mapping[str, Any]) -> Conversation:
        lines, left_out = tuple(header["lines"]), header["left_out"]
        yield from self.show(worker, partial(self._on_lines, worker.rank, lines, left_out))

    def _note_stacks(self, worker: ReportingWorker, header: Mapping[str, Any]) -> None:
        self.stacks.note(worker.rank, header["stacks"])


def require(name: str, rank: int, header: Mapping[str, Any]) -> None:
    """Check that a message has what the table says.

    Raises:
        TrainingError: it does not.
    """
    types = MESSAGES.get(name, {})
    checked({field: header.get(field) for field in types}, types, rank)
    lines, report = header.get("lines", []), header.get("report", {})
    sound = all(isinstance(line, str) for line in lines) and header.get("left_out", 0) >= 0
    # Numbers travel as floats; a whole number could be too large for one.
    if not sound or not all(type(number) is float for number in report.values()):
        raise unreadable(rank, header)


def unreadable(rank: int, header: Mapping[str, Any]) -> TrainingError:
    """The error that shows what a rank sent."""
    return TrainingError(f"rank {rank} sent a header that no worker sends: {reprlib.repr(header)}")


class ReportingWorker:
    """A worker connected to the console; see ``service.Session``.

    Args:
        console: answers it.
        service: the service that it has connected to.
        channel: its connection.

    Attributes:
        channel: as given.
        rank: the worker's rank, once it has said so.
        host: where it runs.
    """

    def __init__(self, console: Console, service: Service, channel: Channel) -> None:
        self.channel = channel
        self.rank = -1
        self.host = "an unknown host"
        self._console = console
        self._service = service

    def conversation(self, first: dict[str, Any]) -> Conversation:
        """Listen to it until it leaves."""
        console = self._console
        try:
            try:
                require("attend", self.rank, first)
            except TrainingError as error:
                raise TrainingError(
                    f"a worker must join with a rank and a host, not with {reprlib.repr(first)}"
                ) from error
            self.rank, self.host = first["attend"], first["host"]
            console.joined(self)
            with console.stacks.of(self.rank, first, self._ask_for_stacks):
                while not (header := (yield HEADER)).get("finish"):
                    yield from console.answer(self, header) or ()
            console.finished(self)
        except SparkDLError:
            raise
        except Exception as error:  # nobody may wait for a rank that is no longer listened to
            raise TrainingError(
                f"what rank {self.rank} sent could not be handled: {error!r}"
            ) from error
        self._service.part(self.channel)

    def elsewhere(
        self, job: Callable[[], T], pool: DaemonPool | None = None
    ) -> Generator[Need, Future[T], T]:
        """Do something slow outside the service's thread, and go on with what it returns."""
        self._service.elsewhere(job, self.wake, pool)
        return (yield PAUSE).result()

    def wake(self, value: Any = None) -> None:
        """Go on with the conversation, in the service's thread."""
        self._service.guard(self.channel, lambda: self.channel.wake(value))

    def note_heartbeat(self) -> None:
        """Heartbeats do nothing: its silence is not timed."""

    def left(self, error: LeftError) -> None:
        """Handle the worker's leaving."""
        self._console.lost(self, error)

    def failed(self, error: SparkDLError) -> None:
        """Handle a worker that cannot be understood or served."""
        self._console.lost(self, error)
        self._service.close_channel(self.channel)

    def closed(self) -> None:
        """Handle the closing of the connection."""
        self._console.closed(self)

    def _ask_for_stacks(self) -> None:
        self._service.post(lambda: self.channel.send_header({"stacks": True}))
