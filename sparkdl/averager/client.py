"""A worker's end of the averager: one Flight exchange from joining to leaving."""

from __future__ import annotations

import dataclasses
import math
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import torch
from torch import Tensor

from sparkdl.averager.codec import Codec
from sparkdl.averager.server import TOKEN_HEADER, AveragerAddress
from sparkdl.averager.wire import (
    SCHEMA,
    Chunk,
    from_message,
    pack_header,
    plan_chunks,
    to_message,
)
from sparkdl.errors import DeadlineError, NonFiniteError, StoppedError, WorkerError
from sparkdl.events import WindowReport
from sparkdl.protocols import Layout, Segment


class AveragerClient:
    """Connect one worker to the averager; a context manager.

    Args:
        address: where the averager is, with the job's token.
        rank: this worker's rank.
        codec: how values travel, the same as the averager's.
        deadline_s: the longest that the averager's answer is waited for, in seconds.

    Raises:
        StoppedError: the averager cannot be reached or has ended the run.
    """

    def __init__(
        self, address: AveragerAddress, rank: int, codec: Codec, *, deadline_s: float = 600.0
    ) -> None:
        self.rank = rank
        self._codec = codec
        self._deadline_s = deadline_s
        self._base: list[Tensor] | None = None
        self._client = flight.FlightClient(address.uri)
        options = flight.FlightCallOptions(
            headers=[(TOKEN_HEADER.encode(), f"Bearer {address.token}".encode())]
        )
        hello = pack_header({"join": rank, "host": socket.gethostname()}).to_pybytes()
        descriptor = flight.FlightDescriptor.for_command(hello)
        with self._connection():
            self._writer, self._reader = self._client.do_exchange(descriptor, options)
            self._writer.begin(SCHEMA)
        self._watchdog = _Watchdog(self._reader.cancel)

    def __enter__(self) -> AveragerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watchdog.stop()
        if error is not None:
            self._reader.cancel()
        try:
            self._writer.close()
        except pa.ArrowException:
            # The averager ended the exchange first; whoever has to know has been told.
            pass
        finally:
            self._client.close()

    def receive_center(self, segments: Sequence[Tensor], layout: Layout) -> None:
        """Wait until every worker has joined, then overwrite the replica with the initial center.

        Args:
            segments: parameters and buffers of the replica, written in place.
            layout: their kinds and sizes.
        """
        with self._connection("the other workers to start"):
            for chunk in plan_chunks(layout):
                target = chunk.of(list(segments))
                target.copy_(self._read(layout[chunk.segment].dtype, len(target)))
        if self._codec.keeps_base:
            self._base = [s.to(layout[i].center_dtype, copy=True) for i, s in enumerate(segments)]

    def exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        """Take part in one round; see ``protocols.CenterExchange``."""
        state = list(segments)
        layout = tuple(Segment("", s.dtype, s.numel()) for s in state)
        base = self._base_for(state, layout)
        chunks = plan_chunks(layout)
        with self._connection(f"the end of the round after step {window.step}"):
            self._writer.write_metadata(pack_header({"window": dataclasses.asdict(window)}))
            if window.examples:
                for chunk in chunks:
                    self._send(chunk, state, base, layout[chunk.segment], window)
            for chunk in chunks:
                segment = layout[chunk.segment]
                target = chunk.of(state)
                reply = self._read(self._codec.wire_dtype(segment), len(target))
                self._codec.decode(reply, target, chunk.of(base) if base else None, segment)

    def finish(self) -> None:
        """Leave the run after the last epoch."""
        with self._connection():
            self._writer.write_metadata(pack_header({"finish": True}))
            self._writer.done_writing()
            # The averager answers by ending the stream; leaving before would look like a crash.
            while True:
                try:
                    self._reader.read_chunk()
                except StopIteration:
                    return

    def report_failure(self, error: WorkerError) -> None:
        """End the run for everyone, with this worker's error as the reason."""
        failure: dict[str, Any] = {
            "message": str(error),
            "non_finite": isinstance(error, NonFiniteError),
            "rank": error.rank,
            "epoch": error.epoch,
            "step": error.step,
            "worker_traceback": error.worker_traceback,
        }
        with self._connection("the averager to take note of a failure"):
            self._writer.write_metadata(pack_header({"failure": failure}))
            self._writer.done_writing()
            while True:
                self._reader.read_chunk()

    def _base_for(self, state: list[Tensor], layout: Layout) -> list[Tensor] | None:
        """The last center, which starts at zero for optimizer state: it appears after step one."""
        if not self._codec.keeps_base:
            return None
        base = self._base or []
        for tensor, segment in list(zip(state, layout, strict=True))[len(base) :]:
            base.append(torch.zeros_like(tensor, dtype=segment.center_dtype))
        self._base = base
        return base

    def _send(
        self,
        chunk: Chunk,
        state: list[Tensor],
        base: list[Tensor] | None,
        segment: Segment,
        window: WindowReport,
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
        encoded = self._codec.encode(values, chunk.of(base) if base else None, segment)
        self._writer.write_batch(to_message(encoded.to("cpu")))

    def _read(self, dtype: torch.dtype, numel: int) -> Tensor:
        return from_message(self._reader.read_chunk().data, dtype, numel)

    @contextmanager
    def _connection(self, waiting_for: str | None = None) -> Iterator[None]:
        """Turn a broken or overdue exchange into an error of ours."""
        if waiting_for is not None:
            self._watchdog.arm(self._deadline_s)
        try:
            yield
        except (flight.FlightError, pa.ArrowException, StopIteration, OSError) as error:
            if waiting_for is not None and self._watchdog.fired:
                raise DeadlineError(
                    f"rank {self.rank} waited {self._deadline_s:.0f} s for {waiting_for}"
                ) from error
            raise StoppedError(f"rank {self.rank} was stopped by the averager: {error}") from error
        finally:
            if waiting_for is not None:
                self._watchdog.disarm()


class _Watchdog:
    """Cancel the exchange when an answer is overdue; Flight has no deadline for a single read."""

    def __init__(self, cancel: Any) -> None:
        self.fired = False
        self._cancel = cancel
        self._due = math.inf
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sparkdl-watchdog", daemon=True)
        self._thread.start()

    def arm(self, seconds: float) -> None:
        self._due = time.monotonic() + seconds

    def disarm(self) -> None:
        self._due = math.inf

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.5):
            if time.monotonic() > self._due:
                self.fired = True
                self._cancel()
                return
