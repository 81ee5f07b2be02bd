"""The worker's end of its exchanges with the driver besides the rounds.

What it prints is sent too; printing never waits for the network.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import queue
import reprlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TextIO

from sparkdl.averager.headers import received, shard_header
from sparkdl.errors import DisconnectedError, StoppedError, TrainingError
from sparkdl.feed.shards import DataStatistics, ShardStatistics
from sparkdl.spark.diagnostics.stacks import describe_threads
from sparkdl.transport.connecting import ServiceAddress, reach

MAX_LINES_A_SECOND = 200
"""The most that one worker sends: of a burst the first and the last lines, so many of each. What is
left out is in the worker's own log, which is the driver's standard error with a local master."""
MAX_LINE = 2_000
"""The most characters of a line that are sent."""
INTERVAL_S = 0.1
"""Seconds between two checks for printed lines."""

LAST_LINES_S = 10.0
"""Seconds to send the last lines; a driver that takes none must not hold the worker up."""

Send = Callable[[list[str], int], None]
"""Sends some lines, and the number of lines left out after them; may block."""
Log = Callable[[str], None]


class Output:
    """Lines printed by a worker, sent by a thread of its own; a context manager.

    Args:
        send: sends them; a ``StoppedError`` ends the sending, not the training.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        # Those left out were after so many of the others.
        self._lines, self._left_out, self._gap = list[tuple[str, Log | None]](), 0, 0
        self._lock = threading.RLock()  # finalizers and signal handlers may print while it is held
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="sparkdl-output", daemon=True)

    def __enter__(self) -> Output:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(LAST_LINES_S)

    def add(self, line: str, log: Log | None = None) -> None:
        """Take a line; returns at once.

        Args:
            line: the line.
            log: called with a line that is not sent, or not all of it; None if it is logged anyway.
        """
        unsent = [(line, log)] if len(line) > MAX_LINE else []
        if unsent:
            line, log = line[:MAX_LINE] + " ...", None
        with self._lock:
            self._lines.append((line, log))
            if not self._left_out:
                self._gap = MAX_LINES_A_SECOND
            if len(self._lines) > self._gap + MAX_LINES_A_SECOND:
                unsent.insert(0, self._lines.pop(self._gap))
                self._left_out += 1
        for line, log in unsent:
            if log is not None:
                log(line)

    @contextlib.contextmanager
    def capture(self, *, echo: bool = True) -> Iterator[None]:
        """Capture what Python code writes to standard output and standard error.

        Args:
            echo: whether it is still written there too.
        """
        before = sys.stdout, sys.stderr
        captured = [_Captured(stream, self.add, echo) for stream in before]
        kept = [each.stream() for each in captured]
        sys.stdout, sys.stderr = kept
        try:
            yield
        finally:
            # A script may have wrapped the bytes of ours, closed them, or detached them.
            for stream in (sys.stdout, sys.stderr, *kept):
                with contextlib.suppress(AttributeError, ValueError):
                    stream.flush()
            for each in captured:
                each.finish()
            sys.stdout, sys.stderr = before

    def _forward(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(INTERVAL_S)
            told = self._take(int(MAX_LINES_A_SECOND * INTERVAL_S))
            while any(told):
                try:
                    self._send(*told)
                except StoppedError:
                    return  # the driver is gone, so nobody would read this
                told = self._take(MAX_LINES_A_SECOND) if ended else ([], 0)

    def _take(self, most: int) -> tuple[list[str], int]:
        """The next lines, and how many were left out after them."""
        with self._lock:
            most = min(most, self._gap) if self._left_out else most
            taken, self._lines[:most] = self._lines[:most], []
            self._gap, left_out = self._gap - most, 0
            if not self._gap:
                left_out, self._left_out = self._left_out, 0
        return [line for line, _ in taken], left_out


class _Captured(io.BufferedIOBase):
    """The bytes below a stream that passes on each complete line, and may write to another too.

    There are bytes below its text because scripts use everything that standard output offers.
    """

    def __init__(self, original: TextIO, add: Callable[..., None], echo: bool) -> None:
        original.flush()  # what follows bypasses it and goes to the bytes below
        self._original, self._echo, self._started = original, echo, ""
        self._add = add if echo else partial(add, log=self._log)
        self._encoding = getattr(original, "encoding", None) or "utf-8"
        self._decoder = codecs.getincrementaldecoder(self._encoding)("replace")
        self._lock = threading.RLock()

    def stream(self) -> io.TextIOWrapper:
        """The stream above these bytes."""
        return io.TextIOWrapper(
            self,  # type: ignore[arg-type]
            encoding=self._encoding,
            errors="backslashreplace",  # an unencodable character is no reason to end a training
            newline="",
            line_buffering=getattr(self._original, "line_buffering", False),
            write_through=True,
        )

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._original.fileno()

    def isatty(self) -> bool:
        return self._original.isatty()

    def flush(self) -> None:
        self._original.flush()

    def write(self, data: Any) -> int:
        copied = bytes(data)
        with self._lock:
            text = self._decoder.decode(copied)
            if self._echo:
                # A notebook's has no bytes below.
                below = getattr(self._original, "buffer", None)
                self._original.write(text) if below is None else below.write(copied)
            *lines, rest = (self._started + text).split("\n")
            # A progress bar overwrites its line without ever ending it.
            self._started = rest.rpartition("\r")[2][: 2 * MAX_LINE]
            for line in lines:
                self._add(line.rpartition("\r")[2])
        return len(copied)

    def finish(self) -> None:
        """Pass on a last line without a line break."""
        if last := self._started + self._decoder.decode(b"", final=True):
            self._add(last)

    def _log(self, line: str) -> None:
        """Write a line that is not sent where the whole stream would have gone."""
        with contextlib.suppress(OSError, ValueError):  # closed; it must not end what it reports on
            self._original.write(line + "\n")
            self._original.flush()


logger = logging.getLogger(__name__)

JOIN_S = 600.0
"""Seconds for all workers to start once Spark does no more for them; a fit's default too."""
SAVED: dict[str, Any] = {"saved": True}
"""What a rank gives when it waits for all to have called ``save_checkpoint``."""
CLOSE_S = 5.0
"""Seconds to wait for the driver to read what was last sent."""


class RunClient:
    """The worker's end; a context manager. Any thread may send.

    Args:
        address: where the run service is.
        rank: this worker's rank.
        patience_s: how long to try to reach the service, in seconds.

    Raises:
        DisconnectedError: the service cannot be reached.
        StoppedError: the service belongs to another run.
    """

    def __init__(self, address: ServiceAddress, rank: int, patience_s: float = 0.0) -> None:
        self.address = address
        self._rank = rank
        self._asking = threading.Lock()
        self._answers: queue.SimpleQueue[list[Any] | StoppedError] = queue.SimpleQueue()
        name = "the driver at {}:{}".format(*address.host_and_port)
        self._connection = reach(partial(address.connect, rank, name, None), patience_s)
        self._send({"attend": rank, "host": socket.gethostname(), "pid": os.getpid()})
        self._listener = threading.Thread(target=self._listen, name="sparkdl-run", daemon=True)
        self._listener.start()

    def __enter__(self) -> RunClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.end_sending()
        self._listener.join(CLOSE_S)  # until the driver has read what was last sent
        self._connection.interrupt()
        self._listener.join(CLOSE_S)
        self._connection.close()

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Give an object and receive those of all ranks, in rank order.

        Raises:
            StoppedError: the run ended.
        """
        return self._ask({"gather": value})

    def gather_statistics(self, shard: ShardStatistics) -> DataStatistics:
        """Report this worker's statistics of its rows, and receive those of all workers combined.

        Raises:
            DataError: there are too many to report.
            StoppedError: the run ended.
        """
        (statistics,) = self._ask(shard_header(shard))
        return received(DataStatistics, statistics.get("statistics"), None)

    def send_lines(self, lines: list[str], left_out: int) -> None:
        """Send what was printed.

        Raises:
            StoppedError: the driver is gone.
        """
        self._send({"lines": lines, "left_out": left_out})

    def send_report(self, metrics: Mapping[str, float]) -> None:
        """Pass numbers to the caller of ``run``.

        Raises:
            StoppedError: the run ended.
        """
        self._send({"report": dict(metrics)})

    def report_failure(
        self, message: str, traceback: str, *, of_data: bool = False, of_exchange: bool = False
    ) -> None:
        """End the run for everyone.

        Args:
            message: what happened, and on which rank.
            traceback: the worker's own.
            of_data: whether the rows cannot be fed, which is not the fault of the worker's code.
            of_exchange: whether an exchange with other ranks broke.
        """
        failure = {"message": message, "traceback": traceback}
        self._send({"failure": failure | {"of_data": of_data, "of_exchange": of_exchange}})

    def say_returned(self) -> None:
        """Say that this rank's function has returned, and wait until every rank's has.

        Raises:
            StoppedError: the run ended.
        """
        self._ask({"returned": True})

    def finish(self) -> None:
        """Leave properly."""
        self._send({"finish": True})

    def _ask(self, header: dict[str, Any]) -> list[Any]:
        with self._asking:
            self._send(header)
            answer = self._answers.get()
        if isinstance(answer, StoppedError):
            raise answer
        return answer

    def _send(self, header: dict[str, Any]) -> None:
        try:
            self._connection.send_header(header)
        except DisconnectedError as error:
            raise StoppedError(f"rank {self._rank} was stopped by the driver: {error}") from error

    def _listen(self) -> None:
        """Pass on gathered objects and answer requests for stacks until the driver is gone."""
        try:
            while True:
                header = self._connection.receive_header()
                if "stacks" in header:
                    self._send({"stacks": describe_threads()})
                elif isinstance(header.get("gathered"), list):
                    self._answers.put(header["gathered"])
                else:
                    raise TrainingError(
                        f"it sent a header that no driver sends: {reprlib.repr(header)}"
                    )
        except TrainingError as error:
            told = StoppedError(f"rank {self._rank} was stopped by the driver: {error}")
            self._answers.put(told)


@contextmanager
def forwarded(address: ServiceAddress, rank: int, *, echo: bool) -> Iterator[None]:
    """Send what a worker's Python code prints to the console; if there is none, go on without.

    Args:
        address: where the console is.
        rank: this worker's rank.
        echo: whether to write to this process's own streams too.
    """
    try:
        client = RunClient(address, rank)
    except StoppedError as error:
        logger.warning("the output of rank %d is not shown in the driver: %s", rank, error)
        yield
        return
    with client:
        with Output(client.send_lines) as output, output.capture(echo=echo):
            yield
        with suppress(StoppedError):  # the console was closed before
            client.finish()
