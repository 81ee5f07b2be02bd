"""One connection between a worker and the averager: proof, framing and deadlines.

``framing.py`` describes what a message looks like. Values go from the sender's flat tensor into the
receiver's through nothing but the kernel. Before the first message both ends prove that they know
the job's token (``handshake.py``).
"""

from __future__ import annotations

import contextlib
import hmac
import reprlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparkdl.errors import DeadlineError, DisconnectedError, TrainingError
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
Takes = Callable[[dict[str, Any]], bool]
_SLOW = "the other end took too long to authenticate"
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""A host that is cut off or loses power sends no goodbye, so the kernel probes it."""


class Connection:
    """Messages over a connected socket.

    Used by one thread at a time, except that any thread may send headers while another receives.

    Args:
        connected: the socket, owned from here on.
        silence_s: the longest that one message may make no progress, in seconds; None for no limit.
        ends: what errors call this end and the other.
        takes: called with each header that comes, and may raise; those for which it returns False
            are skipped.

    Raises:
        DisconnectedError: the other end is gone; raised by all methods.
        DeadlineError: nothing moved for ``silence_s``; raised by all methods.
        TrainingError: something else came than was to be received.
    """

    def __init__(
        self,
        connected: socket.socket | Encrypted,
        silence_s: float | None,
        ends: tuple[str, str] = ("this end", "the other end"),
        takes: Takes = lambda _: True,
    ) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._silence_s = silence_s
        self._ends, self._takes = ends, takes
        self._is_proved = True
        set_up(connected)
        self._limit_silence(silence_s)

    def welcome(self, proof: bytes) -> None:
        """Averager: let in the worker, which waits for the averager's own proof."""
        self._send(proof)

    def introduce(self, token: str) -> bool:
        """Worker: prove knowledge of the token; returns whether the averager did the same.

        Raises:
            DisconnectedError: the other end is gone, is no averager, or did not complete the
                handshake within ``INTRODUCE_S``.
        """
        self._is_proved = False
        until = time.monotonic() + INTRODUCE_S
        channel = channel_of(self._socket)
        hello = self._receive_until(until, HELLO_BYTES)
        if not hello.startswith(MAGIC):
            raise self._broken("the other end is not an averager", retry=False)
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._send(prove(token, WORKER, channel, hello[len(MAGIC) :]) + challenge)
        answer = self._receive_until(until, PROOF_BYTES)
        self._limit_silence(self._silence_s)
        self._is_proved = hmac.compare_digest(answer, prove(token, AVERAGER, channel, challenge))
        return self._is_proved

    def send_header(self, fields: Mapping[str, Any]) -> None:
        """Send a JSON object."""
        message = header_message(fields)
        with self._sending:
            self._send(message)

    def send_values(self, values: Tensor, header: Mapping[str, Any] | None = None) -> None:
        """Send a contiguous 1-D tensor on the CPU, as it lies in memory.

        Args:
            values: the tensor.
            header: a JSON object to send first, in the same message of the system: so the other end
                wakes up once and not twice.
        """
        octets = octets_of(values)
        prefix = values_prefix(octets.nbytes)
        if header is not None:
            prefix = memoryview(header_message(header) + prefix)
        try:
            sent = self._socket.sendmsg([prefix, octets])
        except OSError as error:
            raise self._broken(error) from error
        if sent < len(prefix):
            self._send(prefix[sent:])
            sent = len(prefix)
        if rest := octets[sent - len(prefix) :]:
            self._send(rest)

    def send_octets(self, octets: bytes, block_bytes: int) -> None:
        """Send bytes other than values, in messages of at most ``block_bytes``."""
        if octets:
            values = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
            for block in torch.split(values, block_bytes):
                self.send_values(block)

    def receive_octets(self, size: int, block_bytes: int) -> bytes:
        """Receive ``size`` bytes other than values, in messages of at most ``block_bytes``."""
        octets = torch.empty(size, dtype=torch.uint8)
        for start in range(0, size, block_bytes):
            self.receive_values(octets[start : start + block_bytes])
        return octets.numpy().tobytes()

    def receive_header(self) -> dict[str, Any]:
        """The next message, which has to be a header."""
        header = self._receive_prefix()
        if isinstance(header, int):
            raise TrainingError("values arrived where a header was expected")
        return header

    def receive_values(self, into: Tensor, *, varies: bool = False) -> Tensor:
        """Fill a tensor with the next message; returns it, or its leading part.

        Args:
            into: contiguous, 1-D, on the CPU, of the length and dtype that must come.
            varies: whether fewer values may come.
        """
        length = self._receive_prefix()
        if isinstance(length, dict):
            mine, other = self._ends
            header = reprlib.repr(length)
            raise TrainingError(f"{mine} received {header} from {other} instead of values")
        octets, item = octets_of(into), into.dtype.itemsize
        if length > octets.nbytes or length % item or (not varies and length < octets.nbytes):
            most = "at most " if varies else ""
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

    def send_last(self, fields: Mapping[str, Any]) -> None:
        """Send a JSON object, and close once the other end has, since it could be lost otherwise.

        Leaving before would also look like a crash.
        """
        self.send_header(fields)
        scratch = bytearray(1 << 16)
        self.end_sending()
        with contextlib.suppress(OSError):  # gone, or silent: either way this end is done
            while self._socket.recv_into(scratch):
                pass
        self.close()

    def close(self) -> None:
        """Close at once."""
        self._socket.close()

    def _receive_prefix(self) -> dict[str, Any] | int:
        """The next header that is taken, or how many bytes of values follow."""
        while True:
            kind, length = read_prefix(self._receive(PREFIX_BYTES))
            if kind != HEADER_KIND:
                return length
            header = read_header(self._receive(length))
            if self._takes(header):
                return header

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
                raise self._broken(_SLOW)
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
            raise self._broken(error) from error
        if not count:
            raise self._broken("the other end closed the connection")
        return count

    def _send(self, octets: bytes | memoryview) -> None:
        try:
            self._socket.sendall(octets)
        except OSError as error:
            raise self._broken(error) from error

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

    def _broken(
        self, why: OSError | str, *, retry: bool = True
    ) -> DisconnectedError | DeadlineError:
        mine, other = self._ends
        if self._is_proved and isinstance(why, BlockingIOError):
            return DeadlineError(f"{mine} received nothing from {other} for {self._silence_s:g} s")
        if isinstance(why, BlockingIOError):
            why = _SLOW
        elif isinstance(why, OSError):
            why = f"the connection broke: {why}"
        verb = "lost" if self._is_proved else "cannot reach"
        return DisconnectedError(f"{mine} {verb} {other}: {why}", retry=retry)


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
