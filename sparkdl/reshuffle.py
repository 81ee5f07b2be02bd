"""Deal rows to the workers anew: every worker sends a random part of its rows to every other.

The rows go from worker to worker, through no driver and no Spark job. Every worker computes the
same plan from everybody's number of rows, so that afterwards all have the same number, give or take
one, and every assignment of rows to workers was equally likely. What arrives is written to the
place that the plan gives it: the order of the rows is the same in every run.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdl.collective import Gather, Network
from sparkdl.collective.network import local_address
from sparkdl.errors import (
    DeadlineError,
    DisconnectedError,
    SparkDLError,
    StoppedError,
    TrainingError,
    WorkerLostError,
)
from sparkdl.feed.shuffle import exchange_plan, permutation
from sparkdl.feed.store import PartitionStore
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.transport.connection import Connection, ConnectionLostError, SilenceError
from sparkdl.transport.port import Port
from sparkdl.transport.reaching import introduced, reach

CHUNK_BYTES = 4 << 20
"""What is sent at once."""
MAX_ROWS = 1 << 48
"""More than anybody has."""
MAX_ROW_BYTES = (1 << 31) - 1
"""Of one column; neither Spark nor numpy has more."""


@dataclass(frozen=True, kw_only=True)
class Reshuffle:
    """One worker's part in the exchanges of rows; call it as ``feed.RowExchange``.

    Attributes:
        rank: of this worker.
        network: on which the other workers reach it; its port binds to that interface.
        token: the job's secret, which both ends of each connection prove to know.
        gather: how workers tell each other where they listen.
        specs: the columns; lengths that only the data tell may be missing.
        seed: the job's seed.
        deadline_s: the longest that nothing may arrive, in seconds.
        tls: whether the rows are encrypted on their way.
    """

    rank: int
    network: Network
    token: str = field(repr=False)
    gather: Gather
    specs: tuple[ColumnSpec, ...]
    seed: int
    deadline_s: float
    tls: bool = False

    def __call__(
        self, store: PartitionStore, order: Tensor, received: PartitionStore, epoch: int
    ) -> None:
        """Send and receive rows; returns when all have arrived that belong here.

        Args:
            store: the rows of this worker.
            order: the order that they have in every run, shape (rows,), int64.
            received: an empty store for its new rows.
            epoch: the epoch that follows.

        Raises:
            DeadlineError: another worker neither sent nor took anything for too long.
            WorkerLostError: another worker went away.
            TrainingError: another worker sent what does not belong here.
        """
        arrivals = _Arrivals(received, self.deadline_s)
        host = local_address(self.network)
        port = Port(host, self.token, arrivals.serve, encrypted=self.tls)
        try:
            shapes = [list(spec.row_shape) for spec in store.specs] or None
            mine = {
                "host": host,
                "port": port.number,
                "fingerprint": port.fingerprint,
                "rows": store.rows,
                "shapes": shapes,
            }
            everyone = [_Peer.of(rank, told, self) for rank, told in enumerate(self.gather(mine))]
            rows = [peer.rows for peer in everyone]
            if sum(rows) > MAX_ROWS:
                raise TrainingError(f"the workers tell of {sum(rows)} rows: one of them lies")
            plan = exchange_plan(rows, seed=self.seed, epoch=epoch)
            received.create(self._known_specs(everyone), int(plan[:, self.rank].sum()))
            arrivals.expect(plan[:, self.rank], self.rank)
            dealt = order[permutation(store.rows, seed=~self.seed, epoch=epoch, rank=self.rank)]
            parts = torch.split(dealt, plan[self.rank].tolist())
            # Each starts with its neighbour, so that not all send to the same one.
            for peer in [*range(self.rank, len(everyone)), *range(self.rank)]:
                if peer == self.rank:
                    arrivals.put(peer, _chunks(store, parts[peer]))
                elif len(parts[peer]):
                    self._send(peer, everyone[peer], _chunks(store, parts[peer]))
            arrivals.wait()
        finally:
            port.close()

    def _known_specs(self, everyone: Sequence[_Peer]) -> tuple[ColumnSpec, ...]:
        """The columns with the lengths that the workers with rows found."""
        shapes = {peer.shapes: rank for rank, peer in enumerate(everyone) if peer.shapes}
        if len(shapes) != 1:
            told = ", ".join(f"rank {rank} {reprlib.repr(each)}" for each, rank in shapes.items())
            raise TrainingError(f"the workers have rows of different shapes: {told or 'none'}")
        return tuple(
            replace(spec, row_shape=shape)
            for spec, shape in zip(self.specs, next(iter(shapes)), strict=True)
        )

    def _send(self, peer: int, address: _Peer, chunks: Any) -> None:
        try:
            connection = reach(
                partial(
                    introduced,
                    self.rank,
                    f"rank {peer}",
                    (address.host, address.port),
                    self.token,
                    address.fingerprint,
                    self.deadline_s,
                ),
                self.deadline_s,
            )
            try:
                connection.send_header({"rows_of": self.rank})
                for chunk in chunks:
                    for values in chunk:
                        connection.send_values(values.view(-1))
                answer = connection.receive_header()
                if "written" not in answer:
                    raise TrainingError(
                        f"rank {peer} refused the rows of rank {self.rank}: {answer.get('refused')}"
                    )
            finally:
                connection.close()
        except SilenceError as error:
            raise DeadlineError(
                f"rank {self.rank} could not send rows to rank {peer}, which took nothing for "
                f"{self.deadline_s:g} s"
            ) from error
        except (ConnectionLostError, DisconnectedError) as error:
            raise WorkerLostError(
                f"rank {self.rank} lost rank {peer} on {address.host} while it sent rows to "
                f"it: {error}"
            ) from error
        except StoppedError as error:
            raise TrainingError(f"rank {peer} does not know the job's token") from error


@dataclass(frozen=True)
class _Peer:
    """What a worker has told about itself before an exchange."""

    host: str
    port: int
    fingerprint: str | None
    rows: int
    shapes: tuple[tuple[int, ...], ...] | None
    """Of a row of each column; None of a worker that has seen no rows."""

    @classmethod
    def of(cls, rank: int, told: Any, exchange: Reshuffle) -> _Peer:
        """Read it.

        Raises:
            TrainingError: no worker of this job tells that.
        """
        kinds: dict[str, tuple[type, ...]] = {
            "host": (str,),
            "port": (int,),
            "fingerprint": (str,) if exchange.tls else (type(None),),
            "rows": (int,),
            "shapes": (list, type(None)),
        }
        if (
            not isinstance(told, dict)
            or told.keys() != kinds.keys()
            or not all(type(told[name]) in kinds[name] for name in kinds)
            or told["port"] not in range(1, 1 << 16)
            or told["rows"] not in range(MAX_ROWS)
            or not (_fits(told["shapes"], exchange.specs) if told["shapes"] else not told["rows"])
        ):
            raise TrainingError(
                f"rank {rank} tells {reprlib.repr(told)} before an exchange of rows, and no worker "
                "of this job does"
            )
        shapes = tuple(map(tuple, told["shapes"])) if told["shapes"] else None
        return cls(**{**told, "shapes": shapes})


def _fits(shapes: list[Any], specs: Sequence[ColumnSpec]) -> bool:
    """Whether a row can have these shapes, of which the specs may leave lengths open."""
    return len(shapes) == len(specs) and all(
        isinstance(shape, list)
        and len(shape) == len(spec.row_shape)
        and all(type(length) is int and length >= 0 for length in shape)
        and math.prod(shape) * spec.dtype.itemsize <= MAX_ROW_BYTES
        and all(
            known in (UNKNOWN, length) for length, known in zip(shape, spec.row_shape, strict=True)
        )
        for shape, spec in zip(shapes, specs, strict=True)
    )


class _Arrivals:
    """Takes in rows from all workers at once, each in the thread of its connection."""

    def __init__(self, store: PartitionStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._condition = threading.Condition()
        self._places: dict[int, tuple[int, int]] | None = None
        self._missing: set[int] = set()
        self._not_begun: set[int] = set()
        self._error: SparkDLError | None = None
        self._heard = time.monotonic()

    def expect(self, rows: np.ndarray, rank: int) -> None:
        """Say how many rows come from each rank; only then are any taken in."""
        ends = np.cumsum(rows)
        with self._condition:
            self._missing = {peer for peer, count in enumerate(rows) if count and peer != rank}
            self._not_begun = set(self._missing)
            self._places = {
                peer: (int(end - count), int(count))
                for peer, (end, count) in enumerate(zip(ends, rows, strict=True))
            }
            self._heard = time.monotonic()
            self._condition.notify_all()

    def put(self, rank: int, chunks: Any) -> None:
        """Write rows that this worker keeps."""
        assert self._places is not None
        first, _ = self._places[rank]
        for chunk in chunks:
            self._store.write(chunk, first)
            first += len(chunk[0])

    def serve(self, connection: Connection) -> None:
        """Take in the rows of one other worker; called in a thread of the port."""
        rank = -1
        try:
            with self._condition:
                if not self._condition.wait_for(
                    lambda: self._places is not None, timeout=self._deadline_s
                ):
                    return
            rank = self._begin(connection.receive_header().get("rows_of"))
            self._take_in(rank, connection)
            connection.send_header({"written": True})
            # Only then, because the port is closed once nothing is missing.
            with self._condition:
                self._missing.discard(rank)
                self._condition.notify_all()
        except (ConnectionLostError, SilenceError) as error:
            self._fail(WorkerLostError(f"rank {rank} went away while it sent rows: {error}"))
        except SparkDLError as error:
            self._fail(error)
            with contextlib.suppress(ConnectionLostError, SilenceError):  # then it knows already
                connection.send_header({"refused": str(error)})
        except Exception as error:  # a full disk, or a mistake of ours, must not leave it waiting
            self._fail(TrainingError(f"rows of rank {rank} could not be taken in: {error!r}"))

    def wait(self) -> None:
        """Return when all rows are there."""
        with self._condition:
            while self._missing and self._error is None:
                left = self._heard + self._deadline_s - time.monotonic()
                if left <= 0:
                    raise DeadlineError(
                        f"no rows came from rank {min(self._missing)} for {self._deadline_s:g} s "
                        "in an exchange of rows among the workers"
                    )
                self._condition.wait(left)
            if self._error is not None:
                raise self._error

    def _begin(self, rank: object) -> int:
        """Let one connection write the rows of a rank."""
        with self._condition:
            if type(rank) is not int or rank not in self._missing:
                raise TrainingError(f"rank {reprlib.repr(rank)} sent rows that nobody expected")
            if rank not in self._not_begun:
                raise TrainingError(
                    f"rank {rank} sent its rows over a second connection: somebody else has the "
                    "job's token and speaks for it, or it sent them twice"
                )
            self._not_begun.remove(rank)
            return rank

    def _take_in(self, rank: int, connection: Connection) -> None:
        assert self._places is not None
        first, left = self._places[rank]
        while left:
            chunk = self._store.empty_packed(min(left, _chunk_rows(self._store)))
            for values in chunk:
                if connection.receive_values(values.view(-1)) is not None:
                    raise TrainingError(f"rank {rank} sent a header in the middle of its rows")
            self._store.write(chunk, first)
            first, left = first + len(chunk[0]), left - len(chunk[0])
            self._heard = time.monotonic()

    def _fail(self, error: SparkDLError) -> None:
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()


def _chunk_rows(store: PartitionStore) -> int:
    return max(1, CHUNK_BYTES // max(1, store.row_bytes))


def _chunks(store: PartitionStore, rows: Tensor) -> Any:
    if len(rows):
        for chunk in torch.split(rows, _chunk_rows(store)):
            yield store.take_packed(chunk)
