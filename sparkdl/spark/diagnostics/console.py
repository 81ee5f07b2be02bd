"""What the workers of a fit print, shown in the driver behind their rank."""

from __future__ import annotations

import logging
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from pyspark.sql import SparkSession

from sparkdl.errors import StoppedError
from sparkdl.spark.diagnostics.board import BoardAddress, BoardClient
from sparkdl.spark.diagnostics.board_headers import read_join, read_lines, read_stacks
from sparkdl.spark.diagnostics.output import Output
from sparkdl.spark.diagnostics.stacks import Stacks
from sparkdl.transport.connection import Connection, ConnectionLostError, SilenceError
from sparkdl.transport.port import Port

logger = logging.getLogger(__name__)

Show = Callable[[int, Sequence[str], int], None]
"""Shows lines of a rank, and how many were left out before the next."""

_showing = threading.Lock()


def show(rank: int, lines: Sequence[str], left_out: int) -> None:
    """Write lines to the driver's standard output, each behind its rank."""
    shown = [f"[rank {rank}] {line}\n" for line in lines]
    if left_out:
        shown.append(f"[rank {rank}] ({left_out} lines left out; the executor's log has them)\n")
    encoding = sys.stdout.encoding or "utf-8"
    # What the driver cannot show, an accent under LANG=C for example, must not end the run.
    text = "".join(shown).encode(encoding, "backslashreplace").decode(encoding)
    with _showing:
        sys.stdout.write(text)
        sys.stdout.flush()


def driver_hosts(spark: SparkSession) -> tuple[str, str]:
    """The interface that services in the driver bind to, and the name by which workers reach it."""
    conf = spark.sparkContext.getConf()
    advertised = conf.get("spark.driver.host") or "127.0.0.1"
    return conf.get("spark.driver.bindAddress") or advertised, advertised


def echoes(spark: SparkSession) -> bool:
    """Whether workers have a log of their own; with a local master theirs is the driver's."""
    return not (spark.sparkContext.master or "").startswith("local[")


class Console:
    """The driver's end; a context manager that opens and closes the port.

    A worker that is lost says so elsewhere; here its lines merely end.

    Args:
        host: interface to bind to.
        advertised_host: the name under which workers reach it.
        on_lines: called with what arrives, from several threads.
        tls: whether connections are encrypted.
    """

    def __init__(
        self, host: str, advertised_host: str, on_lines: Show = show, *, tls: bool = False
    ) -> None:
        token = secrets.token_urlsafe(32)
        self._on_lines = on_lines
        self.stacks = Stacks()
        self._port = Port(host, token, self._serve, advertised_host=advertised_host, encrypted=tls)
        self.address = BoardAddress(
            advertised_host, self._port.number, token, self._port.fingerprint
        )

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._port.close()

    def _serve(self, connection: Connection) -> None:
        try:
            joined = connection.receive_header()
            rank, _ = read_join(joined)
            with self.stacks.of(rank, joined, connection):
                while not (header := connection.receive_header()).get("finish"):
                    self._take(rank, header)
        except (ConnectionLostError, SilenceError) as error:
            logger.debug("what a worker prints is not shown any more: %s", error)
        except Exception as error:  # a mistake of the worker's, or a driver that cannot show it
            logger.warning("what a worker prints is not shown any more: %s", error)

    def _take(self, rank: int, header: Mapping[str, Any]) -> None:
        if "stacks" in header:
            self.stacks.note(rank, read_stacks(rank, header))
        else:
            told = read_lines(rank, header)
            self._on_lines(rank, told.lines, told.left_out)


@contextmanager
def forwarded(address: BoardAddress, rank: int, *, echo: bool) -> Iterator[None]:
    """Worker: send what Python code prints to the console; without one, go on without.

    Args:
        address: where the console is.
        rank: this worker's rank.
        echo: whether to write to this process's own streams too.
    """
    try:
        client = BoardClient(address, rank)
    except StoppedError as error:
        logger.warning("what rank %d prints is not shown in the driver: %s", rank, error)
        yield
        return
    with client:
        with Output(client.send_lines) as output, output.capture(echo=echo):
            yield
        try:
            client.finish()
        except StoppedError as error:
            logger.debug("the console was closed before rank %d: %s", rank, error)
