"""Services of a driver, without Spark."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparkdl.spark.diagnostics.run_service import RunService, Show
from sparkdl.transport.connection import Connection
from sparkdl.transport.service import Service


@contextmanager
def console_of(on_lines: Show, *, tls: bool = False) -> Iterator[RunService]:
    """What a fit has of it."""
    with (
        Service("127.0.0.1", encrypted=tls) as service,
        RunService(service, None, on_lines) as console,
    ):
        yield console


@contextmanager
def run_of(workers: int, shown: list[Any] | None = None) -> Iterator[RunService]:
    """What ``sparkdl.run`` has; what it shows is added to a list."""
    shown = [] if shown is None else shown
    with (
        Service("127.0.0.1") as service,
        RunService(
            service,
            workers,
            lambda *lines: shown.append(lines),
            lambda *report: shown.append(report),
        ) as run,
    ):
        yield run


class Intruder:
    """A rank that knows the token and speaks the protocol badly; a context manager."""

    def __init__(self, run: RunService, *headers: dict[str, Any]) -> None:
        address = run.address
        connected = socket.create_connection(address.host_and_port, timeout=60)
        self.connection = Connection(connected, 60)
        assert self.connection.introduce(address.token)
        for header in headers:
            self.connection.send_header(header)

    def __enter__(self) -> Connection:
        return self.connection

    def __exit__(self, *_: object) -> None:
        self.connection.close()
