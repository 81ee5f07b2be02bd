"""One worker at the averager, from joining to leaving, and what is said meanwhile.

One worker is one connection (``connection.py`` has its form):

    worker                               averager
    {"join": rank, "host": ...,
     "attempt": of its task,
     "task": ...}                ------>
    {"reading": rows so far}     ------> now and then, while its rows arrive
    {"shard": what they are}     ------> wait for all ranks, and for the driver to look at it
                                 <------ or {"read_on": true}, to one that has not read all of
                                         them and does not begin its training, or goes on from a
                                         checkpoint, which may be of other rows: the same again
                                 <------ {"waiting": true}, now and then
                                 <------ {"chunk_bytes": size of the largest message of values,
                                          "position": where to go on,
                                          "own_state": bytes of it, or null at the very start,
                                          "mean_weight": of a row, "shard_rows": by rank}
                                 <------ the center's parameters and buffers, chunk by chunk
                                 <------ unless at the very start: the rest of the center, and the
                                         worker's own state from the checkpoint, or from the
                                         last commit of the workers before, if all start again
    {"gather": something small}  ------> wait for all ranks, whenever these agree to
                                 <------ {"gathered": [everyone's, by rank]}
    {"reading": rows so far},
    {"shard": what they are}     ------> while rows arrive that are trained on: wait for the driver
                                 <------ {"go_on": true}
    {"rows": true}               ------> when all rows were read by all
                                 <------ {"mean_weight": of a row, "shard_rows": by rank}
    {"validation": report}       ------> after an epoch, from who has held-out rows
    {"window": report,
     "takes_reply": whether,
     "own_state": bytes}, bytes,
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

A worker that sends faster than its chunks can be added is held back by the connection itself.
A worker whose connection breaks may come back: it joins anew, and its training goes on behind its
last committed window. If the run ends elsewhere, the next thing that a worker hears is {"stopped":
reason}.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from sparkdl.averager.codec import Codec
from sparkdl.averager.connection import Connection
from sparkdl.averager.headers import (
    raise_reported_failure,
    read_gather,
    read_own_state,
    read_shard,
    read_validation,
    read_window,
)
from sparkdl.averager.kept import KeptState
from sparkdl.averager.members import Member
from sparkdl.averager.progress import Position
from sparkdl.averager.rounds import Rounds, StartOverError
from sparkdl.averager.saving import Resumed, Saving
from sparkdl.errors import TrainingError
from sparkdl.feed.facts import ShardFacts

_WAITING = {"waiting": True}
MAX_OWN_STATE_BYTES = 1 << 40
"""It goes to the checkpoint's storage block by block, or to a file, so this bounds no memory."""


class Session:
    """One worker that has joined.

    Args:
        member: the worker, as it has joined.
        connection: to it.
        rounds: the run's.
        codec: how values travel.
        resumed: the checkpoint that the run goes on from, if it does.
    """

    def __init__(
        self,
        member: Member,
        connection: Connection,
        rounds: Rounds,
        codec: Codec,
        resumed: Resumed | None,
    ) -> None:
        self._member = member
        self._rank = member.rank
        self._connection = connection
        self._rounds = rounds
        self._codec = codec
        self._resumed = resumed
        self._scratch = torch.empty(rounds.chunk_bytes, dtype=torch.uint8)

    def run(self) -> None:
        """Serve the worker from reading its rows to the last epoch; it has joined already."""
        member, rounds = self._member, self._rounds
        rounds.ready(member, self._first_rows(), self._say_waiting)
        self._send_start()
        while not (header := self._next()).get("finish"):
            if "gather" in header:
                value = read_gather(header, self._rank, rounds.world_size)
                gathered = rounds.gather(member, value, self._say_waiting)
                self._connection.send_header({"gathered": gathered})
            elif "reading" in header:
                rounds.still_reading(member)
            elif "shard" in header:
                rounds.show(member, read_shard(header, self._rank), self._say_waiting)
                self._connection.send_header({"go_on": True})
            elif "rows" in header:
                self._connection.send_header(self._all_rows())
            elif "validation" in header:
                rounds.validated(read_validation(header, self._rank))
            else:
                self._serve_round(header)
        rounds.finish(member)

    def _first_rows(self) -> ShardFacts:
        """What the worker has found: in all its rows, unless it begins with the first of them."""
        rank, rounds = self._rank, self._rounds
        while True:
            header = self._next()
            if "reading" in header:
                rounds.still_reading(self._member)
                continue
            shard = read_shard(header, rank)
            begins = self._resumed is None and rounds.position(rank) == Position()
            if shard.complete or begins:
                return shard
            self._connection.send_header({"read_on": True})

    def _all_rows(self) -> dict[str, object]:
        return {"mean_weight": self._rounds.mean_weight, "shard_rows": self._rounds.shard_rows}

    def _send_start(self) -> None:
        """Send the center, and from a checkpoint what only this worker knew."""
        rank, resumed, rounds = self._rank, self._resumed, self._rounds
        position, kept = rounds.position(rank), rounds.kept_state(rank)
        own_state_bytes, from_checkpoint = None, False
        if kept is not None:
            own_state_bytes = kept.size
        elif resumed is not None and position == resumed.progress.positions[rank]:
            own_state_bytes, from_checkpoint = resumed.own_state_bytes(rank), True
        elif rounds.begun:
            own_state_bytes = 0
        self._connection.send_header(
            {
                "chunk_bytes": rounds.chunk_bytes,
                "position": dataclasses.asdict(position),
                "own_state": own_state_bytes,
                "epoch_ended": rounds.at_end_of_epoch,
                **self._all_rows(),
            }
        )
        self._send(rounds.center, kinds={"parameters", "buffers"})
        if own_state_bytes is not None:
            self._send(rounds.center, kinds={"optimizer"})
        if kept is not None:
            self._send_blocks(kept.blocks(rounds.chunk_bytes))
        if resumed is not None and from_checkpoint and own_state_bytes:
            with resumed.open_own_state(rank) as file:
                self._send_blocks(iter(partial(file.read, rounds.chunk_bytes), b""))
        rounds.release(self._member)

    def _send_blocks(self, blocks: Iterable[bytes]) -> None:
        for block in blocks:
            self._connection.send_values(torch.frombuffer(bytearray(block), dtype=torch.uint8))
            self._rounds.hear(self._rank)

    def _serve_round(self, header: dict[str, object]) -> None:
        report = read_window(header, self._rank)
        size = 0
        if "own_state" in header:
            size = read_own_state(header, self._rank, MAX_OWN_STATE_BYTES)
        kept = KeptState(self._blocks(size)) if size else None
        try:
            reply = self._rounds.contribute(
                self._member,
                report,
                self._receive,
                self._scratch,
                self._while_others_go_on,
                kept,
            )
        except StartOverError:
            self._connection.send_header({"again": True})
            return
        saving = self._rounds.saving_of(self._rank)
        if saving is not None:
            self._connection.send_header({"checkpoint": True})
        # Who was done early has missed rounds: the changes of the last one would not be enough.
        everything = {segment.kind for segment in self._rounds.layout}
        if header.get("takes_reply") is not False:
            self._send(reply, kinds=everything if report.last else None)
        else:
            self._connection.send_header({"committed": True})
        self._rounds.release(self._member)
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
