"""The averager: a service in the driver that holds the center and runs rounds.

One worker is one TCP connection, from joining to leaving (``connection.py`` has its form):

    worker                               averager
    {"join": rank, "host": ...}  ------>
    {"reading": rows so far}     ------> now and then, while its rows arrive
    {"shard": what they are}     ------> wait for all ranks, and for the driver to look at it
                                 <------ {"waiting": true}, now and then
                                 <------ {"chunk_bytes": size of the largest message of values}
                                 <------ initial center, chunk by chunk
    {"gather": something small}  ------> wait for all ranks, whenever these agree to
                                 <------ {"gathered": [everyone's, by rank]}
    {"window": report}, chunks   ------> add in rank order, wait for the round
                                 <------ {"waiting": true}, only after a last window, each round
                                 <------ the reply, chunk by chunk
    ... a round a window ...
    {"finish": true}             ------>
    or {"failure": {...}}        ------> the run ends, with the worker's traceback

A worker that sends faster than its chunks can be added is held back by TCP itself.
If the run ends elsewhere, the next thing that a worker hears is {"stopped": reason}.
"""

from __future__ import annotations

import logging
import queue
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

import torch
from torch import Tensor

from sparkdl.averager.codec import Codec
from sparkdl.averager.connection import Connection, ConnectionLostError, SilenceError
from sparkdl.averager.headers import (
    raise_reported_failure,
    read_join,
    read_shard,
    read_window,
)
from sparkdl.averager.port import Port
from sparkdl.averager.rounds import Event, Rounds
from sparkdl.errors import DeadlineError, SparkDLError, TrainingError, WorkerLostError
from sparkdl.events import WindowReport
from sparkdl.protocols import Layout

logger = logging.getLogger(__name__)

_WAITING = {"waiting": True}
FAREWELL_S = 5.0
"""Seconds that a worker has to read why it was stopped."""


@dataclass(frozen=True, slots=True)
class AveragerAddress:
    """Where the averager is and what opens it; travels to the workers with the task."""

    uri: str
    """``tcp://host:port``"""
    token: str = field(repr=False)

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The parts of ``uri``."""
        parts = urlsplit(self.uri)
        return parts.hostname or "", parts.port or 0


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
        self._codec = codec
        self._port = Port(host, token, self._serve)
        name = advertised_host or host
        name = f"[{name}]" if ":" in name else name
        self.address = AveragerAddress(f"tcp://{name}:{self._port.number}", token)

    def __enter__(self) -> Averager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._rounds.fail(TrainingError("the driver closed the averager"))
        self._port.close()

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

    def _serve(self, connection: Connection) -> None:
        """Serve one worker from joining to leaving; its thread runs this."""
        rank, host = -1, "a worker"
        try:
            hello = connection.receive_header()
            raise_reported_failure(hello)
            rank, host = read_join(hello)
            self._rounds.join(rank, host)
            _Session(rank, connection, self._rounds, self._codec).run()
        except SparkDLError as error:
            self._rounds.fail(error)
            self._say_farewell(connection, self._rounds.failure or error)
        except (ConnectionLostError, SilenceError) as error:
            self._rounds.fail(
                WorkerLostError(
                    f"the connection to rank {rank} on {host} ended in the middle of training "
                    f"({error}). The executor's log says why; a process killed for memory needs "
                    "more spark.executor.memoryOverhead"
                )
            )
        except Exception as error:  # a mistake of ours must not leave the driver waiting
            self._rounds.fail(TrainingError(f"the averager's thread for rank {rank}: {error!r}"))
            raise

    @staticmethod
    def _say_farewell(connection: Connection, reason: SparkDLError) -> None:
        try:
            connection.send_header({"stopped": str(reason)})
            connection.close_after(FAREWELL_S)
        except (ConnectionLostError, SilenceError) as error:
            logger.debug("a worker left before it was told why: %s", error)


class _Session:
    """One worker that has joined."""

    def __init__(self, rank: int, connection: Connection, rounds: Rounds, codec: Codec) -> None:
        self._rank = rank
        self._connection = connection
        self._rounds = rounds
        self._codec = codec
        self._scratch = torch.empty(rounds.chunk_bytes, dtype=torch.uint8)

    def run(self) -> None:
        """From reading rows to the last epoch."""
        rank, rounds = self._rank, self._rounds
        while "reading" in (header := self._next()):
            rounds.still_reading(rank)
        rounds.ready(rank, read_shard(header, rank), self._say_waiting)
        self._connection.send_header({"chunk_bytes": rounds.chunk_bytes})
        self._send(rounds.center, kinds={"parameters", "buffers"})
        while not (header := self._next()).get("finish"):
            if "gather" in header:
                gathered = rounds.gather(rank, header["gather"], self._say_waiting)
                self._connection.send_header({"gathered": gathered})
            else:
                self._serve_round(read_window(header, rank))
        rounds.finish(rank)

    def _serve_round(self, report: WindowReport) -> None:
        reply = self._rounds.contribute(report, self._receive, self._scratch, self._say_waiting)
        # Who was done early has missed rounds: the changes of the last one would not be enough.
        everything = {segment.kind for segment in self._rounds.layout}
        self._send(reply, kinds=everything if report.last else None)
        self._rounds.release(self._rank)

    def _next(self) -> dict[str, object]:
        """The worker's next header, unless it says that the worker failed."""
        header = self._connection.receive_header()
        raise_reported_failure(header)
        return header

    def _receive(self, into: Tensor) -> None:
        header = self._connection.receive_values(into)
        if header is not None:
            raise_reported_failure(header)
            raise TrainingError(f"rank {self._rank} sent a header in the middle of its values")

    def _send(self, segments: list[Tensor], kinds: set[str] | None) -> None:
        """Send the center's segments of some kinds as they are, or all as the codec has it."""
        for chunk in self._rounds.chunks:
            segment = self._rounds.layout[chunk.segment]
            if kinds is not None and segment.kind not in kinds:
                continue
            dtype = self._codec.wire_dtype(segment) if kinds is None else segment.center_dtype
            self._connection.send_values(chunk.of(segments).to(dtype))
            self._rounds.hear(self._rank)

    def _say_waiting(self) -> None:
        self._connection.send_header(_WAITING)
