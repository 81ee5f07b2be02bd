"""The averager: an Arrow Flight service in the driver that holds the center and runs rounds.

One worker is one long-lived Flight exchange, from joining to leaving:

    worker                               averager
    {"join": rank, "host": ...}  ------>
    {"reading": rows so far}     ------> now and then, while its rows arrive
    {"shard": what they are}     ------> wait for all ranks, and for the driver to look at it
                                 <------ {"waiting": true}, now and then
                                 <------ {"credit": chunks to send ahead}
                                 <------ initial center, chunk by chunk
    {"window": report}, chunks   ------> add in rank order, wait for the round
                                 <------ {"added": true}, once a chunk, while any needs credit
                                 <------ {"waiting": true}, only after a last window, each round
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

import pyarrow as pa
import pyarrow.flight as flight
from torch import Tensor

from sparkdl.averager.codec import Codec
from sparkdl.averager.headers import (
    raise_reported_failure,
    read_join,
    read_shard,
    read_window,
)
from sparkdl.averager.rounds import Event, Rounds
from sparkdl.averager.wire import (
    SCHEMA,
    credit_chunks,
    from_message,
    pack_header,
    to_message,
    unpack_header,
)
from sparkdl.errors import DeadlineError, SparkDLError, TrainingError, WorkerLostError
from sparkdl.events import WindowReport
from sparkdl.protocols import Layout

logger = logging.getLogger(__name__)

TOKEN_HEADER = "authorization"
_ADDED = pack_header({"added": True})
_WAITING = pack_header({"waiting": True})
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
        deadline_s: the longest that a worker may be silent while it is waited for, in seconds.
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

    def start(self) -> None:
        """Let the workers train, now that the facts about their rows were found good."""
        self._rounds.start()

    def fail(self, error: SparkDLError) -> None:
        """End the run from the driver's side; ``events`` then raises the error."""
        self._rounds.fail(error)

    def events(self) -> Iterator[Event]:
        """Yield what is reported: the data's facts, then windows and epochs until all finished.

        The workers train only after ``start``, which has to follow the facts.

        Raises:
            WorkerError: the user's code raised on a worker.
            WorkerLostError: a worker's connection broke.
            DeadlineError: a worker that was waited for was silent for ``deadline_s``.
        """
        interval_s = min(1.0, self._rounds.deadline_s / 4)
        while True:
            try:
                event = self._rounds.events.get(timeout=interval_s)
            except queue.Empty:
                try:
                    self._rounds.check_deadline()
                except DeadlineError as error:
                    self._rounds.fail(error)
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
        self._credit = credit_chunks(rounds.world_size)

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Serve one worker from joining to leaving."""
        rank, host = -1, "a worker"
        try:
            hello = unpack_header(pa.py_buffer(descriptor.command or b""))
            raise_reported_failure(hello)
            rank, host = read_join(hello)
            writer.begin(SCHEMA)
            self._rounds.join(rank, host)
            while "reading" in (header := unpack_header(_next(reader, rank).app_metadata)):
                self._rounds.still_reading(rank)
            self._rounds.ready(
                rank, read_shard(header, rank), lambda: writer.write_metadata(_WAITING)
            )
            writer.write_metadata(pack_header({"credit": self._credit}))
            self._send(writer, rank, self._rounds.center, kinds={"parameters", "buffers"})
            while not (header := unpack_header(_next(reader, rank).app_metadata)).get("finish"):
                self._serve_round(read_window(header, rank), reader, writer)
            self._rounds.finish(rank)
        except SparkDLError as error:
            self._rounds.fail(error)
            raise flight.FlightServerError(str(self._rounds.failure or error)) from error
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            self._rounds.fail(
                WorkerLostError(
                    f"the connection to rank {rank} on {host} broke in the middle of training "
                    f"({type(error).__name__}: {error}). The executor's log says why; a process "
                    "killed for memory needs more spark.executor.memoryOverhead"
                )
            )
            raise

    def _serve_round(
        self,
        report: WindowReport,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        def still_waiting() -> None:
            writer.write_metadata(_WAITING)

        values = self._receive(reader, writer, report.rank)
        reply = self._rounds.contribute(report, values, still_waiting)
        # Who was done early has missed rounds: the changes of the last one would not be enough.
        everything = {segment.kind for segment in self._rounds.layout}
        self._send(writer, report.rank, reply, kinds=everything if report.last else None)
        self._rounds.release(report.rank)

    def _receive(
        self,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
        rank: int,
    ) -> Iterator[Tensor]:
        """Yield a contribution's chunks, giving credit for another once one has been added."""
        chunks = self._rounds.chunks
        for index, chunk in enumerate(chunks):
            message = _next(reader, rank)
            dtype = self._codec.wire_dtype(self._rounds.layout[chunk.segment])
            yield from_message(message.data, dtype, chunk.stop - chunk.start)
            if index + self._credit < len(chunks):
                writer.write_metadata(_ADDED)

    def _send(
        self,
        writer: flight.MetadataRecordBatchWriter,
        rank: int,
        segments: list[Tensor],
        kinds: set[str] | None,
    ) -> None:
        """Send the center's segments of some kinds as they are, or all as the codec has it."""
        for chunk in self._rounds.chunks:
            segment = self._rounds.layout[chunk.segment]
            if kinds is not None and segment.kind not in kinds:
                continue
            dtype = self._codec.wire_dtype(segment) if kinds is None else segment.center_dtype
            writer.write_batch(to_message(chunk.of(segments).to(dtype)))
            self._rounds.hear(rank)


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


def _next(reader: flight.MetadataRecordBatchReader, rank: int) -> flight.FlightStreamChunk:
    """The worker's next message, unless it says that the worker failed."""
    try:
        message = reader.read_chunk()
    except StopIteration:
        raise WorkerLostError(
            f"rank {rank} ended its connection in the middle of training. The executor's log says "
            "why"
        ) from None
    if message.app_metadata is not None:
        raise_reported_failure(unpack_header(message.app_metadata))
    return message
