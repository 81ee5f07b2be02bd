"""A worker's end of the averager: one connection from joining to leaving."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from itertools import chain, repeat
from typing import Any, TypeVar

from torch import Tensor

from sparkdl.averager.headers import (
    failure_header,
    join_header,
    require_share_of_states,
    shard_header,
    window_header,
)
from sparkdl.averager.run_events import Position
from sparkdl.averager.time_reports import TimeReports
from sparkdl.averager.values.replica_codec import ReplicaChunk, ReplicaCodec
from sparkdl.averager.values.wire_format import Packing, WireFormat
from sparkdl.errors import CollectiveError, StoppedError, TrainingError, WorkerError
from sparkdl.events import ValidationReport, WindowReport
from sparkdl.feed.shards import ShardStatistics
from sparkdl.phases import EXCHANGE, IDLE, WAIT, PhaseClock
from sparkdl.protocols import Layout, SpreadValues
from sparkdl.transport.connecting import ServiceAddress, reach
from sparkdl.transport.connection import Connection
from sparkdl.transport.daemon_pool import DaemonPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

RECONNECT_S = 5.0
"""Seconds for which a worker tries to reach the averager again after losing it."""
HEARTBEAT_S = 0.5
"""Seconds between heartbeats of a worker that is reading its rows, or training for long."""


class AveragerClient:
    """Connect one worker to the averager; a context manager.

    Args:
        address: where the averager is, with the job's token.
        rank: this worker's rank.
        wire_format: how values travel, as on the averager.
        deadline_s: the longest for which the averager lets a worker be silent, in seconds. The
            averager judges the workers that it waits for; this end considers the averager lost
            after twice that time.
        worker_state: called for a checkpoint; returns the part of this worker's state that is not
            in the center.
        attempt: the Spark task's attempt; a later one replaces an earlier one.
        task: the task's number, if several workers may share it.
        restart_state: called for every contribution; returns what to keep of this worker in case
            all restart from that commit. None for nothing.
        frozen: the fingerprint of the parameters that are not part of the center.
        fragments: how many parts of the state the rounds exchange in turn, as on the averager.
        clock: counts where this worker's time goes, to be reported to the driver; None for no
            reports.
        now: reads the time, in seconds, by which a heartbeat is due.

    Attributes:
        closed_epoch: the last epoch whose last window this worker has exchanged; 0 if none.
        next_fragment: which part of the state the next round exchanges, counted from 0.
        commit_wanted: whether the driver asked everyone to commit in the last gather.
        resumes: whether the training resumes from a checkpoint; known after ``start``.

    Raises:
        DisconnectedError: the averager cannot be reached within ``deadline_s``.
        StoppedError: the averager belongs to another job.
    """

    def __init__(
        self,
        address: ServiceAddress,
        rank: int,
        wire_format: WireFormat,
        *,
        deadline_s: float = 600.0,
        worker_state: Callable[[], bytes] = bytes,
        attempt: int = 0,
        task: int | None = None,
        restart_state: Callable[[], bytes] | None = None,
        frozen: str = "",
        fragments: int = 1,
        clock: PhaseClock | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.closed_epoch = 0
        self.next_fragment = 0
        self.commit_wanted = False
        self._times = TimeReports(clock)
        self._clock = self._times.clock
        self._background = DaemonPool(1, "sparkdl-round")
        self._under_way: Future[list[Tensor]] | None = None
        self._overlapped: WindowReport
        self._notes: list[dict[str, Any]] | None = None
        self._codec = ReplicaCodec(wire_format, fragments)
        self._worker_state = worker_state
        self._restart_state = restart_state
        self._checkpoint_due = False
        self._now = now
        self._heartbeat = now()
        self._epoch_losses: list[float] = []
        self._address = address
        self._deadline_s = deadline_s
        self._hello = join_header(rank, attempt, task, frozen)
        # The driver waits as long for its workers to start.
        self._own_connection = reach(self._connect, deadline_s)

    def __enter__(self) -> AveragerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._background.close()

    def reconnect(self) -> None:
        """Rejoin after the connection broke; ``start`` has to follow.

        Raises:
            StoppedError: the averager cannot be reached, or no longer wants this worker.
        """
        self._close()
        self._checkpoint_due = False
        self._own_connection = reach(self._connect, RECONNECT_S)

    def _close(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._own_connection.interrupt()
            under_way.exception()  # nobody uses it any more
        self._notes = None
        self._own_connection.close()

    @property
    def _connection(self) -> Connection:
        """The connection, while no round under way is using it."""
        if self._under_way is not None:
            self._under_way.result()
        return self._own_connection

    def _connect(self) -> Connection:
        name, silence_s = f"the averager at {self._address.uri}", 2 * self._deadline_s
        connection = self._address.connect(self.rank, name, silence_s, self._takes)
        connection.send_header(self._hello)
        return connection

    def _takes(self, header: dict[str, Any]) -> bool:
        """Whether a header is for whoever is receiving; what the averager says besides is noted."""
        if "stopped" in header:
            raise StoppedError(f"rank {self.rank} was stopped by the averager: {header['stopped']}")
        if "again" in header:
            raise _Again
        if "checkpoint" not in header:
            return "waiting" not in header
        if self._notes is not None:
            self._notes.append(header)
        else:
            self._note_checkpoint(header)
        return False

    def heartbeat(self) -> None:
        """Tell the averager that this worker is alive; see ``protocols.CenterExchange``."""
        now = self._now()
        if now - self._heartbeat >= HEARTBEAT_S:
            self._heartbeat = now
            self._connection.send_header({"alive": True})

    def start(
        self,
        shard: ShardStatistics,
        segments: Sequence[Tensor],
        layout: Layout,
        row_server: Sequence[Any] | None = None,
    ) -> Position:
        """Wait until every worker is ready, then overwrite the replica with the center.

        Args:
            shard: what this worker found in its rows, for the driver to check.
            segments: the replica's parameters and buffers, written in place.
            layout: their kinds and sizes.
            row_server: where other workers fetch this one's rows; None if they do not.

        Returns:
            Where this worker's training begins; ``resume`` has to follow if ``resumes`` is set.
        """
        self._times.compare_clocks(self._connection)
        with self._clock.phase(IDLE):
            self._connection.send_header(
                {**shard_header(shard), "row_server": row_server, **self._times.header()}
            )
            header = self._connection.receive_header()
        self._codec.begin(layout, int(header["chunk_bytes"]))
        self.resumes = header["worker_state"] is not None
        self._worker_state_bytes = int(header["worker_state"] or 0)
        self.since = Position(**header["since"])
        self.epoch_ended = bool(header["epoch_ended"])
        self.asks_leave = bool(header["asks_leave"])
        each = bool(header["holds_windows"])
        first = each or bool(header["may_wait"])
        self._in_step, self._waits = not first, chain([first], repeat(each))
        self.next_fragment = int(header["rounds_of_epoch"]) % self._codec.fragments
        self._note_rows(header)
        with self._clock.phase(EXCHANGE):
            self._receive_center(self._codec.whole(segments))
        return Position(**header["position"])

    def ask_for_rows(self) -> None:
        """Ask again for what ``start`` learned about all workers' rows and where they are served.

        One that was lost and is back serves its rows at another address.
        """
        self._connection.send_header({"rows": True})
        self._note_rows(self._connection.receive_header())

    def ask_for_parts(self) -> list[Any]:
        """Ask how many rows all workers have of which partitions; see ``DataStatistics.parts``."""
        self._connection.send_header({"parts": True})
        parts: list[Any] = self._connection.receive_header()["parts"]
        return parts

    def _note_rows(self, header: dict[str, Any]) -> None:
        self.mean_weight = float(header["mean_weight"])
        self.shard_rows = [int(rows) for rows in header["shard_rows"]]
        self.loss_use = header["loss_use"]
        self.row_servers: list[Any] = header["row_servers"]

    def resume(self, segments: Sequence[Tensor | SpreadValues]) -> bytes:
        """Overwrite the rest of the replica's state from the center.

        Args:
            segments: the replica's whole flat state, as in ``exchange``.

        Returns:
            What ``worker_state`` returned when the checkpoint was written; empty if it is lost.
        """
        chunks = self._codec.whole(segments)
        with self._clock.phase(EXCHANGE):
            self._receive_center(chunk for chunk in chunks if chunk.segment.kind == "optimizer")
        return self._connection.receive_octets(self._worker_state_bytes, self._codec.chunk_bytes)

    def exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        """Take part in one round; see ``protocols.CenterExchange``."""
        with self._clock.phase(EXCHANGE):
            chunks = self._codec.fragment(segments, self.next_fragment)

            def receive() -> None:
                if window.last:
                    self._receive_center(self._codec.whole(segments))
                    return
                for chunk in chunks:
                    chunk.take_reply(self._receive(chunk, chunk.reply_packing))

            self._exchange(chunks, window, receive)

    def begin_exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        """Start taking part in one round; see ``protocols.CenterExchange``."""
        with self._clock.phase(EXCHANGE):
            chunks = self._codec.fragment(segments, self.next_fragment)
            copies = [
                chunk.contribution(window).to("cpu", copy=True)
                for chunk in (chunks if window.weight else ())
            ]
            self._clock.sent += sum(copy.nbytes for copy in copies)
            rooms = [(chunk.room_for_reply(), chunk.reply_packing.varies) for chunk in chunks]
            connection, self._notes, self._overlapped = self._connection, [], window

            def receive() -> list[Tensor]:
                return [connection.receive_values(room, varies=varies) for room, varies in rooms]

            announced, values = self._announced(window), [copy.cpu for copy in copies]
            job = partial(self._take_part, connection, PhaseClock(), *announced, values, receive)
            self._under_way = self._background.submit(job)

    def end_exchange(self, segments: Sequence[Tensor], local: float) -> None:
        """Take the result of the round under way; see ``protocols.CenterExchange``."""
        with self._clock.phase(EXCHANGE):
            assert self._under_way is not None
            with self._clock.phase(WAIT):
                reply = self._under_way.result()
            self._under_way = None
            notes, self._notes = self._notes or [], None
            for header in notes:
                self._note_checkpoint(header)
            chunks = self._codec.fragment(segments, self.next_fragment)
            for chunk, packed in zip(chunks, reply, strict=True):
                self._clock.received += packed.nbytes
                merge(chunk.values, chunk.center_after(packed), local)
            self._committed(self._overlapped)

    def commit(self, segments: Sequence[Tensor | SpreadValues], window: WindowReport) -> None:
        """Take part in a round whose result is known; see ``protocols.CenterExchange``."""

        def receive() -> None:
            self._require("committed", self._connection.receive_header())
            self._clock.switch(EXCHANGE)

        with self._clock.phase(EXCHANGE):
            self._exchange(self._codec.whole(segments), window, receive, takes_reply=False)

    def gather(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Exchange something small with every other worker; all have to call this equally often.

        Args:
            value: this worker's contribution, in JSON's types.

        Returns:
            Every worker's contribution, by rank.

        Raises:
            StoppedError: the averager ended the run, perhaps because a worker stayed away.
            DeadlineError: the averager is gone.
        """
        with self._clock.phase(WAIT):
            self._connection.send_header({"gather": value})
            header = self._connection.receive_header()
        self.commit_wanted = bool(header["commit"])
        gathered: list[dict[str, Any]] = header["gathered"]
        return gathered

    def report_validation(self, report: ValidationReport, states: bytes = b"") -> None:
        """Report to the driver what this worker found on its held-out rows.

        Args:
            report: the loss.
            states: what its metrics counted.

        Raises:
            DataError: the states exceed a worker's share of the driver's memory.
        """
        require_share_of_states(len(states), report, len(self.shard_rows))
        self._connection.send_header(
            {"validation": asdict(report), "states": len(states), **self._times.header()}
        )
        self._connection.send_octets(states, self._codec.chunk_bytes)

    def epoch_losses(self, epochs: int) -> Sequence[float]:
        """The losses of the first ``epochs`` epochs, on held-out rows if there are any.

        Waits until every worker has reported its validation and, with ``asks_leave``, until the
        driver has approved the last of these epochs.

        Args:
            epochs: how many; all of them have ended.
        """
        if len(self._epoch_losses) < epochs:
            with self._clock.phase(WAIT):
                self._connection.send_header(
                    {"epoch_losses": epochs, "known": len(self._epoch_losses)}
                )
                self._epoch_losses += self._connection.receive_header()["epoch_losses"]
        return self._epoch_losses[:epochs]

    def finish(self) -> None:
        """Leave the run after the last epoch.

        Raises:
            DisconnectedError: the averager may not know that this worker has finished.
        """
        self._connection.send_header({"finish": True, **self._times.header()})
        self._require("finished", self._connection.receive_header())

    def report_failure(self, error: WorkerError | CollectiveError) -> None:
        """End the run for everyone, with this worker's error as the reason."""
        self._connection.send_last(failure_header(error))

    def _exchange(
        self,
        chunks: Sequence[ReplicaChunk],
        window: WindowReport,
        receive: Callable[[], None],
        *,
        takes_reply: bool = True,
    ) -> None:
        """Contribute chunks, and receive what comes of it."""
        values = [partial(chunk.contribution, window) for chunk in chunks if window.weight]
        announced = self._announced(window, takes_reply=takes_reply)
        self._take_part(self._connection, self._clock, *announced, values, receive)
        self._committed(window)

    def _announced(
        self, window: WindowReport, *, takes_reply: bool = True
    ) -> tuple[dict[str, Any], bytes]:
        """A contribution's header, and what the averager is to keep of this worker."""
        kept = b"" if self._restart_state is None else self._restart_state()
        header = window_header(window, takes_reply=takes_reply, worker_state=len(kept))
        if window.last or self._times.due:
            header |= self._times.header()
        return header, kept

    def _take_part(
        self,
        connection: Connection,
        clock: PhaseClock,
        header: dict[str, Any],
        kept: bytes,
        values: Sequence[Callable[[], Tensor]],
        receive: Callable[[], T],
    ) -> T:
        """Contribute and receive, again each time the round starts over since a worker was lost.

        Args:
            connection: this worker's.
            clock: counts the time and the bytes sent of the thread in which this is called.
            header: announces the contribution.
            kept: what the averager is to keep of this worker.
            values: return what is sent, message by message; none for a window that weighs nothing.
            receive: receives the result; the round may start over until its first values.
        """
        while True:
            clock.switch(EXCHANGE)
            unsent: dict[str, Any] | None = header
            # If rounds go on without some, it counts who announces a window first.
            if kept or not (self._in_step and values):
                connection.send_header(header)
                connection.send_octets(kept, self._codec.chunk_bytes)
                unsent = None
            if len(values) and next(self._waits):
                # This may take longer than the averager can go without reading what it is sent.
                clock.switch(WAIT)
                self._require("enter", connection.receive_header())
                clock.switch(EXCHANGE)
            for value in values:
                packed = value().to("cpu")
                connection.send_values(packed, unsent)
                unsent = None
                clock.sent += packed.nbytes
            clock.switch(WAIT)
            try:
                return receive()
            except _Again:
                logger.info("rank %d is contributing again: another worker was lost", self.rank)
                header = {name: field for name, field in header.items() if name != "phases"}

    def _receive_center(self, chunks: Iterable[ReplicaChunk]) -> None:
        for chunk in chunks:
            chunk.take_center(self._receive(chunk, chunk.center_packing))

    def _receive(self, chunk: ReplicaChunk, packing: Packing) -> Tensor:
        """Receive a chunk's new values: in place if possible, else in separate memory."""
        room = self._codec.room(chunk, packing)
        values = self._connection.receive_values(room, varies=packing.varies)
        # The first values were waited for; the rest come as fast as they travel.
        self._clock.switch(EXCHANGE)
        self._clock.received += values.nbytes
        return packing.unpack(values, len(chunk.values))

    def _require(self, field: str, header: dict[str, Any]) -> None:
        if field not in header:
            raise TrainingError(f"rank {self.rank} received {header} instead of '{field}'")

    def _committed(self, window: WindowReport) -> None:
        """After a round: if it becomes a checkpoint, send this worker's state for it."""
        self.next_fragment = (self.next_fragment + 1) % self._codec.fragments
        if window.last:
            self.closed_epoch = window.epoch
            self.next_fragment = 0
        if self._checkpoint_due:
            self._checkpoint_due = False
            self._send_worker_state()

    def _send_worker_state(self) -> None:
        octets = self._worker_state()
        self._connection.send_header({"worker_state": len(octets)})
        self._connection.send_octets(octets, self._codec.chunk_bytes)

    def _note_checkpoint(self, header: dict[str, Any]) -> None:
        if "now" in header:
            self._send_worker_state()
        else:
            self._checkpoint_due = True


class _Again(Exception):
    """The round starts over."""


def merge(values: Tensor, center: Tensor, local: float) -> None:
    """Merge the center's values into those trained while the center was on its way.

    Args:
        values: of any dtype, 1-D; overwritten.
        center: of the same shape.
        local: weight of the worker's own values, if they are floating-point numbers.
    """
    if local and values.dtype.is_floating_point:
        values.mul_(local).add_(center.to(values.device), alpha=1 - local)
    else:
        values.copy_(center)
