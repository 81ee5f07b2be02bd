"""Those that have connected but not yet proved that they know the job's token.

Their number is limited, and so is the time that each has. Whoever is slow on purpose hurts only his
own connections: where there is one too many, the oldest of the source with the most goes.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from sparkdl.transport.handshake import ANSWER_BYTES, Challenge

_NETWORK_BYTES = 8


class Allowance:
    """A token bucket: how many more may come, refilled every second.

    Args:
        at_once: the most that may come at once.
        per_s: how many more may come each second.
        now: reads the time, in seconds.
    """

    def __init__(
        self, at_once: int, per_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._at_once = at_once
        self._per_s = per_s
        self._left = float(at_once)
        self._now = now
        self._counted = now()

    def take(self) -> bool:
        """Count one that comes; returns whether it may come in."""
        now = self._now()
        self._left = min(self._left + (now - self._counted) * self._per_s, self._at_once)
        self._counted = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Give one back."""
        self._left += 1

    def suspend(self, seconds: float) -> None:
        """Let nobody come for this long."""
        self._left = -seconds * self._per_s


class Stranger:
    """A stranger, as seen from the averager's end; nothing here waits.

    Args:
        connected: a non-blocking socket, owned from here on.
        source: where it comes from, as returned by ``source_of``.
        challenge: what it has to answer.
        until: when it must have proved itself, on the port's clock.
        allowance: the allowance that it was counted against.

    Attributes:
        answer: the bytes received so far, of ``ANSWER_BYTES``.
    """

    def __init__(
        self,
        connected: socket.socket | ssl.SSLSocket,
        source: bytes,
        challenge: Challenge,
        until: float,
        allowance: Allowance,
    ) -> None:
        self.socket = connected
        self.source = source
        self.until = until
        self.allowance = allowance
        self.challenge = challenge
        self.answer = b""
        self._unsent = challenge.hello

    def advance(self) -> int:
        """Send and receive what is possible now.

        Returns:
            The event of ``selectors`` to wait for; 0 once the answer is there.

        Raises:
            OSError: the other end is gone, or does not speak TLS although it should.
        """
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            while missing := ANSWER_BYTES - len(self.answer):
                octets = self.socket.recv(missing)
                if not octets:
                    raise ConnectionResetError("the other end closed the connection")
                self.answer += octets
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        except BlockingIOError:
            return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ
        return 0


class Strangers:
    """All strangers at one port, in the order in which they came."""

    def __init__(self) -> None:
        self._all: dict[Stranger, None] = {}
        self._by_source: dict[bytes, dict[Stranger, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, stranger: Stranger) -> None:
        """Add the newest one, which has the most time left of all."""
        self._all[stranger] = None
        self._by_source.setdefault(stranger.source, {})[stranger] = None

    def remove(self, stranger: Stranger) -> None:
        """Forget one that has left, or is no longer a stranger."""
        del self._all[stranger]
        of_source = self._by_source[stranger.source]
        del of_source[stranger]
        if not of_source:
            del self._by_source[stranger.source]

    @property
    def oldest(self) -> Stranger | None:
        """The one whose time runs out next."""
        return next(iter(self._all), None)

    @property
    def superfluous(self) -> Stranger:
        """The oldest from the source that has the most; there has to be one."""
        most: dict[Stranger, None] = max(self._by_source.values(), key=len)
        return next(iter(most))


def source_of(family: int, address: Any) -> bytes:
    """Those that share one source: an IPv4 address, an IPv6 network, or this machine.

    Args:
        family: the address's family.
        address: the address of a connection's other end, as returned by ``accept``.
    """
    if family == socket.AF_INET:
        return socket.inet_aton(address[0])
    if family == socket.AF_INET6:
        # Whoever has one IPv6 address has 2**64 of them.
        number = socket.inet_pton(socket.AF_INET6, address[0].partition("%")[0])
        return number[:_NETWORK_BYTES]
    return b"local"
