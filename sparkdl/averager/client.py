"""A worker's end of the averager: one connection from joining to leaving."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from sparkdl.averager.finite import require_finite
from sparkdl.averager.headers import (
    failure_header,
    join_header,
    most_states,
    phases_header,
    shard_header,
    validation_header,
    window_header,
)
from sparkdl.averager.line import Line
from sparkdl.averager.overlapped import Contribution, OverlappedRound, merge
from sparkdl.averager.packing import AsDtype, Packing
from sparkdl.averager.progress import Position
from sparkdl.averager.wire import Chunk, plan_chunks, plan_fragments
from sparkdl.averager.wire_format import WireFormat
from sparkdl.errors import (
    CollectiveError,
    DataError,
    TrainingError,
    WorkerError,
)
from sparkdl.events import ValidationReport, WindowReport
from sparkdl.feed.facts import ShardFacts
from sparkdl.phases import EXCHANGE, IDLE, WAIT, PhaseClock
from sparkdl.protocols import Layout, Segment
from sparkdl.transport.address import AveragerAddress
from sparkdl.transport.connecting import reach

logger = logging.getLogger(__name__)

RECONNECT_S = 5.0
"""Seconds for which a worker tries to reach an averager that it has lost."""
START_FAILURE_S = 60.0
"""Seconds for which who could not start tries to reach the averager, and waits for its answers."""
READING_S = 0.5
"""Seconds between two signs of life of a worker that reads its rows, or trains for long."""
TELLING_S = 0.25
"""Seconds between two reports of where a worker's time went, in the middle of an epoch: to write,
read and add one up takes half a millisecond, which is nothing a window and too much a step."""
COMPARISONS = 4
"""How often the clocks are compared when a worker joins; the fastest answer counts."""


class AveragerClient:
    """Connect one worker to the averager; a context manager.

    Args:
        address: where the averager is, with the job's token.
        rank: this worker's rank.
        wire_format: how values travel, the same as the averager's.
        deadline_s: the longest that the averager lets a worker be silent, in seconds. It judges
            whom it waits for; this end takes the averager for lost after twice that time.
        own_state: called for a checkpoint; what of this worker is not part of the center.
        attempt: of Spark's task; a later attempt takes the place of an earlier.
        task: the task's number, if several workers may share it.
        kept_state: called for every contribution; what the averager keeps of this worker, should
            all start again from that commit. None for nothing.
        frozen: the fingerprint of the parameters that are no part of the center.
        fragments: of how many parts of the state one after the other a round is, as the averager's.
        clock: counts where this worker's time goes, which the driver is told of; None for nobody.

    Attributes:
        closed_epoch: the last epoch of which this worker has exchanged its last window; 0 if none.
        next_fragment: of which part of the state the next round is, counted from 0.

    Raises:
        DisconnectedError: the averager cannot be reached, not even in ``deadline_s``.
        StoppedError: it is another job's.
    """

    def __init__(
        self,
        address: AveragerAddress,
        rank: int,
        wire_format: WireFormat,
        *,
        deadline_s: float = 600.0,
        own_state: Callable[[], bytes] = bytes,
        attempt: int = 0,
        task: int | None = None,
        kept_state: Callable[[], bytes] | None = None,
        frozen: str = "",
        fragments: int = 1,
        clock: PhaseClock | None = None,
    ) -> None:
        self.rank = rank
        self.closed_epoch = 0
        self.next_fragment = 0
        self._fragments = fragments
        self._clock = PhaseClock() if clock is None else clock
        self._tells_times = clock is not None
        self._under_way: OverlappedRound | None = None
        self._wire_format = wire_format
        self._base: list[Tensor | None] = []
        # Of each segment of the replica's state; the optimizer's come behind those of the model.
        self._kinds: list[str] = []
        self._chunk_bytes = 0
        self._own_state = own_state
        self._kept_state = kept_state
        self._own_state_bytes: int | None = None
        self._checkpoint_due = self._awaits_entry = False
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._reported_reading = time.monotonic()
        self._epoch_losses: list[float] = []
        self._address = address
        self._deadline_s = deadline_s
        self._hello = join_header(rank, attempt, task, frozen)
        # The driver waits that long for its workers to start.
        self._own_line = reach(self._connect, deadline_s)

    def __enter__(self) -> AveragerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def reconnect(self) -> None:
        """Join once more after the connection broke; ``start`` has to follow.

        Raises:
            StoppedError: the averager cannot be reached, or does not want this worker any more.
        """
        self._close()
        self._checkpoint_due = False
        self._own_line = reach(self._connect, RECONNECT_S)

    def _close(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.abandon()
        self._own_line.close()

    @property
    def _line(self) -> Line:
        """The line, when no round that is under way uses it."""
        if self._under_way is not None:
            self._under_way.wait()
        return self._own_line

    def _connect(self) -> Line:
        line = Line(self._address, self.rank, 2 * self._deadline_s)
        try:
            line.send_header(self._hello)
        except BaseException:
            line.close()
            raise
        return line

    def report_reading(self, rows: int) -> None:
        """Say, but not too often, that this worker is still reading its rows.

        Args:
            rows: how many it has read so far.
        """
        self._say_now_and_then({"reading": rows})

    def give_sign_of_life(self) -> None:
        """Let the averager hear of this worker; see ``protocols.CenterExchange``."""
        self._say_now_and_then({"alive": True})

    def _say_now_and_then(self, header: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._reported_reading >= READING_S:
            self._reported_reading = now
            self._line.send_header(header)

    def start(
        self,
        shard: ShardFacts,
        segments: Sequence[Tensor],
        layout: Layout,
        row_server: Sequence[Any] | None = None,
    ) -> Position | None:
        """Wait until every worker is ready, then overwrite the replica with the center.

        Args:
            shard: what this worker found in its rows, or in the first of them, for the driver to
                look at.
            segments: parameters and buffers of the replica, written in place.
            layout: their kinds and sizes.
            row_server: where other workers fetch rows from this one; None if they do not.

        Returns:
            Where this worker's training begins; ``resume`` has to follow if ``resumes`` is set.
            None if that is not the beginning and ``shard`` not complete: the rest of the rows has
            to be read first, and ``start`` to be called again.
        """
        state = list(segments)
        self._kinds = [segment.kind for segment in layout]
        self._extend_base(state, layout)
        if self._tells_times:
            self._compare_clocks()
        with self._clock.phase(IDLE):
            self._line.send_header(
                {**shard_header(shard), "row_server": row_server, **self._times()}
            )
            header = self._line.receive_header()
        if "read_on" in header:
            return None
        self._chunk_bytes = int(header["chunk_bytes"])
        self._scratch = torch.empty(self._chunk_bytes, dtype=torch.uint8)
        self._own_state_bytes = header["own_state"]
        self.epoch_ended = bool(header["epoch_ended"])
        self.asks_leave = bool(header["asks_leave"])
        self._awaits_entry = bool(header["may_wait"])
        self.next_fragment = int(header["rounds_of_epoch"]) % self._fragments
        self._note_rows(header)
        with self._clock.phase(EXCHANGE):
            self._receive_center(state, layout, plan_chunks(layout, self._chunk_bytes))
        return Position(**header["position"])

    def show_rows(self, shard: ShardFacts) -> None:
        """Have the driver look at rows that arrived after ``start``.

        Args:
            shard: what was found by now; complete when no more arrive.

        Raises:
            StoppedError: they cannot be trained on.
        """
        self._line.send_header(shard_header(shard))
        self._line.receive_header()

    def ask_for_rows(self) -> None:
        """Learn anew what ``start`` told of all workers' rows and of who serves them.

        All have read theirs when the first epoch has ended; who was lost and is back serves
        his elsewhere.
        """
        self._line.send_header({"rows": True})
        self._note_rows(self._line.receive_header())

    def _note_rows(self, header: dict[str, Any]) -> None:
        self.mean_weight = float(header["mean_weight"])
        self.shard_rows = [int(rows) for rows in header["shard_rows"]]
        self.row_servers: list[Any] = header["row_servers"]

    @property
    def resumes(self) -> bool:
        """Whether the training goes on from a checkpoint."""
        return self._own_state_bytes is not None

    def resume(self, segments: Sequence[Tensor], layout: Layout) -> bytes:
        """Overwrite the rest of the replica's state that is part of the center.

        Args:
            segments: the replica's whole flat state, as in ``exchange``.
            layout: their kinds and sizes.

        Returns:
            What ``own_state`` returned when the checkpoint was written; empty if that is lost.
        """
        state = list(segments)
        self._extend_base(state, layout)
        chunks = plan_chunks(layout, self._chunk_bytes)
        optimizer = [chunk for chunk in chunks if layout[chunk.segment].kind == "optimizer"]
        with self._clock.phase(EXCHANGE):
            self._receive_center(state, layout, optimizer)
        own_state = torch.empty(self._own_state_bytes or 0, dtype=torch.uint8)
        for start in range(0, len(own_state), self._chunk_bytes):
            self._line.receive_values(own_state[start : start + self._chunk_bytes])
        return own_state.numpy().tobytes()

    def exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        """Take part in one round; see ``protocols.CenterExchange``."""
        with self._clock.phase(EXCHANGE):
            self._exchange(segments, window)

    def _exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        state, layout = self._state(segments)
        chunks = self._next_chunks(layout)
        committed = False
        while not committed:
            self._clock.switch(EXCHANGE)
            self._contribute(state, layout, chunks, window, True)
            self._clock.switch(WAIT)
            try:
                if window.last:
                    self._receive_center(state, layout, plan_chunks(layout, self._chunk_bytes))
                else:
                    self._receive_reply(state, layout, chunks)
                committed = True
            except _Again:
                # Before the first chunk of the reply, so that the state is what it was.
                logger.info("rank %d contributes once more: another worker was lost", self.rank)
        self._committed(window)

    def begin_exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        """Take part in one round from here on; see ``protocols.CenterExchange``."""
        with self._clock.phase(EXCHANGE):
            self._begin_exchange(segments, window)

    def _begin_exchange(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        state, layout = self._state(segments)
        chunks = self._next_chunks(layout)
        line = self._line
        header, kept = self._header_of(window, takes_reply=True)
        messages = list(self._blocks(kept))
        if window.weight:
            for chunk in chunks:
                packed = self._packed(chunk, state, layout[chunk.segment], window)
                messages.append(packed.to("cpu", copy=True))
        packings = [self._wire_format.reply(layout[chunk.segment]) for chunk in chunks]
        reply = [
            torch.empty(packing.numel(chunk.stop - chunk.start), dtype=packing.dtype)
            for chunk, packing in zip(chunks, packings, strict=True)
        ]
        self._clock.sent += _bytes_of(messages)
        varies = any(packing.varies for packing in packings)
        contribution = Contribution(window, header, messages)
        self._under_way = OverlappedRound(line, contribution, reply, varies=varies)

    def end_exchange(self, segments: Sequence[Tensor], local: float) -> None:
        """Take what came of the round that is under way; see ``protocols.CenterExchange``."""
        with self._clock.phase(EXCHANGE):
            self._end_exchange(segments, local)

    def _end_exchange(self, segments: Sequence[Tensor], local: float) -> None:
        state, layout = self._state(segments)
        round = self._under_way
        assert round is not None
        with self._clock.phase(WAIT):
            round.wait()
        self._under_way = None
        self._clock.received += _bytes_of(round.reply)
        for header in round.notes:
            self._note_checkpoint(header)
        for chunk, packed in zip(self._next_chunks(layout), round.reply, strict=True):
            segment, target = layout[chunk.segment], chunk.of(state)
            reply = self._wire_format.reply(segment).unpack(packed, len(target))
            center = torch.empty_like(target)
            self._wire_format.decode(reply, center, self._base_of(chunk), segment)
            merge(target, center, local)
        self._committed(round.window)

    def _state(self, segments: Sequence[Tensor]) -> tuple[list[Tensor], Layout]:
        state = list(segments)
        layout = self._layout_of(state)
        self._extend_base(state, layout)
        return state, layout

    def _layout_of(self, state: list[Tensor]) -> Layout:
        more = len(state) - len(self._kinds)
        return tuple(
            Segment(kind, tensor.dtype, tensor.numel())
            for kind, tensor in zip(self._kinds + ["optimizer"] * more, state, strict=True)
        )

    def _next_chunks(self, layout: Layout) -> list[Chunk]:
        """How the part is cut of which the next round is, or the one that is under way."""
        return plan_fragments(layout, self._chunk_bytes, self._fragments)[self.next_fragment]

    def hand_over(self, segments: Sequence[Tensor], window: WindowReport) -> None:
        """Take part in a round whose outcome is known; see ``protocols.CenterExchange``."""
        state, layout = self._state(segments)
        with self._clock.phase(EXCHANGE):
            self._contribute(state, layout, plan_chunks(layout, self._chunk_bytes), window, False)
            with self._clock.phase(WAIT):
                while "committed" not in (header := self._line.receive_header()):
                    self._note_checkpoint(header)
            self._committed(window)

    def gather(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Exchange something small with every other worker; all have to call this equally often.

        Args:
            value: this worker's contribution, of JSON's types.

        Returns:
            Every worker's contribution, by rank.

        Raises:
            StoppedError: the averager ended the run, perhaps because a worker stayed away.
            DeadlineError: the averager is gone.
        """
        with self._clock.phase(WAIT):
            self._line.send_header({"gather": value})
            gathered: list[dict[str, Any]] = self._line.receive_header()["gathered"]
        return gathered

    def report_validation(self, report: ValidationReport, states: bytes = b"") -> None:
        """Tell the driver what this worker found on its held-out rows.

        Args:
            report: the loss.
            states: what its metrics have counted.

        Raises:
            DataError: that is more than a worker's share of the driver's memory.
        """
        most = most_states(len(self.shard_rows))
        if len(states) > most:
            raise DataError(
                f"the metrics have counted {len(states)} bytes on the {report.examples} held-out "
                f"rows of this worker, and each of {len(self.shard_rows)} may send {most} to the "
                "driver. Metrics that keep every score (AUROC, average precision) take a fixed "
                "size with thresholds=200; or hold fewer rows out"
            )
        self._line.send_header({**validation_header(report, len(states)), **self._times()})
        self._send_bytes(states)

    def epoch_losses(self, epochs: int) -> Sequence[float]:
        """What the first epochs came to, each: on held-out rows if there are any, else in training.

        Waits until every worker has reported what it found on its held-out rows, and with
        ``asks_leave`` until the driver has approved the last of these epochs.

        Args:
            epochs: how many; they have ended.
        """
        if len(self._epoch_losses) < epochs:
            with self._clock.phase(WAIT):
                self._line.send_header({"epoch_losses": epochs, "known": len(self._epoch_losses)})
                self._epoch_losses += self._line.receive_header()["epoch_losses"]
        return self._epoch_losses[:epochs]

    def finish(self) -> None:
        """Leave the run after the last epoch.

        Raises:
            DisconnectedError: the averager may not know that this worker has finished.
        """
        self._line.send_header({"finish": True, **self._times()})
        header = self._line.receive_header()
        if "finished" not in header:
            raise TrainingError(f"rank {self.rank} was sent {header} when it had finished")

    def report_failure(self, error: WorkerError | CollectiveError) -> None:
        """End the run for everyone, with this worker's error as the reason."""
        self._line.send_last(failure_header(error))

    def _contribute(
        self,
        state: list[Tensor],
        layout: Layout,
        chunks: list[Chunk],
        window: WindowReport,
        takes_reply: bool,
    ) -> None:
        header, kept = self._header_of(window, takes_reply=takes_reply)
        self._line.send_header(header)
        self._send_bytes(kept)
        if window.weight:
            self._await_entry()
            for chunk in chunks:
                packed = self._packed(chunk, state, layout[chunk.segment], window)
                self._line.send_values(packed.to("cpu"))
                self._clock.sent += packed.nbytes

    def _header_of(
        self, window: WindowReport, *, takes_reply: bool
    ) -> tuple[dict[str, Any], bytes]:
        """What a contribution begins with, and what the averager is to keep of this worker."""
        kept = b"" if self._kept_state is None else self._kept_state()
        header = window_header(window, takes_reply=takes_reply, own_state=len(kept))
        due = window.last or self._clock.untold_s >= TELLING_S
        return ({**header, **self._times()} if due else header), kept

    def _times(self) -> dict[str, Any]:
        """Where this worker's time went since the driver was told last; empty if nobody counts."""
        return phases_header(self._clock.take()) if self._tells_times else {}

    def _compare_clocks(self) -> None:
        """Learn what the driver's clock says when this process's says something."""
        self._clock.forget_comparison()
        for _ in range(COMPARISONS):
            asked = time.monotonic()
            self._line.send_header({"clock": True})
            theirs = float(self._line.receive_header()["clock"])
            self._clock.compare(asked, theirs, time.monotonic())

    def _await_entry(self) -> None:
        """Wait until others let this worker contribute its first window.

        They may take longer than the averager can go without reading what is sent to it.
        """
        with self._clock.phase(WAIT):
            while self._awaits_entry:
                header = self._line.receive_header()
                if "enter" in header:
                    self._awaits_entry = False
                else:
                    self._note_checkpoint(header)

    def _receive_center(self, state: list[Tensor], layout: Layout, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            target, base = chunk.of(state), self._base_of(chunk)
            center = self._receive(AsDtype(layout[chunk.segment].center_dtype), target, base)
            if center is not target:
                target.copy_(center)
            if base is not None:
                base.copy_(center)

    def _receive_reply(self, state: list[Tensor], layout: Layout, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            segment, target, base = layout[chunk.segment], chunk.of(state), self._base_of(chunk)
            reply = self._receive(self._wire_format.reply(segment), target, base)
            if reply is not target:
                self._wire_format.decode(reply, target, base, segment)

    def _committed(self, window: WindowReport) -> None:
        """A round has happened; if it becomes a checkpoint, this worker's state belongs to it."""
        self.next_fragment = (self.next_fragment + 1) % self._fragments
        if window.last:
            self.closed_epoch = window.epoch
            self.next_fragment = 0
        if self._checkpoint_due:
            self._checkpoint_due = False
            self._send_own_state()

    def _send_own_state(self) -> None:
        octets = self._own_state()
        self._line.send_header({"own_state": len(octets)})
        self._send_bytes(octets)

    def _send_bytes(self, octets: bytes) -> None:
        for block in self._blocks(octets):
            self._line.send_values(block)

    def _blocks(self, octets: bytes) -> Iterator[Tensor]:
        """The octets in messages."""
        if octets:
            values = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
            for start in range(0, len(values), self._chunk_bytes):
                yield values[start : start + self._chunk_bytes]

    def _extend_base(self, state: list[Tensor], layout: Layout) -> None:
        """Start the last center at zero, as the averager does, for state that was not there yet."""
        for tensor, segment in list(zip(state, layout, strict=True))[len(self._base) :]:
            changes = self._wire_format.sends_changes(segment)
            zeros = torch.zeros_like(tensor, dtype=segment.center_dtype) if changes else None
            self._base.append(zeros)

    def _base_of(self, chunk: Chunk) -> Tensor | None:
        base = self._base[chunk.segment] if self._base else None
        return None if base is None else base[chunk.start : chunk.stop]

    def _packed(
        self, chunk: Chunk, state: list[Tensor], segment: Segment, window: WindowReport
    ) -> Tensor:
        """What to send for a chunk; may be the state itself."""
        values = chunk.of(state)
        if segment.averaged:
            require_finite(values, window)
        encoded = self._wire_format.encode(values, self._base_of(chunk), segment)
        return self._wire_format.contribution(segment).pack(encoded)

    def _receive(self, packing: Packing, target: Tensor, base: Tensor | None) -> Tensor:
        """Receive what ``target`` is to become: in place if it can be, else beside it."""
        room = target
        if base is not None or packing != AsDtype(target.dtype) or target.device.type != "cpu":
            size = packing.numel(len(target)) * packing.dtype.itemsize
            if size > len(self._scratch):
                self._scratch = torch.empty(size, dtype=torch.uint8)
            room = self._scratch[:size].view(packing.dtype)
        while isinstance(values := self._line.receive_packed(room, varies=packing.varies), dict):
            self._note_checkpoint(values)
        # What came first was waited for; the rest comes as fast as it travels.
        self._clock.switch(EXCHANGE)
        self._clock.received += values.nbytes
        return packing.unpack(values, len(target))

    def _note_checkpoint(self, header: dict[str, Any]) -> None:
        if "again" in header:
            raise _Again
        if "checkpoint" not in header:
            raise TrainingError(f"rank {self.rank} was sent {header} where values were due")
        if "now" in header:
            self._send_own_state()
        else:
            self._checkpoint_due = True


def report_start_failure(address: AveragerAddress, error: WorkerError) -> None:
    """End the run from a worker that could not even start, and so does not join.

    Args:
        address: where the averager is, with the job's token.
        error: why the worker could not start.

    Raises:
        DisconnectedError: the averager cannot be reached.
        StoppedError: it is another job's.
    """
    line = reach(lambda: Line(address, error.rank, START_FAILURE_S), START_FAILURE_S)
    try:
        line.send_last(failure_header(error))
    finally:
        line.close()


def _bytes_of(messages: Sequence[Tensor]) -> int:
    return sum(message.nbytes for message in messages)


class _Again(Exception):
    """The round starts over."""
