"""Workers that visit each other, over connections without a run."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sparkdl.errors import DisconnectedError, TrainingError
from sparkdl.transport.connection import Connection


class Hosts(Protocol):
    def host(self, connection: Connection, asked: dict[str, Any]) -> None: ...


@contextmanager
def connected(host: Hosts) -> Iterator[Connection]:
    """A connection to a worker that serves visits until the visitor has left."""
    here, there = (Connection(end, 5.0) for end in socket.socketpair())
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def serve() -> None:
        try:
            while True:
                host.host(there, there.receive_header())
        except DisconnectedError:
            pass
        except TrainingError as error:
            errors.put(error)
        finally:
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield here
    finally:
        here.close()
        thread.join(60)
        assert not thread.is_alive()
    if not errors.empty():
        raise errors.get()
