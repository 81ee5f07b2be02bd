"""The worker's end of its exchanges with the driver besides the rounds."""

from __future__ import annotations

import logging
import os
import queue
import reprlib
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from sparkdl.averager.messages.headers import received, shard_header
from sparkdl.errors import DisconnectedError, StoppedError, TrainingError
from sparkdl.feed.statistics.shards import DataStatistics, ShardStatistics
from sparkdl.spark.diagnostics.output import Output
from sparkdl.spark.diagnostics.stacks import describe_threads
from sparkdl.transport.connecting import ServiceAddress, reach

logger = logging.getLogger(__name__)

JOIN_S = 600.0
"""Seconds for all workers to start once Spark does no more for them; a fit's default too."""
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
