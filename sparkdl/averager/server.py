"""The averager: an Arrow Flight service in the driver that holds the center and runs rounds.

One worker is one long-lived Flight exchange, from joining to leaving:

    worker                               averager
    {"join": rank, "host": ...}  ------> wait for all ranks
                                 <------ initial center, chunk by chunk
    {"window": report}, chunks   ------> add in rank order, wait for the round
                                 <------ the reply, chunk by chunk
    ... a round a window ...
    {"finish": true}             ------>
    or {"failure": {...}}        ------> the run ends, with the worker's traceback
"""

from __future__ import annotations

import hmac
import logging
import queue
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
from torch import Tensor

from sparkdl.averager.codec import Codec
from sparkdl.averager.rounds import Event, Rounds
from sparkdl.averager.wire import SCHEMA, from_message, to_message, unpack_header
from sparkdl.errors import (
    DeadlineError,
    NonFiniteError,
    SparkDLError,
    TrainingError,
    WorkerError,
    WorkerLostError,
)
from sparkdl.events import WindowReport
from sparkdl.protocols import Layout

logger = logging.getLogger(__name__)

TOKEN_HEADER = "authorization"
SHUTDOWN_S = 10.0
"""Seconds to wait for workers' connections to end before the service is left to itself."""


@dataclass(frozen=True, slots=True)
class AveragerAddress:
    """Where the averager is and what opens it; travels to the workers with the task."""

    uri: str
    token: str = field(repr=False)


class Averager:
    """Serve rounds to ``world_size`` workers; a context manager that opens and closes the port.

    Args:
        layout: kinds and sizes of the replicas' state.
        center: the initial center, a tensor of ``center_dtype`` a segment; owned from here on.
        world_size: number of workers.
        codec: how values travel and how the mean becomes the center.
        host: interface to bind to, an address or name of this machine.
        advertised_host: the name under which workers reach it; ``host`` by default.
        deadline_s: the longest that anyone is waited for, in seconds.
    """

    def __init__(
        self,
        layout: Layout,
        center: Sequence[Tensor],
        world_size: int,
        codec: Codec,
        *,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        self._rounds = Rounds(layout, center, world_size, codec, deadline_s)
        token = secrets.token_urlsafe(32)
        self._service = _FlightService(self._rounds, codec, f"grpc://{host}:0", token)
        uri = f"grpc://{advertised_host or host}:{self._service.port}"
        self.address = AveragerAddress(uri, token)

    def __enter__(self) -> Averager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._rounds.fail(TrainingError("the driver closed the averager"))
        # Flight's shutdown waits for open exchanges without a limit of its own.
        closing = threading.Thread(
            target=self._service.shutdown, name="sparkdl-averager-shutdown", daemon=True
        )
        closing.start()
        closing.join(SHUTDOWN_S)
        if closing.is_alive():
            logger.warning(
                "a worker still holds its connection %.0f s after the end of the run", SHUTDOWN_S
            )

    @property
    def center(self) -> list[Tensor]:
        """The current center, a tensor of ``center_dtype`` a segment."""
        return self._rounds.center

    def fail(self, error: SparkDLError) -> None:
        """End the run from the driver's side; ``events`` then raises the error."""
        self._rounds.fail(error)

    def events(self) -> Iterator[Event]:
        """Yield windows and epochs as they are reported, until every worker has finished.

        Raises:
            WorkerError: the user's code raised on a worker.
            WorkerLostError: a worker's connection broke.
            DeadlineError: nothing was heard from any worker for ``deadline_s``.
        """
        while True:
            try:
                event = self._rounds.events.get(timeout=self._rounds.deadline_s)
            except queue.Empty:
                self._rounds.fail(
                    DeadlineError(
                        f"no worker reported anything for {self._rounds.deadline_s:.0f} s. If a "
                        "window of this model takes longer, raise the estimator's 'timeout'"
                    )
                )
                continue
            if self._rounds.failure is not None:
                raise self._rounds.failure
            if event is None:
                return
            yield event


class _FlightService(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, rounds: Rounds, codec: Codec, location: str, token: str) -> None:
        super().__init__(location, middleware={"token": _TokenCheck(token)})
        self._rounds = rounds
        self._codec = codec

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Serve one worker from joining to leaving."""
        rank, host = _read_join(descriptor)
        try:
            writer.begin(SCHEMA)
            self._rounds.join(rank, host)
            self._send(writer, self._rounds.center, kinds={"parameters", "buffers"})
            while (header := self._receive_header(reader)).get("finish") is None:
                report = _read_window(header, rank)
                reply = self._rounds.contribute(report, self._receive(reader))
                self._send(writer, reply)
                self._rounds.release()
            self._rounds.finish(rank)
        except TrainingError as error:
            self._rounds.fail(error)
            raise flight.FlightServerError(str(self._rounds.failure or error)) from error
        except (flight.FlightError, pa.ArrowException, StopIteration, OSError) as error:
            lost = WorkerLostError(
                f"the connection to rank {rank} on {host} broke in the middle of training "
                f"({type(error).__name__}: {error}). The executor's log says why; a process killed "
                "for memory needs more spark.executor.memoryOverhead"
            )
            self._rounds.fail(lost)
            raise

    def _receive(self, reader: flight.MetadataRecordBatchReader) -> Iterator[Tensor]:
        for chunk in self._rounds.chunks:
            message = reader.read_chunk()
            if message.app_metadata is not None:
                _raise_reported_failure(unpack_header(message.app_metadata))
            dtype = self._codec.wire_dtype(self._rounds.layout[chunk.segment])
            yield from_message(message.data, dtype, chunk.stop - chunk.start)

    def _receive_header(self, reader: flight.MetadataRecordBatchReader) -> dict[str, Any]:
        header = unpack_header(reader.read_chunk().app_metadata)
        _raise_reported_failure(header)
        return header

    def _send(
        self,
        writer: flight.MetadataRecordBatchWriter,
        segments: list[Tensor],
        kinds: set[str] | None = None,
    ) -> None:
        """Send segments; the initial center, chosen by ``kinds``, in full precision."""
        for chunk in self._rounds.chunks:
            segment = self._rounds.layout[chunk.segment]
            if kinds is None:
                dtype = self._codec.wire_dtype(segment)
            elif segment.kind in kinds:
                dtype = segment.dtype
            else:
                continue
            writer.write_batch(to_message(chunk.of(segments).to(dtype)))


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Let no call in that does not carry the job's token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> None:
        """Called by Flight before any method runs."""
        given = next((v[0] for k, v in headers.items() if k.lower() == TOKEN_HEADER), "")
        octets = given if isinstance(given, bytes) else str(given).encode()
        if not hmac.compare_digest(octets, self._expected):
            raise flight.FlightUnauthenticatedError("the call does not carry this job's token")


def _read_join(descriptor: flight.FlightDescriptor) -> tuple[int, str]:
    fields = unpack_header(pa.py_buffer(descriptor.command or b""))
    rank, host = fields.get("join"), fields.get("host")
    if not isinstance(rank, int) or not isinstance(host, str):
        raise flight.FlightServerError(f"an exchange starts with a rank and a host, not {fields}")
    return rank, host


def _read_window(header: dict[str, Any], rank: int) -> WindowReport:
    try:
        report = WindowReport(**header["window"])
    except (KeyError, TypeError) as error:
        raise TrainingError(f"rank {rank} sent a header that no worker sends: {header}") from error
    if report.rank != rank:
        raise TrainingError(f"rank {rank} sent a contribution in the name of rank {report.rank}")
    return report


def _raise_reported_failure(header: dict[str, Any]) -> None:
    failure = header.get("failure")
    if failure is None:
        return
    kind = NonFiniteError if failure.pop("non_finite") else WorkerError
    raise kind(failure.pop("message"), **failure)
