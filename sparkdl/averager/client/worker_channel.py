"""A worker's connection to the averager, and what it tells about where its time goes.

Failures of the connection become our errors and name the rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sparkdl.averager.messages.headers import phases_header
from sparkdl.errors import DeadlineError, DisconnectedError, StoppedError
from sparkdl.phases import PhaseClock
from sparkdl.transport.connecting import ServiceAddress, introduced
from sparkdl.transport.connection import ConnectionLostError, SilenceError


class WorkerChannel:
    """A proved connection of a worker's; used by one thread.

    Args:
        address: where the averager is, with the job's token.
        rank: the worker's.
        deadline_s: how long the averager may be silent before it counts as gone, in seconds.

    Raises:
        DisconnectedError: the averager cannot be reached; also raised by all methods if it is lost.
        DeadlineError: it says nothing for ``deadline_s``; also raised by all methods.
        StoppedError: it is another job's or, when receiving, it has ended the run.
    """

    def __init__(self, address: ServiceAddress, rank: int, deadline_s: float) -> None:
        self._rank = rank
        self._deadline_s = deadline_s
        self._connection = introduced(
            rank,
            f"the averager at {address.uri}",
            address.host_and_port,
            address.token,
            address.fingerprint,
            deadline_s,
        )

    def send_header(self, fields: Mapping[str, Any]) -> None:
        """Send a JSON object."""
        with self._named():
            self._connection.send_header(fields)

    def send_values(self, values: Tensor, header: Mapping[str, Any] | None = None) -> None:
        """Send a contiguous 1-D tensor on the CPU, behind a header if there is one."""
        with self._named():
            self._connection.send_values(values, header)

    def send_octets(self, octets: bytes, block_bytes: int) -> None:
        """Send bytes other than values, in messages of at most ``block_bytes``."""
        for block in blocks(octets, block_bytes):
            self.send_values(block)

    def receive_octets(self, size: int, block_bytes: int) -> bytes:
        """Receive ``size`` bytes other than values, in messages of at most ``block_bytes``."""
        octets = torch.empty(size, dtype=torch.uint8)
        for start in range(0, size, block_bytes):
            self.receive_values(octets[start : start + block_bytes])
        return octets.numpy().tobytes()

    def receive_header(self) -> dict[str, Any]:
        """The next header that is more than a heartbeat."""
        while True:
            with self._named():
                header = self._connection.receive_header()
            if self._says_more(header):
                return header

    def receive_values(self, into: Tensor) -> dict[str, Any] | None:
        """The next values, or the header before them if it is more than a heartbeat."""
        while True:
            with self._named():
                header = self._connection.receive_values(into)
            if header is None or self._says_more(header):
                return header

    def receive_packed(self, into: Tensor, *, varies: bool) -> Tensor | dict[str, Any]:
        """The next values, or the header before them if it is more than a heartbeat.

        Args:
            into: room for them.
            varies: whether there may be fewer values.
        """
        while True:
            if not varies:
                header = self.receive_values(into)
                return into if header is None else header
            with self._named():
                came = self._connection.receive_up_to(into)
            if isinstance(came, Tensor) or self._says_more(came):
                return came

    def send_last(self, header: dict[str, Any]) -> None:
        """Send a header and wait for the averager to close the connection.

        Leaving before it has would look like a crash.
        """
        self.send_header(header)
        self._connection.close_after(self._deadline_s)

    def break_off(self) -> None:
        """End the connection from any thread, waking whoever waits on it."""
        self._connection.interrupt()

    def close(self) -> None:
        """Close at once."""
        self._connection.close()

    def _says_more(self, header: dict[str, Any]) -> bool:
        if "stopped" in header:
            raise StoppedError(
                f"rank {self._rank} was stopped by the averager: {header['stopped']}"
            )
        return "waiting" not in header

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except SilenceError as error:
            raise DeadlineError(
                f"rank {self._rank} received nothing from the averager for {self._deadline_s:g} s"
            ) from error
        except ConnectionLostError as error:
            raise DisconnectedError(f"rank {self._rank} lost the averager: {error}") from error


class Entry:
    """Whether this worker must wait before it may contribute: its first window, each, or none.

    Attributes:
        in_step: whether rounds are of everyone, so that it never has to.
    """

    def __init__(self) -> None:
        self.in_step = True
        self._due = self._each = False

    def begin(self, *, first: bool, each: bool) -> None:
        """Take note of what the averager says about it.

        Args:
            first: whether others may hold up this worker's first window.
            each: whether they may hold up any window.
        """
        self.in_step = not (first or each)
        self._due, self._each = first or each, each

    def wait(self, channel: WorkerChannel, note: Callable[[dict[str, Any]], None]) -> None:
        """Wait until others let this worker contribute the window that it has announced.

        They may take longer than the averager can go without reading what is sent to it.

        Args:
            channel: to the averager.
            note: called with any other headers that come first.
        """
        while self._due:
            header = channel.receive_header()
            if "enter" not in header:
                note(header)
                continue
            self._due = False
        self._due = self._each


def blocks(octets: bytes, size: int) -> list[Tensor]:
    """Bytes as messages of at most ``size`` each; empty for no bytes."""
    if not octets:
        return []
    values = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
    return [values[start : start + size] for start in range(0, len(values), size)]


TELLING_S = 0.25
"""Seconds between reports in the middle of an epoch: writing, reading and adding up one takes half
a millisecond, which is nothing per window and too much per step."""
COMPARISONS = 4
"""How often the clocks are compared when a worker joins; the fastest answer counts."""


class TimeReports:
    """One worker's times that have not been reported to the driver yet.

    Args:
        clock: counts them; None for no reports.

    Attributes:
        clock: as given, or one that nobody reads.
    """

    def __init__(self, clock: PhaseClock | None) -> None:
        self.clock = PhaseClock() if clock is None else clock
        self._tells = clock is not None

    @property
    def due(self) -> bool:
        """Whether it is time for a report in the middle of an epoch."""
        return self.clock.untold_s >= TELLING_S

    def header(self) -> dict[str, Any]:
        """Fields for the next header to be sent; none if nothing is reported."""
        return phases_header(self.clock.take()) if self._tells else {}

    def compare_clocks(self, channel: WorkerChannel) -> None:
        """Compare the driver's clock with this process's."""
        if not self._tells:
            return
        self.clock.forget_comparison()
        for _ in range(COMPARISONS):
            asked = time.monotonic()
            channel.send_header({"clock": True})
            theirs = float(channel.receive_header()["clock"])
            self.clock.compare(asked, theirs, time.monotonic())
