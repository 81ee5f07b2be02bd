"""One connection between a worker and the averager: proof, framing and deadlines.

``framing.py`` describes what a message looks like. Values go from the sender's flat tensor into the
receiver's through nothing but the kernel. Before the first message both ends prove that they know
the job's token (``handshake.py``).
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparkdl.errors import TrainingError
from sparkdl.transport.framing import (
    HEADER_KIND,
    PREFIX_BYTES,
    header_message,
    octets_of,
    read_header,
    read_prefix,
    values_prefix,
)
from sparkdl.transport.handshake import (
    AVERAGER,
    CHALLENGE_BYTES,
    HELLO_BYTES,
    MAGIC,
    PROOF_BYTES,
    WORKER,
    channel_of,
    prove,
)
from sparkdl.transport.sockets import Encrypted

INTRODUCE_S = 20.0
"""Seconds that an averager has to let a worker in; others may be ahead of it in the queue."""
LOCAL_BUFFER_BYTES = 256 << 10
"""The buffer for what one end of a local connection has sent and the other has not taken; the
kernel doubles it. A smaller one costs more steps, a larger one no longer fits a processor's cache.
"""
_SECONDS = struct.Struct("ll")
_SHORTEST_S = 1e-3
"""The kernel may round anything shorter to 0, which means no limit."""
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""A host that is cut off or loses power sends no goodbye, so the kernel probes it."""


class ConnectionLostError(Exception):
    """The other end is gone, or has sent something that no end of ours sends."""


class NotAnAveragerError(ConnectionLostError):
    """The other end does not speak as an averager does."""


class WrongTokenError(NotAnAveragerError):
    """The other end does not know the job's token, or says that this one does not."""


class SilenceError(Exception):
    """Nothing moved on a connection until its deadline passed."""


class Connection:
    """Messages over a connected socket.

    Used by one thread at a time, except that any thread may send headers while another receives.

    Args:
        connected: the socket, owned from here on.
        silence_s: the longest that one message may make no progress, in seconds; None for no limit.
    """

    def __init__(self, connected: socket.socket | Encrypted, silence_s: float | None) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._silence_s = silence_s
        set_up(connected)
        self._limit_silence(silence_s)

    def welcome(self, proof: bytes) -> None:
        """Averager: let in the worker, which has proved itself.

        Args:
            proof: the averager's own proof, for which the worker waits.

        Raises:
            ConnectionLostError: the other end is gone.
        """
        self._send(proof)

    def introduce(self, token: str) -> bool:
        """Worker: prove knowledge of the token; returns whether the averager did the same.

        Raises:
            ConnectionLostError: the other end is gone; NotAnAveragerError if it is not an averager.
            SilenceError: it did not complete the handshake within ``INTRODUCE_S``.
        """
        until = time.monotonic() + INTRODUCE_S
        channel = channel_of(self._socket)
        hello = self._receive_until(until, HELLO_BYTES)
        if not hello.startswith(MAGIC):
            raise NotAnAveragerError("the other end is not an averager")
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._send(prove(token, WORKER, channel, hello[len(MAGIC) :]) + challenge)
        answer = self._receive_until(until, PROOF_BYTES)
        self._limit_silence(self._silence_s)
        return hmac.compare_digest(answer, prove(token, AVERAGER, channel, challenge))

    def send_header(self, fields: Mapping[str, Any]) -> None:
        """Send a JSON object.

        Raises:
            ConnectionLostError: the other end is gone.
            SilenceError: it does not read what is sent.
        """
        message = header_message(fields)
        with self._sending:
            self._send(message)

    def send_values(self, values: Tensor, header: Mapping[str, Any] | None = None) -> None:
        """Send a contiguous 1-D tensor on the CPU, as it lies in memory.

        Args:
            values: the tensor.
            header: a JSON object to send first, in the same message of the system: so the other end
                wakes up once and not twice.

        Raises:
            ConnectionLostError: the other end is gone.
            SilenceError: it does not read what is sent.
        """
        octets = octets_of(values)
        prefix = values_prefix(octets.nbytes)
        if header is not None:
            prefix = memoryview(header_message(header) + prefix)
        try:
            sent = self._socket.sendmsg([prefix, octets])
        except OSError as error:
            raise self._as_ours(error) from error
        if sent < len(prefix):
            self._send(prefix[sent:])
            sent = len(prefix)
        if rest := octets[sent - len(prefix) :]:
            self._send(rest)

    def receive_header(self) -> dict[str, Any]:
        """The next message, which has to be a header.

        Raises:
            ConnectionLostError: the other end is gone.
            SilenceError: nothing came.
            TrainingError: it is not a header.
        """
        kind, length = read_prefix(self._receive(PREFIX_BYTES))
        if kind != HEADER_KIND:
            raise TrainingError("values arrived where a header was expected")
        return read_header(self._receive(length))

    def receive_values(self, into: Tensor) -> dict[str, Any] | None:
        """Fill a tensor with the next message, or return the message if it is a header.

        Args:
            into: contiguous, 1-D, on the CPU, of the length and dtype that must come.

        Raises:
            ConnectionLostError: the other end is gone.
            SilenceError: nothing came.
            TrainingError: another number of bytes came.
        """
        came = self._receive_message(into, "")
        return came if isinstance(came, dict) else None

    def receive_up_to(self, into: Tensor) -> dict[str, Any] | Tensor:
        """The next message: the leading part of a tensor that it has filled, or a header.

        Args:
            into: as in ``receive_values``, with room for at least as many values as come.

        Raises:
            ConnectionLostError: the other end is gone.
            SilenceError: nothing came.
            TrainingError: more came.
        """
        return self._receive_message(into, "at most ")

    def _receive_message(self, into: Tensor, most: str) -> dict[str, Any] | Tensor:
        kind, length = read_prefix(self._receive(PREFIX_BYTES))
        if kind == HEADER_KIND:
            return read_header(self._receive(length))
        octets, item = octets_of(into), into.dtype.itemsize
        if length > octets.nbytes or length % item or (not most and length < octets.nbytes):
            raise TrainingError(
                f"{length} bytes arrived where {most}{len(into)} values of {into.dtype} "
                f"({octets.nbytes} bytes) were expected; both ends must train the same model"
            )
        self._receive_into(octets[:length])
        return into[: length // item]

    def end_sending(self) -> None:
        """Signal to the other end that nothing more is sent; it can still be received from."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_WR)

    def interrupt(self) -> None:
        """End the connection from any thread, waking whoever waits on it at either end."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close_after(self, seconds: float) -> None:
        """Close once the other end has, since what was sent last could otherwise be lost.

        Args:
            seconds: how long to wait for it.
        """
        scratch = bytearray(1 << 16)
        self.end_sending()
        with contextlib.suppress(OSError):  # gone, or silent: either way this end is done
            self._limit_silence(seconds)
            while self._socket.recv_into(scratch):
                pass
        self.close()

    def close(self) -> None:
        """Close at once."""
        self._socket.close()

    def _receive(self, size: int) -> bytes:
        octets = bytearray(size)
        self._receive_into(memoryview(octets))
        return bytes(octets)

    def _receive_until(self, until: float, size: int) -> bytes:
        """Like ``_receive``, but not beyond a time of the monotonic clock, whatever trickles in."""
        octets = bytearray(size)
        view = memoryview(octets)
        while view.nbytes:
            left = until - time.monotonic()
            if left < _SHORTEST_S:
                raise SilenceError("the other end took too long to authenticate")
            self._limit_silence(left)
            view = view[self._receive_some(view) :]
        return bytes(octets)

    def _receive_into(self, octets: memoryview) -> None:
        while octets.nbytes:
            octets = octets[self._receive_some(octets) :]

    def _receive_some(self, octets: memoryview) -> int:
        try:
            count = self._socket.recv_into(octets, 0, socket.MSG_WAITALL)
        except OSError as error:
            raise self._as_ours(error) from error
        if not count:
            raise ConnectionLostError("the other end closed the connection")
        return count

    def _send(self, octets: bytes | memoryview) -> None:
        try:
            self._socket.sendall(octets)
        except OSError as error:
            raise self._as_ours(error) from error

    def _limit_silence(self, seconds: float | None) -> None:
        if isinstance(self._socket, Encrypted):
            self._socket.silence_s = seconds
            return
        # The kernel's own timeouts: with Python's, the socket is non-blocking, and one large
        # receive becomes hundreds of small ones.
        whole = int(seconds or 0)
        limit = _SECONDS.pack(whole, int(((seconds or 0) - whole) * 1e6))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _as_ours(self, error: OSError) -> ConnectionLostError | SilenceError:
        if isinstance(error, BlockingIOError):
            return SilenceError("no data moved on the connection within its deadline")
        return ConnectionLostError(f"the connection broke: {error}")


def set_up(connected: socket.socket | Encrypted) -> None:
    """Have data leave at once and in large pieces, and the kernel probe the other end."""
    if connected.family == socket.AF_UNIX:
        # TCP's buffers grow by themselves; the kernel may grant less than is asked for.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):  # not every operating system has all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
