"""A worker's end of the averager: one Flight exchange from joining to leaving."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import torch
from torch import Tensor

from sparkdl.averager.allocator import keep_freed_memory
from sparkdl.averager.codec import Codec
from sparkdl.averager.headers import failure_header, shard_header, window_header
from sparkdl.averager.server import TOKEN_HEADER, AveragerAddress
from sparkdl.averager.wire import (
    SCHEMA,
    Chunk,
    from_message,
    pack_header,
    plan_chunks,
    to_message,
    unpack_header,
)
from sparkdl.errors import DeadlineError, NonFiniteError, StoppedError, WorkerError
from sparkdl.events import WindowReport
from sparkdl.feed.facts import ShardFacts
from sparkdl.protocols import Layout, Segment

logger = logging.getLogger(__name__)

KEPT_BYTES = 256 << 20
"""What a worker keeps of freed memory; a reply on its way fits in it."""
READING_S = 0.5
"""Seconds between two signs of life while a worker reads its rows."""


class AveragerClient:
    """Connect one worker to the averager; a context manager.

    Args:
        address: where the averager is, with the job's token.
        rank: this worker's rank.
        codec: how values travel, the same as the averager's.
        deadline_s: the longest that the averager lets a worker be silent, in seconds. It judges
            whom it waits for; this end takes the averager for lost after twice that time.

    Raises:
        StoppedError: the averager cannot be reached or has ended the run.
    """

    def __init__(
        self, address: AveragerAddress, rank: int, codec: Codec, *, deadline_s: float = 600.0
    ) -> None:
        keep_freed_memory(KEPT_BYTES)
        self.rank = rank
        self._codec = codec
        self._base: list[Tensor] = []
        self._credit = 1
        self._reported_reading = time.monotonic()
        hello = {"join": rank, "host": socket.gethostname()}
        self._connection = _Connection(address, hello, rank, 2 * deadline_s)

    def __enter__(self) -> AveragerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close(abandon=error is not None)

    def report_reading(self, rows: int) -> None:
        """Say, but not too often, that this worker is still reading its rows.

        Args:
            rows: how many it has read so far.
        """
        now = time.monotonic()
        if now - self._reported_reading >= READING_S:
            self._reported_reading = now
            self._connection.send_header({"reading": rows})

    def start(self, shard: ShardFacts, segments: Sequence[Tensor], layout: Layout) -> None:
        """Wait until every worker is ready, then overwrite the replica with the initial center.

        Args:
            shard: what this worker found in its rows, for the driver to look at.
            segments: parameters and buffers of the replica, written in place.
            layout: their kinds and sizes.
        """
        state = list(segments)
        self._extend_base(state, layout)
        self._connection.send_header(shard_header(shard))
        while "credit" not in (header := self._connection.receive_header()):
            pass
        self._credit = int(header["credit"])
        self._receive_center(state, layout, plan_chunks(layout))

    def exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        """Take part in one round; see ``protocols.CenterExchange``."""
        state = list(segments)
        layout = tuple(Segment("state", tensor.dtype, tensor.numel()) for tensor in state)
        chunks = plan_chunks(layout)
        self._extend_base(state, layout)
        self._connection.send_header(window_header(window))
        if window.examples:
            for index, chunk in enumerate(chunks):
                if index >= self._credit:
                    self._connection.receive_header()
                self._send(chunk, state, layout[chunk.segment], window)
        if window.last:
            self._receive_center(state, layout, chunks)
            return
        for chunk in chunks:
            segment, target = layout[chunk.segment], chunk.of(state)
            reply = self._receive(self._codec.wire_dtype(segment), len(target))
            self._codec.decode(reply, target, self._base_of(chunk), segment)

    def finish(self) -> None:
        """Leave the run after the last epoch."""
        self._connection.send_last({"finish": True})

    def report_failure(self, error: WorkerError) -> None:
        """End the run for everyone, with this worker's error as the reason."""
        self._connection.send_last(failure_header(error))

    def _receive_center(self, state: list[Tensor], layout: Layout, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            target, base = chunk.of(state), self._base_of(chunk)
            center = self._receive(layout[chunk.segment].center_dtype, len(target))
            target.copy_(center)
            if base is not None:
                base.copy_(center)

    def _extend_base(self, state: list[Tensor], layout: Layout) -> None:
        """Start the last center at zero, as the averager does, for state that was not there yet."""
        if self._codec.keeps_base:
            for tensor, segment in list(zip(state, layout, strict=True))[len(self._base) :]:
                self._base.append(torch.zeros_like(tensor, dtype=segment.center_dtype))

    def _base_of(self, chunk: Chunk) -> Tensor | None:
        return chunk.of(self._base) if self._base else None

    def _send(
        self, chunk: Chunk, state: list[Tensor], segment: Segment, window: WindowReport
    ) -> None:
        values = chunk.of(state)
        # The sum is finite only if every value is (but for overflow, hence the second look); it
        # costs little while the chunk is about to be read by the socket anyway.
        if segment.averaged and not math.isfinite(values.sum().item()):
            bad = int((~torch.isfinite(values)).sum())
            if bad:
                raise NonFiniteError(
                    f"rank {self.rank} has {bad} NaN or infinite values among its parameters, "
                    f"buffers or optimizer state after epoch {window.epoch}, step {window.step} "
                    f"(mean loss of the window: {window.loss_sum / window.examples:.6g}). Lower "
                    "the learning rate, clip gradients, or look for bad values in the features",
                    rank=self.rank,
                    epoch=window.epoch,
                    step=window.step,
                )
        encoded = self._codec.encode(values, self._base_of(chunk), segment)
        self._connection.send(to_message(encoded.to("cpu")))

    def _receive(self, dtype: torch.dtype, numel: int) -> Tensor:
        return from_message(self._connection.receive(), dtype, numel)


def report_start_failure(address: AveragerAddress, error: WorkerError) -> None:
    """End the run from a worker that could not even start, and so does not join.

    Args:
        address: where the averager is, with the job's token.
        error: why the worker could not start.

    Raises:
        StoppedError: always; the averager ends the run.
    """
    connection = _Connection(address, failure_header(error), error.rank, 60.0)
    try:
        connection.send_last({})
    finally:
        connection.close(abandon=True)


class _Connection:
    """The Flight exchange itself, with a deadline for each message."""

    def __init__(
        self, address: AveragerAddress, hello: dict[str, Any], rank: int, deadline_s: float
    ) -> None:
        self._rank = rank
        self._client = flight.FlightClient(address.uri)
        options = flight.FlightCallOptions(
            headers=[(TOKEN_HEADER.encode(), f"Bearer {address.token}".encode())]
        )
        descriptor = flight.FlightDescriptor.for_command(pack_header(hello).to_pybytes())
        try:
            self._writer, self._reader = self._client.do_exchange(descriptor, options)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            self._client.close()
            raise StoppedError(
                f"rank {rank} cannot reach the averager at {address.uri}: {error}"
            ) from error
        self._watchdog = _Watchdog(self._reader.cancel, deadline_s)
        try:
            with self._watched():
                self._writer.begin(SCHEMA)
        except BaseException:
            self.close(abandon=True)
            raise

    def send_header(self, header: dict[str, Any]) -> None:
        with self._watched():
            self._writer.write_metadata(pack_header(header))

    def send(self, message: pa.RecordBatch) -> None:
        with self._watched():
            self._writer.write_batch(message)

    def receive(self) -> pa.RecordBatch:
        """The next message with data; headers in between say that the averager is alive."""
        while True:
            with self._watched():
                chunk = self._reader.read_chunk()
            if chunk.data is not None:
                return chunk.data

    def receive_header(self) -> dict[str, Any]:
        """The next message, which is a header."""
        with self._watched():
            return unpack_header(self._reader.read_chunk().app_metadata)

    def send_last(self, header: dict[str, Any]) -> None:
        """Send a header and wait for the averager to end the exchange.

        Leaving before it has would look like a crash.
        """
        with self._watched():
            self._writer.write_metadata(pack_header(header))
            self._writer.done_writing()
        try:
            while True:
                with self._watched(ends=True):
                    self._reader.read_chunk()
        except _Ended:
            return

    def close(self, *, abandon: bool) -> None:
        self._watchdog.stop()
        if abandon:
            self._reader.cancel()
        try:
            self._writer.close()
        except pa.ArrowException as error:
            # The averager ended the exchange first; whoever has to know has been told.
            logger.debug("rank %d closed a connection that had ended: %s", self._rank, error)
        finally:
            self._client.close()

    @contextmanager
    def _watched(self, *, ends: bool = False) -> Iterator[None]:
        """Limit the time of one message, and turn a broken exchange into an error of ours."""
        self._watchdog.arm()
        try:
            yield
        except StopIteration as end:
            if ends:
                raise _Ended from end
            raise StoppedError(f"the averager ended its exchange with rank {self._rank}") from end
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            if self._watchdog.fired:
                raise DeadlineError(
                    f"rank {self._rank} heard nothing from the averager for "
                    f"{self._watchdog.deadline_s:g} s"
                ) from error
            raise StoppedError(f"rank {self._rank} was stopped by the averager: {error}") from error
        finally:
            self._watchdog.disarm()


class _Ended(Exception):
    """The averager ended the exchange, as it should."""


class _Watchdog:
    """Cancel the exchange when a message is overdue; Flight has no deadline for a single one."""

    def __init__(self, cancel: Callable[[], None], deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.fired = False
        self._cancel = cancel
        self._due = math.inf
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sparkdl-watchdog", daemon=True)
        self._thread.start()

    def arm(self) -> None:
        self._due = time.monotonic() + self.deadline_s

    def disarm(self) -> None:
        self._due = math.inf

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(min(0.5, self.deadline_s / 4)):
            if time.monotonic() > self._due:
                self.fired = True
                self._cancel()
                return
