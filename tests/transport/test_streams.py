"""Sockets that do not block, plain and over TLS, as channels use them."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from random import Random

import pytest

from sparkdl.transport.sockets import RECORD_BYTES, Certificate, Encrypted, connect

PATIENCE_S = 20.0
MUCH = 8 << 20
"""More than sockets on this machine buffer."""


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return Certificate()


class Pair:
    """The averager's end, and a worker's that waits."""

    def __init__(self, here: socket.socket | Encrypted, there: socket.socket | Encrypted) -> None:
        self.here = here
        self.there = there

    def wait(self, *, to_send: bool = False) -> None:
        """Until the averager's end can go on."""
        poll = select.poll()
        poll.register(self.here.fileno(), select.POLLOUT if to_send else select.POLLIN)
        assert poll.poll(1000 * PATIENCE_S), "nothing moved"

    def receive(self, into: bytearray) -> int:
        """Wait for what arrives next."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                return self.here.recv_into(into)
            except BlockingIOError:
                self.wait()
        raise AssertionError("nothing arrived")

    def send(self, *buffers: memoryview) -> int | None:
        """Send what is taken now; None for nothing."""
        try:
            return self.here.sendmsg(buffers)
        except BlockingIOError:
            return None

    def receive_all(self, size: int, piece: int = 1000) -> bytes:
        """Everything up to a size, through small buffers."""
        octets = b""
        while len(octets) < size:
            place = bytearray(piece)
            count = self.receive(place)
            assert count, "it ended early"
            octets += place[:count]
        return octets

    def take(self, size: int) -> bytes:
        """What the worker receives."""
        octets = bytearray()
        while len(octets) < size:
            place = bytearray(min(1 << 16, size - len(octets)))
            count = self.there.recv_into(place)
            assert count, "it ended early"
            octets += place[:count]
        return bytes(octets)


@pytest.fixture(params=["plain", "encrypted"])
def pair(request: pytest.FixtureRequest, certificate: Certificate) -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        met: list[socket.socket | Encrypted] = []
        fingerprint = certificate.fingerprint if request.param == "encrypted" else None

        def meet() -> None:
            met.append(connect(listener.getsockname(), fingerprint, PATIENCE_S))

        worker = threading.Thread(target=meet)
        worker.start()
        accepted, _ = listener.accept()
        accepted.setblocking(False)
        here: socket.socket | Encrypted = accepted
        if fingerprint is not None:
            here = Encrypted(certificate.wrap(accepted))
            here.setblocking(False)
        deadline = time.monotonic() + PATIENCE_S
        while worker.is_alive() and time.monotonic() < deadline:
            # Nothing to receive yet, but whoever encrypts has to shake hands.
            with pytest.raises(BlockingIOError):
                here.recv_into(bytearray(1))
            worker.join(0.001)
    (there,) = met
    if isinstance(there, Encrypted):
        there.silence_s = PATIENCE_S
    else:
        there.settimeout(PATIENCE_S)
    try:
        yield Pair(here, there)
    finally:
        here.close()
        there.close()


def test_nothing_that_has_arrived_stays_where_no_selector_sees_it(pair: Pair) -> None:
    """Whoever has received into all it offered may go on to wait for the socket."""
    octets = Random(3).randbytes(RECORD_BYTES)
    pair.there.sendall(octets)
    place = bytearray(RECORD_BYTES)
    count = pair.receive(place)
    while count < len(octets):  # TCP may have cut it
        pair.wait()
        count += pair.here.recv_into(memoryview(place)[count:])
    assert bytes(place) == octets
    with pytest.raises(BlockingIOError):
        pair.here.recv_into(place)


def test_it_is_blocked_once_the_other_end_takes_nothing_and_goes_on_when_it_does(
    pair: Pair,
) -> None:
    octets = Random(1).randbytes(MUCH)
    at = 0
    while (sent := pair.send(memoryview(octets)[at:])) is not None:
        assert 0 < sent <= len(octets) - at
        at += sent
    assert 0 < at < len(octets)

    taken: list[bytes] = []
    worker = threading.Thread(target=lambda: taken.append(pair.take(len(octets))))
    worker.start()
    while at < len(octets):
        sent = pair.send(memoryview(octets)[at:])
        if sent is None:
            pair.wait(to_send=True)
        else:
            at += sent
    worker.join(PATIENCE_S)
    assert taken == [octets]


def test_many_buffers_arrive_as_one(pair: Pair) -> None:
    draw = Random(2)
    frames = [memoryview(draw.randbytes(size)) for size in (5, 40_000, 5, 1, 5, RECORD_BYTES, 0, 5)]
    expected = b"".join(frames)
    sizes = []
    while frames:
        sent = pair.send(*frames)
        if sent is None:
            pair.wait(to_send=True)
            continue
        sizes.append(sent)
        while frames and sent >= len(frames[0]):
            sent -= len(frames.pop(0))
        if sent:
            frames[0] = frames[0][sent:]
    assert sum(sizes) == len(expected)
    assert pair.take(len(expected)) == expected


def test_whoever_ends_sending_is_still_sent_to(pair: Pair) -> None:
    assert pair.send(memoryview(b"stopped")) == 7
    pair.here.shutdown(socket.SHUT_WR)
    pair.there.sendall(b"too late")
    assert pair.receive_all(8) == b"too late"
    assert pair.take(7) == b"stopped"
    assert pair.there.recv_into(bytearray(1)) == 0


def test_an_end_that_is_gone_is_an_error_of_the_system(pair: Pair) -> None:
    pair.there.sendall(b"unread")
    # Closed with something unread at its own end, the system resets the connection.
    pair.send(memoryview(b"nobody reads this"))
    pair.wait()
    pair.there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    pair.there.close()

    def send_on() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if pair.send(memoryview(bytes(1000))) is None:
                pair.wait(to_send=True)

    with pytest.raises(OSError, match=r"reset|[Bb]roken|EOF"):
        send_on()
