"""Connections that never wait: what cannot be done now returns None."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from sparkdl.transport.tls import Encrypted

RECORD_BYTES = 1 << 14
"""The largest record of TLS."""
_PIECE_BYTES = 1 << 18


class Stream(Protocol):
    """A connected socket, plain or encrypted.

    Attributes:
        short_is_all: whether a short count means that no more can be received or sent now, so that
            there is no need to try again.
    """

    short_is_all: bool

    def fileno(self) -> int:
        """The file descriptor, for a selector."""

    def receive(self, into: Sequence[memoryview]) -> int | None:
        """Fill buffers, one after another, with what has arrived.

        Args:
            into: the buffers; unless the last has room for ``RECORD_BYTES``, what does not fit may
                have to be asked for again, without a selector reporting it.

        Returns:
            How many bytes; 0 if the other end has closed, None if nothing has arrived.

        Raises:
            OSError: the connection broke.
        """

    def send(self, buffers: Sequence[memoryview]) -> int | None:
        """Send as much of the buffers as can be taken now.

        After None or less than their size, the rest has to be offered again unchanged.

        Returns:
            How many bytes; None if the other end has to read some first.

        Raises:
            OSError: the connection broke.
        """

    def end_sending(self) -> None:
        """Signal to the other end that nothing follows."""

    def close(self) -> None:
        """Close at once."""


def stream_over(connected: socket.socket | Encrypted) -> Stream:
    """The stream over a connected socket, which is owned from here on."""
    return _Tls(connected) if isinstance(connected, Encrypted) else _Plain(connected)


class _Plain:
    short_is_all = True

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self, into: Sequence[memoryview]) -> int | None:
        try:
            return self._socket.recvmsg_into(into)[0]
        except BlockingIOError:
            return None

    def send(self, buffers: Sequence[memoryview]) -> int | None:
        try:
            return self._socket.sendmsg(buffers)
        except BlockingIOError:
            return None

    def end_sending(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


class _Tls:
    short_is_all = False  # TLS moves data record by record

    def __init__(self, connected: Encrypted) -> None:
        self._connected = connected
        self._ssl = connected.ssl_socket

    def fileno(self) -> int:
        return self._ssl.fileno()

    def receive(self, into: Sequence[memoryview]) -> int | None:
        try:
            count = self._ssl.recv_into(into[0])
            # No selector sees what is already decrypted, so take all of a record.
            if len(into) > 1 and (pending := self._ssl.pending()):
                count += self._ssl.recv_into(into[1], pending)
            return count
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except ssl.SSLEOFError:
            return 0

    def send(self, buffers: Sequence[memoryview]) -> int | None:
        # A prefix in a record of its own would cost as much as a full one.
        octets: bytes | memoryview = buffers[0]
        if len(octets) < RECORD_BYTES and len(buffers) > 1:
            octets = b"".join([octets, buffers[1][: RECORD_BYTES - len(octets)]])
        try:
            return self._ssl.send(octets[:_PIECE_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def end_sending(self) -> None:
        socket.socket.shutdown(self._ssl, socket.SHUT_WR)

    def close(self) -> None:
        self._connected.close()
