"""What one worker and the averager say to each other, from joining to leaving.

Each worker has one connection (``framing.py`` describes its format):

    worker                               averager
    {"join": rank, "host": ...,
     "attempt": of its task,
     "task": ..., "frozen":
     fingerprint}                ------>
    {"alive": true}              ------> now and then, while its rows arrive, and during long
                                         training between two windows
    {"clock": true}              ------> a few times, to compare the clocks
                                 <------ {"clock": seconds}
    {"shard": what they are,
     "row_server": where others fetch
     them, or null}              ------> wait for all ranks, and for the driver to check it
                                 <------ {"waiting": true}, now and then
                                 <------ {"chunk_bytes": size of the largest message of values,
                                          "position": where to continue,
                                          "since": where these workers began together,
                                          "epoch_ended": whether all have just ended an epoch,
                                          "asks_leave": whether to ask for leave to begin one,
                                          "may_wait": whether others may keep it from
                                          contributing its first window, or with
                                          "holds_windows": any,
                                          "rounds_of_epoch": how many it has had, which
                                          determines the next one's fragment,
                                          "worker_state": its size, or null at the very start,
                                          "mean_weight": per row, "shard_rows": by rank,
                                          "row_servers": by rank}
                                 <------ the center's parameters and buffers, chunk by chunk
                                 <------ unless at the very start: the rest of the center, and the
                                         worker's state from the checkpoint, or from the
                                         previous workers' last commit, if all restart
    {"gather": something small}  ------> wait for all ranks, whenever they agree to
                                 <------ {"gathered": [everyone's, by rank],
                                          "commit": whether the driver wants all to commit}
    {"rows": true}               ------> before rows are exchanged, or if an address has changed
                                 <------ {"mean_weight": per row, "shard_rows": by rank,
                                          "row_servers": by rank}
    {"parts": true}              ------> before the first exchange
                                 <------ {"parts": rows of each partition, by rank}
    {"validation": report,
     "states": bytes}, bytes     ------> after an epoch, if rows are held out: the loss, and what
                                         metrics counted
    {"epoch_losses": epochs,
     "known": for how many}      ------> from those that follow them, or ask for leave: wait until
                                         all have validated, and for the driver to check that
                                 <------ {"waiting": true}, now and then
                                 <------ {"epoch_losses": of the others}
    {"window": report,
     "takes_reply": whether,
     "worker_state": bytes}, bytes,
    chunks                       ------> add in rank order, wait for the round
                                 <------ with "may_wait", between the first window's bytes and
                                         chunks: {"waiting": true}, now and then, and
                                         {"enter": true}; with "holds_windows", each window's
                                 <------ {"waiting": true}, now and then after a last window,
                                         and where the round policy makes it wait for others
                                 <------ {"checkpoint": true}, if this commit becomes one; with
                                         "now" where it waits as above: send the state at
                                         once
                                 <------ the reply, chunk by chunk, or {"committed": true}
    {"worker_state": bytes}, bytes  ------> only if it becomes a checkpoint
                                 <------ or {"again": true}: a member of the round was lost;
    {"window": report}, chunks   ------> the same again
    ... one round per window ...
    {"finish": true}             ------> wait for a checkpoint that is being written
                                 <------ {"finished": true}; without it the worker comes back
    or {"failure": {...}}        ------> the run ends, with the worker's traceback
    or {"broken": why,
        "missing": ranks}        ------> the run ends: the exchange among the workers failed, and
                                         these ranks gave no sign

Messages about rows, windows, held-out rows and the end also carry "phases": where the worker's time
went since its last such report (``phases.py``). No decision depends on it.

Where rounds exchange fragments, chunks and reply cover the fragment that is due, except that the
reply to an epoch's last window is the whole center. A worker that sends faster than its chunks can
be added is slowed by the connection itself. A worker whose connection breaks may come back: it
rejoins and continues after its last committed window. If the run ends elsewhere, the next message
that a worker receives is {"stopped": reason}.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparkdl.averager.coordination.membership import Member
from sparkdl.averager.headers import (
    MAX_STATES_BYTES,
    raise_reported_failure,
    read_epoch_losses,
    read_gather,
    read_join,
    read_row_server,
    read_size,
    received,
    stopped_header,
)
from sparkdl.averager.run_events import WorkerState, WorkerTimes
from sparkdl.averager.values.accumulator import Accumulator
from sparkdl.averager.values.replica_codec import require_finite
from sparkdl.averager.values.wire_format import Chunk
from sparkdl.checkpoint.container import Piece
from sparkdl.errors import SparkDLError, TrainingError
from sparkdl.events import ValidationReport, WindowReport
from sparkdl.feed.shards import ShardStatistics
from sparkdl.phases import PhaseTimes
from sparkdl.transport.channel import HEADER, PAUSE, Channel, Conversation, LeftError, Need, UpTo
from sparkdl.transport.framing import octets_of, values_prefix

if TYPE_CHECKING:
    from sparkdl.averager.service.server import Averager

logger = logging.getLogger(__name__)

MAX_WORKER_STATE_BYTES = 1 << 40
"""It goes to the checkpoint's storage block by block, or to a file: this bounds no memory."""


class Worker:
    """One worker, at its connection; see ``service.Peer``.

    Args:
        channel: the channel to it.
        averager: serves it.

    Attributes:
        channel: as given.
        member: who it is, once it has joined.
        sum: the sum it contributes to; None if it does not contribute, or the round started over.
    """

    def __init__(self, channel: Channel, averager: Averager) -> None:
        self.channel = channel
        self.member: Member | None = None
        self.sum: Accumulator | None = None
        self._averager = averager
        self._owes_worker_state = False
        self._awaits_entry = self._holds_windows = False
        self._buffer = torch.empty(0, dtype=torch.uint8)

    # What decisions make it do; ``Actions`` says what each means.

    def welcome(self) -> None:
        """Send the center, and the state that only this worker had."""
        averager, member = self._averager, self._member()
        coordinator, resumed, rank = averager.coordinator, averager.resumed, member.rank
        committed = coordinator.committed
        position = committed.positions[rank]
        state: WorkerState | Piece | None = committed.kept.get(rank)
        begun = state is not None or committed.begun
        if state is None and resumed is not None and position == resumed.progress.positions[rank]:
            state, begun = resumed.worker_state(rank), True
        policy = coordinator.round.policy
        self._awaits_entry, self._holds_windows = not policy.in_step, policy.holds_windows
        self.channel.send_header(
            {
                "chunk_bytes": averager.center.chunk_bytes,
                "position": dataclasses.asdict(position),
                "since": dataclasses.asdict(committed.since),
                "worker_state": (state.size if state else 0) if begun else None,
                "epoch_ended": committed.at_end_of_epoch,
                "asks_leave": coordinator.spec.followed,
                "may_wait": self._awaits_entry,
                "holds_windows": self._holds_windows,
                "rounds_of_epoch": averager.center.rounds_of_epoch,
                **self._all_rows(),
            }
        )
        self.channel.send(averager.center.state("parameters", "buffers"))
        if begun:
            self.channel.send(averager.center.state("optimizer"))
        if state is not None and state.size:
            self._send_blocks(state.blocks(averager.center.chunk_bytes))
        else:
            self.channel.send([], then=self._taken)

    def reply(self, *, final: bool, values: bool, worker_state: bool) -> None:
        """Send the result of a round."""
        if worker_state:
            self.ask_worker_state(now=False)
        if not values:
            self.channel.send_header({"committed": True})
        # A worker that was done early has missed rounds: the last one's changes would not suffice.
        center = self._averager.center
        frames = center.state() if final else center.reply()
        self.channel.send(frames if values else [], then=self._taken)

    def ask_worker_state(self, *, now: bool = True) -> None:
        """Have the worker send its state, ``now`` or after the reply that follows."""
        self._owes_worker_state = True
        self.channel.send_header({"checkpoint": True, **({"now": True} if now else {})})

    def receive(self, weight: float, staleness: int) -> None:
        """Add the worker's contribution to the sum."""
        center, total = self._averager.center, self._averager.center.sum
        assert total is not None
        total.declare(self._member().rank, weight, center.scale(staleness))
        if self._awaits_entry or self._holds_windows:
            self._awaits_entry = False
            self.channel.send_header({"enter": True})
        self.channel.wake(total)

    def start_over(self) -> None:
        """Forget its contribution; what is still on its way is discarded."""
        self.channel.send_header({"again": True})
        if self.sum is not None:
            self.sum = None
            self.channel.redirect(self._scratch)

    def send_epoch_losses(self, losses: tuple[float, ...]) -> None:
        """Send the losses of epochs."""
        self.channel.send_header({"epoch_losses": losses})

    def refuse(self, reason: str) -> None:
        """Say why the worker cannot take part, and end the connection."""
        self._averager.part(self.channel, stopped_header(reason))

    def dismiss(self) -> None:
        """End the connection, as the worker has finished."""
        self._averager.part(self.channel, {"finished": True})

    def _taken(self) -> None:
        self._averager.tell(self._averager.coordinator.taken, self._member())

    def _send_blocks(self, blocks: Iterator[bytes]) -> None:
        """Send the worker's state, reading each block once the previous one has been sent."""

        def send(block: bytes) -> None:
            if block:
                frames = [values_prefix(len(block)), memoryview(block)]
                self.channel.send(frames, then=read_next)
            else:
                self._taken()

        def read_next() -> None:
            self._averager.elsewhere(self.channel, lambda: next(blocks, b""), send)

        self.channel.send([], then=read_next)

    # What the worker says.

    def conversation(self, said: dict[str, Any]) -> Conversation:
        """Listen to the worker, from joining to leaving."""
        averager = self._averager
        if averager.coordinator.ended:  # nothing it could say would change that
            averager.part(self.channel, stopped_header(averager.coordinator.farewell))
            return
        self.channel.check = raise_reported_failure
        raise_reported_failure(said)
        self.member = member = Member(*read_join(said))
        averager.by_member[member] = self
        averager.tell(averager.coordinator.joined, member)
        while True:
            header = yield HEADER
            if "phases" in header:
                times = received(PhaseTimes, header["phases"], member.rank)
                averager.report(WorkerTimes(member.rank, member.host, times))
            if self._owes_worker_state:
                yield from self._take_worker_state(header)
            elif "window" in header:
                yield from self._contribute(header)
            elif "gather" in header:
                value = read_gather(header, member.rank, averager.coordinator.spec.world_size)
                averager.tell(averager.coordinator.gave, member, value)
            elif "shard" in header:
                shard = received(ShardStatistics, header["shard"], member.rank)
                averager.tell(
                    averager.coordinator.rows_found,
                    member,
                    shard,
                    read_row_server(header, member.rank),
                )
            elif "rows" in header and averager.coordinator.shards.known:
                self.channel.send_header(self._all_rows())
            elif "parts" in header and averager.coordinator.shards.known:
                self.channel.send([averager.parts])
            elif "validation" in header:
                validation = received(ValidationReport, header["validation"], member.rank)
                limit = MAX_STATES_BYTES // averager.coordinator.spec.world_size
                states = yield from self._kept(read_size(header, member.rank, limit, "states", 0))
                averager.tell(averager.coordinator.validated, member, validation, states)
            elif "epoch_losses" in header:
                averager.tell(
                    averager.coordinator.epoch_losses_wanted,
                    member,
                    *read_epoch_losses(header, member.rank),
                )
            elif header.get("finish"):
                averager.tell(averager.coordinator.finished, member)
                return
            elif "clock" in header:
                self.channel.send_header({"clock": time.monotonic()})
            elif "alive" not in header:
                raise TrainingError(f"{member} sent a header that no worker sends: {header}")

    def note_heartbeat(self) -> None:
        """Take note that it is alive."""
        if self.member is not None:
            self._averager.coordinator.heartbeat(self.member, self._averager.now())

    def left(self, error: LeftError) -> None:
        """Take note that it has left."""
        if self.member is None:
            logger.info("a worker disconnected before joining: %s", error)
            return
        why = f"ended its connection in the middle of training ({error}). The executor's log "
        self._averager.tell(self._averager.coordinator.lost, self.member, why + "says why")

    def failed(self, error: SparkDLError) -> None:
        """End the run, for it reported a failure, or sent something that no worker sends."""
        averager = self._averager
        if averager.coordinator.ended:
            farewell = stopped_header(str(averager.coordinator.failure or error))
            averager.part(self.channel, farewell)
        averager.tell(averager.coordinator.fail, error)

    def closed(self) -> None:
        """Take note that nothing can be sent to it any more."""
        averager, member = self._averager, self.member
        if member is not None:
            averager.by_member.pop(member, None)
            if averager.await_turn.get(member.rank, (None,))[0] is self:
                del averager.await_turn[member.rank]

    def _contribute(self, header: dict[str, Any]) -> Conversation:
        """Receive a contribution, adding each chunk to the sum as soon as it is its turn."""
        averager, member = self._averager, self._member()
        rank = member.rank
        report = received(WindowReport, header["window"], rank)
        kept = yield from self._kept(read_size(header, rank, MAX_WORKER_STATE_BYTES, default=0))
        takes_reply = header.get("takes_reply") is not False
        averager.tell(averager.coordinator.window_closed, member, report, kept, takes_reply)
        if not report.weight:
            return
        self.sum = total = yield PAUSE
        for index, chunk in enumerate(total.chunks):
            place = None if self.sum is None else self.sum.in_place(rank, index)
            packed = self._packed(chunk) if place is None else place
            packing = averager.center.contribution(chunk)
            if packing.varies:
                count = yield UpTo(octets_of(packed))
                packed = packed[: count // packed.dtype.itemsize]
            else:
                yield octets_of(packed)
            if self.sum is None:
                continue  # they were discarded
            values = packing.unpack(packed, chunk.stop - chunk.start)
            require_finite(values, report)
            if self.sum.turn(index) != rank:
                averager.await_turn[rank] = self, index
                yield PAUSE
            if self.sum is not None:
                self.sum.add(rank, index, values if place is None else None)
                averager.pass_turn(index)
        if self.sum is not None:
            self.sum = None
            averager.tell(averager.coordinator.contributed, member)

    def _kept(self, size: int) -> Generator[Need, Any, WorkerState | None]:
        """Receive so many bytes, to be kept; None for no byte."""
        if not size:
            return None
        state = WorkerState()
        for block in self._blocks(size):
            yield block
            state.add(block)
        return state

    def _take_worker_state(self, header: dict[str, Any]) -> Conversation:
        """Receive the worker's state for the checkpoint that waits for it."""
        averager, member, state = self._averager, self._member(), WorkerState()
        size = read_size(header, member.rank, MAX_WORKER_STATE_BYTES)
        self._owes_worker_state = False
        saving = averager.saving
        assert saving is not None
        for block in self._blocks(size):
            yield block
            keep = partial(saving.keep, state, block)
            averager.elsewhere(self.channel, keep, self.channel.wake)
            yield PAUSE
        saving.worker_states[member.rank] = Piece("U8", [size], state.blocks)
        averager.tell(averager.coordinator.worker_state_written, member)

    def _member(self) -> Member:
        assert self.member is not None
        return self.member

    def _all_rows(self) -> dict[str, object]:
        shards = self._averager.coordinator.shards
        return {
            "mean_weight": shards.statistics.mean_weight,
            "shard_rows": list(shards.statistics.shard_rows),
            "loss_use": shards.loss_use,
            "row_servers": shards.row_servers,
        }

    def _blocks(self, size: int) -> Iterator[memoryview]:
        """Where to receive ``size`` bytes; each block overwrites the previous one."""
        step = self._averager.center.chunk_bytes
        for start in range(0, size, step):
            yield self._scratch(min(step, size - start))

    def _packed(self, chunk: Chunk) -> Tensor:
        """Where to receive a chunk that cannot be added yet."""
        packing = self._averager.center.contribution(chunk)
        size = packing.numel(chunk.stop - chunk.start) * packing.dtype.itemsize
        self._scratch(size)
        return self._buffer[:size].view(packing.dtype)

    def _scratch(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return octets_of(self._buffer[:size])
