"""Strangers who keep a port busy: many connections that prove nothing and come back when closed."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time

_PAUSE_S = 0.01


class Flood:
    """Keep connections to a port open, from a thread; a context manager.

    Args:
        address: the port's address: host and number, or a local name.
        count: the number of simultaneous connections.
        drip_s: the seconds after which each sends one more byte; None for never.

    Attributes:
        closed: how often the other end has closed or refused a connection.
    """

    def __init__(
        self, address: tuple[str, int] | bytes, count: int, *, drip_s: float | None = None
    ) -> None:
        self.closed = 0
        self._address = address
        self._drip_s = drip_s
        self._missing = count
        self._stopped = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="sparkdl-flood", daemon=True)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(10)

    @property
    def opened(self) -> int:
        """How many connections there are now, including those that the port has not accepted."""
        return len(self._selector.get_map())

    def _run(self) -> None:
        drip_at = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            while not self._stopped.is_set():
                missing, self._missing = self._missing, 0
                for _ in range(missing):
                    self._open()
                for key, _ in self._selector.select(_PAUSE_S):
                    self._read(key.fileobj)  # type: ignore[arg-type]
                if self._drip_s is not None and time.monotonic() >= drip_at:
                    drip_at += self._drip_s
                    self._drip()

    def _open(self) -> None:
        local = isinstance(self._address, bytes)
        connected = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
        connected.setblocking(False)
        try:
            connected.connect(self._address)
        except OSError as error:
            if local or not isinstance(error, BlockingIOError):
                connected.close()
                self._lose()
                return
        self._selector.register(connected, selectors.EVENT_READ)

    def _read(self, connected: socket.socket) -> None:
        try:
            if connected.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._selector.unregister(connected)
        connected.close()
        self._lose()

    def _lose(self) -> None:
        self._missing += 1
        self.closed += 1

    def _drip(self) -> None:
        for key in list(self._selector.get_map().values()):
            with contextlib.suppress(OSError):  # not connected yet, or closed again
                key.fileobj.send(b"\x16")  # type: ignore[union-attr]

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
