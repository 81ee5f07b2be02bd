"""Scripted faults: connections between workers and averager that break on command."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from sparkdl.transport.connecting import ServiceAddress

BLOCK_BYTES = 1 << 14


class Proxy:
    """Pass bytes on between workers and averager, and break connections; a context manager.

    Args:
        target: the averager.
        breaks_after: called for each connection; gives the number of bytes, in both directions
            together, after which it is reset, even in the middle of a message; None for never.
        on_bytes: called with the bytes that pass in either direction.
        host: the address at which workers reach it.
    """

    def __init__(
        self,
        target: ServiceAddress,
        breaks_after: Callable[[], int | None] = lambda: None,
        on_bytes: Callable[[bytes], None] = lambda octets: None,
        host: str = "127.0.0.1",
    ) -> None:
        self._target = target
        self._on_bytes = on_bytes
        self._breaks_after = breaks_after
        self._listener = socket.create_server((host, 0))
        self._open: list[_Connection] = []
        self.breaks = 0
        port = self._listener.getsockname()[1]
        self.address = ServiceAddress(host, port, target.token, target.fingerprint)
        self._thread = threading.Thread(target=self._listen, name="sparkdl-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        self.reset()
        for each in self._open:
            each.join()

    def reset(self) -> None:
        """Break every connection there is."""
        for each in self._open:
            each.reset()

    def break_one(self, choose: random.Random, within_bytes: int) -> bool:
        """Break one connection in the middle of what it carries; returns whether there was one.

        Args:
            choose: picks the connection, and the byte after which it breaks.
            within_bytes: how many of the next bytes to pick from; 0 to break at once.
        """
        alive = [each for each in self._open if each.alive]
        if alive:
            choose.choice(alive).break_after(choose.randint(0, within_bytes))
        return bool(alive)

    def _listen(self) -> None:
        for worker in self._connections():
            try:
                averager = socket.create_connection(self._target.host_and_port, timeout=10)
            except OSError:
                worker.close()
                continue
            averager.settimeout(None)
            self._open.append(
                _Connection(worker, averager, self._breaks_after(), self._count, self._on_bytes)
            )

    def _connections(self) -> Iterator[socket.socket]:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            yield connected

    def _count(self) -> None:
        self.breaks += 1


class _Connection:
    """One connection, as two sockets and a thread for each direction."""

    def __init__(
        self,
        worker: socket.socket,
        averager: socket.socket,
        breaks_after: int | None,
        on_break: Callable[[], None],
        on_bytes: Callable[[bytes], None],
    ) -> None:
        self._sockets = (worker, averager)
        self._left = breaks_after
        self._broken = False
        self._on_break = on_break
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._pump, args=pair, name="sparkdl-proxy", daemon=True)
            for pair in ((worker, averager), (averager, worker))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def break_after(self, count: int) -> None:
        """Break once ``count`` more bytes have passed; at once for 0."""
        with self._lock:
            self._left = count
        if not count:
            self._break()

    def reset(self) -> None:
        """Close both ends abruptly."""
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)
            end.close()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while block := source.recv(BLOCK_BYTES):
                self._on_bytes(block)
                allowed = self._take(len(block))
                target.sendall(block[:allowed])
                if allowed < len(block):
                    self._break()
                    return
            target.shutdown(socket.SHUT_WR)
        except OSError:
            self.reset()

    def _break(self) -> None:
        with self._lock:
            first, self._broken = not self._broken, True
        if first:  # and not the other direction at the same moment
            self._on_break()
        self.reset()

    def _take(self, count: int) -> int:
        with self._lock:
            if self._left is None:
                return count
            allowed = min(count, self._left)
            self._left -= allowed
            return allowed
