"""The averager: a service in the driver that holds the center and runs rounds.

One worker is one TCP connection, from joining to leaving (``connection.py`` has its form):

    worker                               averager
    {"join": rank, "host": ...,
     "attempt": of its task}     ------>
    {"reading": rows so far}     ------> now and then, while its rows arrive
    {"shard": what they are}     ------> wait for all ranks, and for the driver to look at it
                                 <------ {"waiting": true}, now and then
                                 <------ {"chunk_bytes": size of the largest message of values,
                                          "position": where to go on,
                                          "own_state": bytes of it, or null at the very start,
                                          "mean_weight": of a row, "shard_rows": by rank}
                                 <------ the center's parameters and buffers, chunk by chunk
                                 <------ unless at the very start: the rest of the center, and the
                                         worker's own state from the checkpoint
    {"gather": something small}  ------> wait for all ranks, whenever these agree to
                                 <------ {"gathered": [everyone's, by rank]}
    {"validation": report}       ------> after an epoch, from who has held-out rows
    {"window": report,
     "takes_reply": whether},
    chunks                       ------> add in rank order, wait for the round
                                 <------ {"waiting": true}, only after a last window, each round
                                 <------ {"checkpoint": true}, if this commit becomes one; with
                                         "now" in place of "waiting": send your own state at once
                                 <------ the reply, chunk by chunk, or {"committed": true}
    {"own_state": bytes}, bytes  ------> only if it becomes a checkpoint
                                 <------ or {"again": true}: a member of the round was lost;
    {"window": report}, chunks   ------> the same once more
    ... a round a window ...
    {"finish": true}             ------>
    or {"failure": {...}}        ------> the run ends, with the worker's traceback
    or {"broken": why}           ------> the run ends; it is the exchange among the workers

A worker that sends faster than its chunks can be added is held back by TCP itself.
A worker whose connection breaks may come back: it joins anew, and its training goes on behind its
last committed window. If the run ends elsewhere, the next thing that a worker hears is {"stopped":
reason}.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

import torch
from torch import Tensor

from sparkdl.averager.attendance import Event
from sparkdl.averager.codec import Codec
from sparkdl.averager.connection import Connection, ConnectionLostError, SilenceError
from sparkdl.averager.headers import (
    raise_reported_failure,
    read_join,
    read_own_state,
    read_shard,
    read_validation,
    read_window,
)
from sparkdl.averager.members import FencedError, Member, Tolerance
from sparkdl.averager.port import Port
from sparkdl.averager.progress import Progress
from sparkdl.averager.rounds import Rounds, StartOverError
from sparkdl.averager.saving import CheckpointPlan, Resumed, Saving
from sparkdl.errors import DeadlineError, SparkDLError, TrainingError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.protocols import Layout

logger = logging.getLogger(__name__)

_WAITING = {"waiting": True}
MAX_OWN_STATE_BYTES = 1 << 40
"""It goes to the checkpoint's storage block by block, so this bounds no memory."""
FAREWELL_S = 5.0
"""Seconds that a worker has to read why it was stopped."""


@dataclass(frozen=True, slots=True)
class AveragerAddress:
    """Where the averager is and what opens it; travels to the workers with the task."""

    uri: str
    """``tcp://host:port``"""
    token: str = field(repr=False)
    fingerprint: str | None = None
    """Of the certificate that it has to show; None if connections are not encrypted."""

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
        plan: which commits become checkpoints; none by default.
        resumed: the checkpoint with which this process began, if there was one.
        progress: how far the training of ``center`` has come; by default it starts.
        tolerance: what losses of workers the run survives; none by default.
        tls: whether connections are encrypted.
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
        plan: CheckpointPlan | None = None,
        resumed: Resumed | None = None,
        progress: Progress | None = None,
        tolerance: Tolerance | None = None,
        tls: bool = False,
    ) -> None:
        self._rounds = Rounds(
            layout,
            center,
            world_size,
            codec,
            deadline_s,
            progress=progress,
            plan=plan,
            tolerance=tolerance,
        )
        self._resumed = resumed
        token = secrets.token_urlsafe(32)
        self._codec = codec
        name = advertised_host or host
        self._port = Port(host, token, self._serve, advertised_host=name, encrypted=tls)
        name = f"[{name}]" if ":" in name else name
        uri = f"tcp://{name}:{self._port.number}"
        self.address = AveragerAddress(uri, token, self._port.fingerprint)

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
        self._rounds.close()

    @property
    def center(self) -> list[Tensor]:
        """The current center, a tensor of ``center_dtype`` a segment."""
        return self._rounds.center

    @property
    def history(self) -> list[EpochSummary]:
        """The epochs that have ended, those before a checkpoint included."""
        return self._rounds.history

    @property
    def progress(self) -> Progress:
        """How far the training of ``center`` has come."""
        return self._rounds.progress

    @property
    def losses(self) -> list[str]:
        """Which workers were lost so far, and why."""
        return self._rounds.losses

    @property
    def dropped(self) -> list[int]:
        """The rank of each worker that was dropped for its silence so far, in that order."""
        return self._rounds.dropped

    @property
    def anyone_joined(self) -> bool:
        """Whether a worker has ever joined."""
        return self._rounds.anyone_joined

    def postpone_deadline(self) -> None:
        """Begin anew to count the time in which workers have to join.

        For whoever starts them and knows that they are about to be started.
        """
        self._rounds.postpone_deadline()

    def start(self) -> None:
        """Let the workers train, now that the facts about their rows were found good."""
        self._rounds.start()

    def save_and_fail(self, reason: SparkDLError) -> None:
        """End the run with ``reason`` as soon as a commit has become a checkpoint."""
        self._rounds.save_and_fail(reason)

    def save_center(self) -> None:
        """After a failure, write a checkpoint of the last commit if that is not one yet."""
        self._rounds.save_center()

    def fail(self, error: SparkDLError) -> None:
        """End the run from the driver's side; ``events`` then raises the error."""
        self._rounds.fail(error)

    def events(self) -> Iterator[Event]:
        """Yield what is reported: the data's facts, then windows and epochs until all finished.

        The workers train only after ``start``, which has to follow the facts.

        Raises:
            WorkerError: the user's code raised on a worker.
            WorkerLostError: a worker's connection broke.
            CollectiveError: the exchange among the workers broke.
            DeadlineError: a worker that was waited for was silent for ``deadline_s``.
        """
        interval_s = min(1.0, self._rounds.deadline_s / 4)
        check_at = time.monotonic() + interval_s
        while True:
            if time.monotonic() >= check_at:
                check_at = time.monotonic() + interval_s
                try:
                    self._rounds.check_deadline()
                except DeadlineError as error:
                    self._rounds.fail(error)
            try:
                event = self._rounds.events.get(timeout=interval_s)
            except queue.Empty:
                continue
            if event is not None:
                yield event
            elif self._rounds.failure is not None:
                raise self._rounds.failure
            else:
                return

    def _serve(self, connection: Connection) -> None:
        """Serve one worker from joining to leaving; its thread runs this."""
        member: Member | None = None
        try:
            hello = connection.receive_header()
            raise_reported_failure(hello)
            member = self._rounds.join(*read_join(hello), connection.interrupt)
            _Session(member.rank, connection, self._rounds, self._codec, self._resumed).run()
        except FencedError as error:
            self._say_farewell(connection, error)
        except SparkDLError as error:
            self._rounds.fail(error)
            self._say_farewell(connection, self._rounds.failure or error)
        except (ConnectionLostError, SilenceError) as error:
            if member is None:
                logger.info("a worker left before it had joined: %s", error)
                return
            self._rounds.lose(
                member,
                f"ended its connection in the middle of training ({error}). The executor's log "
                "says why",
            )
        except Exception as error:  # a mistake of ours must not leave the driver waiting
            name = "a worker" if member is None else f"rank {member.rank}"
            self._rounds.fail(TrainingError(f"the averager's thread for {name}: {error!r}"))
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

    def __init__(
        self,
        rank: int,
        connection: Connection,
        rounds: Rounds,
        codec: Codec,
        resumed: Resumed | None,
    ) -> None:
        self._rank = rank
        self._connection = connection
        self._rounds = rounds
        self._codec = codec
        self._resumed = resumed
        self._scratch = torch.empty(rounds.chunk_bytes, dtype=torch.uint8)

    def run(self) -> None:
        """From reading rows to the last epoch."""
        rank, rounds = self._rank, self._rounds
        while "reading" in (header := self._next()):
            rounds.still_reading(rank)
        rounds.ready(rank, read_shard(header, rank), self._say_waiting)
        self._send_start()
        while not (header := self._next()).get("finish"):
            if "gather" in header:
                gathered = rounds.gather(rank, header["gather"], self._say_waiting)
                self._connection.send_header({"gathered": gathered})
            elif "validation" in header:
                rounds.validated(read_validation(header, rank))
            else:
                self._serve_round(read_window(header, rank), header.get("takes_reply") is not False)
        rounds.finish(rank)

    def _send_start(self) -> None:
        """Send the center, and from a checkpoint what only this worker knew."""
        rank, resumed, rounds = self._rank, self._resumed, self._rounds
        position = rounds.position(rank)
        own_state_bytes = None
        if resumed is not None and position == resumed.progress.positions[rank]:
            own_state_bytes = resumed.own_state_bytes(rank)
        elif rounds.begun:
            own_state_bytes = 0
        self._connection.send_header(
            {
                "chunk_bytes": rounds.chunk_bytes,
                "position": dataclasses.asdict(position),
                "own_state": own_state_bytes,
                "mean_weight": rounds.mean_weight,
                "shard_rows": rounds.shard_rows,
            }
        )
        self._send(rounds.center, kinds={"parameters", "buffers"})
        if own_state_bytes is not None:
            self._send(rounds.center, kinds={"optimizer"})
        if resumed is not None and own_state_bytes:
            with resumed.open_own_state(rank) as file:
                while block := bytearray(file.read(rounds.chunk_bytes)):
                    self._connection.send_values(torch.frombuffer(block, dtype=torch.uint8))
        rounds.release(rank)

    def _serve_round(self, report: WindowReport, takes_reply: bool) -> None:
        try:
            reply = self._rounds.contribute(
                report, self._receive, self._scratch, self._while_others_go_on
            )
        except StartOverError:
            self._connection.send_header({"again": True})
            return
        saving = self._rounds.saving_of(self._rank)
        if saving is not None:
            self._connection.send_header({"checkpoint": True})
        # Who was done early has missed rounds: the changes of the last one would not be enough.
        everything = {segment.kind for segment in self._rounds.layout}
        if takes_reply:
            self._send(reply, kinds=everything if report.last else None)
        else:
            self._connection.send_header({"committed": True})
        self._rounds.release(self._rank)
        if saving is not None:
            self._take_own_state(saving)

    def _take_own_state(self, saving: Saving) -> None:
        """Write the worker's own state into a checkpoint, which the last one completes."""
        size = read_own_state(self._next(), self._rank, MAX_OWN_STATE_BYTES)
        if saving.take(self._rank, self._blocks(size)):
            self._rounds.save(saving)

    def _blocks(self, size: int) -> Iterator[memoryview]:
        """The bytes that the worker sends next; each block is overwritten by the one after it."""
        for start in range(0, size, len(self._scratch)):
            block = self._scratch[: min(len(self._scratch), size - start)]
            self._receive(block)
            self._rounds.hear(self._rank)
            yield block.numpy().data

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

    def _while_others_go_on(self) -> None:
        """The worker is done with the epoch, and another round of it has ended."""
        saving = self._rounds.saving_of(self._rank)
        if saving is None:
            self._say_waiting()
        else:
            self._connection.send_header({"checkpoint": True, "now": True})
            self._take_own_state(saving)

    def _say_waiting(self) -> None:
        self._connection.send_header(_WAITING)
