"""Exchange rows among the workers: each gets a random part of every other's rows.

The rows go from worker to worker, without the driver and without a Spark job. All workers compute
the same plan from the row counts of all partitions: afterwards all have the same number, give or
take one, and every assignment of rows to workers was equally likely. Which worker had read which
partition makes no difference. Each fetches what it gets (``server.py``)
and puts it in the order of the partitions, which is the same in every run. Because rows
are fetched, a worker that was lost fetches them again once it is back; all it needs is that the
others still have what they gave away.
"""

from __future__ import annotations

import logging
import math
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import (
    CollectiveError,
    DeadlineError,
    DisconnectedError,
    StoppedError,
    TrainingError,
)
from sparkdl.feed.partition_store import PartitionStore
from sparkdl.feed.schema import Column, Ragged
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.reshuffle.server import (
    LENGTHS_AT_ONCE,
    Offer,
    RowServer,
    chunk_sizes,
    connect_to,
    exchange_plan,
)
from sparkdl.transport.connecting import reach
from sparkdl.transport.connection import Connection

logger = logging.getLogger(__name__)

REACH_S = 10.0
"""Seconds to keep trying one address, as long as what prevents it may pass."""
RETRY_S = 0.5
"""Seconds between two attempts to fetch rows from a worker that may come back."""
MAX_ROWS = 1 << 48
"""More than anybody has."""
MAX_ROW_BYTES = (1 << 31) - 1
"""The most bytes per row of one column; neither Spark nor numpy has more."""


@dataclass(frozen=True)
class Everyone:
    """What a worker has to know about all workers to exchange rows with them.

    Attributes:
        rows: the rows to exchange that each rank has read, by rank: partitions and their rows.
        row_servers: where each rank serves its rows, as ``RowServer.address``, by rank.
    """

    rows: Sequence[Sequence[tuple[int, int]]]
    row_servers: Sequence[Any]

    @classmethod
    def of(
        cls, parts: Sequence[Sequence[Any]], row_servers: Sequence[Any], *, held_out: bool = False
    ) -> Everyone:
        """Read what is known of all ranks' rows.

        Args:
            parts: as in ``DataStatistics``.
            row_servers: as in ``Everyone``.
            held_out: whether the rows to validate with are exchanged, not those to train on.
        """
        return cls([[(p[0], p[1 + held_out]) for p in each] for each in parts], row_servers)


@dataclass(kw_only=True, eq=False)
class RowExchange:
    """One worker's part in the exchanges of rows; called as ``feed.RowExchange``.

    Attributes:
        rank: this worker's rank.
        server: this worker's row server.
        token: the job's secret, which both ends of each connection prove that they know.
        everyone: asks what is now known about all workers; called once per exchange, and again for
            each attempt to find one that was lost.
        specs: the columns; lengths that only the data tell may be missing.
        seed: the job's seed.
        deadline_s: the longest for which no rows may come, in seconds.
        survives: whether workers may be lost and come back, so that rows are kept for them.
        on_rows: called now and then while others' rows arrive, with the number so far.
        tls: whether the rows are encrypted in transit.
    """

    rank: int
    server: RowServer
    token: str = field(repr=False)
    everyone: Callable[[], Everyone]
    specs: tuple[ColumnSpec, ...]
    seed: int
    deadline_s: float
    survives: bool = False
    on_rows: Callable[[int], None] = lambda rows: None
    tls: bool = False
    _rows: list[list[tuple[int, int]]] | None = field(default=None, init=False)
    _heard: float = field(default_factory=time.monotonic, init=False)

    def __call__(
        self, store: PartitionStore, order: Tensor | None, received: PartitionStore, epoch: int
    ) -> Tensor | None:
        """Get this worker's rows from all workers; returns once they have arrived.

        Args:
            store: the rows that this worker had, owned by the server from here on.
            order: the order that they have in every run, shape (rows,), int64; None for the stored
                order.
            received: an empty store for this worker's new rows.
            epoch: the epoch that follows, or ``HELD_OUT``.

        Returns:
            The order that the new rows have in every run, as above.

        Raises:
            CollectiveError: another worker was lost, or sent nothing for too long.
            StoppedError: the run ended while this worker waited for another, or the averager cannot
                be reached.
            TrainingError: another worker reports or sends something that does not fit.
        """
        everyone = self.everyone()
        held, workers = self._rows or everyone.rows, len(everyone.rows)
        # Ranks that share a partition share a task, so their order is always the same.
        parts = sorted(
            (partition, rank, rows)
            for rank, each in enumerate(held)
            for partition, rows in each
            if rows
        )
        owners = np.array([rank for _, rank, _ in parts], dtype=np.int64)
        rows = [rows for *_, rows in parts]
        if min(rows, default=0) < 0 or sum(rows) > MAX_ROWS:
            raise TrainingError(
                f"the workers disagree about the number of rows: {reprlib.repr(rows)}"
            )
        plan = exchange_plan(rows, workers, seed=self.seed, epoch=epoch)
        offer = self.server.offered(epoch)
        if offer is None:
            mine = np.flatnonzero(owners == self.rank)
            if store.rows != plan[mine].sum():
                raise TrainingError(
                    f"rank {self.rank} has {store.rows} rows, but the other workers count "
                    f"{plan[mine].sum()}"
                )
            keys = [(self.seed, epoch, part) for part in mine.tolist()]
            offer = Offer(store, order, plan[mine], keys, keep=self.survives)
            self.server.offer(epoch, offer)
        counts = np.zeros(workers, dtype=np.int64)
        np.add.at(counts, owners, plan[:, self.rank])
        arrivals = _Arrivals(self.specs, received, counts)
        if offer.count(self.rank):
            arrivals.expect(self.rank, offer.shapes)
            arrivals.put(self.rank, offer.chunks(self.rank))
        offer.taken(self.rank)
        # Each worker starts with its neighbour, so that they do not all fetch from the same one.
        for peer in [*range(self.rank + 1, workers), *range(self.rank)]:
            if counts[peer]:
                self._fetch(peer, epoch, arrivals, everyone)
        self._rows = [[(rank, total)] for rank, total in enumerate(plan.sum(axis=0).tolist())]
        return _in_order_of_parts(owners, plan[:, self.rank])

    def _fetch(self, peer: int, epoch: int, arrivals: _Arrivals, everyone: Everyone) -> None:
        """Fetch one worker's rows, retrying if it may come back."""
        self._heard, told = time.monotonic(), False
        while True:
            try:
                self._fetch_once(peer, epoch, arrivals, everyone.row_servers)
                return
            except DisconnectedError as error:
                if not self.survives or time.monotonic() >= self._heard + self.deadline_s:
                    raise CollectiveError(
                        f"rank {self.rank} could not fetch its rows from rank {peer}: {error}. "
                        "Workers have to reach each other to exchange rows; where they cannot, set "
                        "shuffleRows='spark'",
                        ranks=(peer,),
                    ) from error
                if not told:
                    logger.warning(
                        "rank %d is waiting for rows from rank %d: %s", self.rank, peer, error
                    )
                    told = True
                time.sleep(RETRY_S)
                everyone = self.everyone()  # it may be back at another address
            except DeadlineError as error:
                raise CollectiveError(
                    f"no rows came from rank {peer} for {self.deadline_s:g} s while the "
                    "workers exchanged rows",
                    ranks=(peer,),
                ) from error

    def _fetch_once(
        self, peer: int, epoch: int, arrivals: _Arrivals, row_servers: Sequence[Any]
    ) -> None:
        found = (peer, row_servers, self.rank, self.token, self.deadline_s)
        connect = partial(connect_to, *found, encrypted=self.tls)
        try:
            connection = reach(connect, min(REACH_S, self.deadline_s))
        except DisconnectedError:
            raise
        except StoppedError as error:
            raise TrainingError(f"rank {peer} does not know the job's token") from error
        try:
            connection.send_header({"rows_for": self.rank, "epoch": epoch})
            answer = self._answer(connection)
            if "refused" in answer or answer.get("rows") != arrivals.count(peer):
                raise TrainingError(
                    f"rank {peer} has {arrivals.count(peer)} rows for rank {self.rank}, but "
                    f"answered {reprlib.repr(answer)} when they were fetched"
                )
            arrivals.expect(peer, answer.get("shapes"))
            arrivals.put(peer, self._received(connection, peer, arrivals))
            connection.send_header({"taken": True})
        finally:
            connection.close()

    def _answer(self, connection: Connection) -> dict[str, Any]:
        """The answer, which comes once the other worker has reached this exchange too."""
        until = time.monotonic() + self.deadline_s
        while "waiting" in (answer := connection.receive_header()):
            if time.monotonic() >= until:
                raise DeadlineError("it is itself waiting")
            self.on_rows(0)
        return answer

    def _received(
        self, connection: Connection, peer: int, arrivals: _Arrivals
    ) -> Iterable[list[Column]]:
        def receive(values: Tensor) -> None:
            connection.receive_values(values.view(-1))
            self._heard = time.monotonic()

        lengths = arrivals.empty_lengths(peer)
        for each in lengths:
            for piece in torch.split(each, LENGTHS_AT_ONCE):
                receive(piece)
        arrived = 0
        for chunk in arrivals.empty_chunks(peer, lengths):
            for column in chunk:
                receive(column.values if isinstance(column, Ragged) else column)
            arrived += len(chunk[0])
            self.on_rows(arrived)
            yield chunk


@dataclass(eq=False)
class _Arrivals:
    """Where each worker's rows belong in the receiving worker's store.

    Attributes:
        specs: the columns; lengths that only the data tell may be missing.
        store: the receiving store, empty.
        counts: how many rows come from each rank, by rank.
    """

    specs: tuple[ColumnSpec, ...]
    store: PartitionStore
    counts: np.ndarray
    _known: tuple[int, Any] | None = None

    def count(self, rank: int) -> int:
        """The number of rows that come from a rank."""
        return int(self.counts[rank])

    def expect(self, rank: int, shapes: Any) -> None:
        """Take note of the shapes of a rank's rows; the first call makes room.

        Raises:
            TrainingError: the columns cannot have those shapes, or other ranks' rows have others.
        """
        if not isinstance(shapes, list) or not _fit(shapes, self.specs):
            raise TrainingError(
                f"rank {rank} announced rows of shapes {reprlib.repr(shapes)}, which no worker "
                "of this job has"
            )
        if self._known is None:
            self._known = rank, shapes
            known = [
                replace(spec, row_shape=tuple(shape))
                for spec, shape in zip(self.specs, shapes, strict=True)
            ]
            self.store.create(known, int(self.counts.sum()))
        other, known_shapes = self._known
        if known_shapes != shapes:
            raise TrainingError(
                f"the workers have rows of different shapes: rank {other} "
                f"{reprlib.repr(known_shapes)}, rank {rank} {reprlib.repr(shapes)}"
            )

    def empty_lengths(self, rank: int) -> list[Tensor]:
        """Tensors for the lengths of a rank's rows, one for each column of unequal lengths."""
        return [
            torch.empty(self.count(rank), dtype=torch.int64)
            for spec in self.specs
            if spec.padding is not None
        ]

    def empty_chunks(self, rank: int, lengths: Sequence[Tensor]) -> Iterator[list[Column]]:
        """Room for a rank's rows, chunk by chunk.

        Args:
            rank: whose rows come.
            lengths: the tensors of ``empty_lengths``, filled with what the rank sent.

        Raises:
            TrainingError: no row can have such a length.
        """
        padded = [spec for spec in self.specs if spec.padding is not None]
        for spec, each in zip(padded, lengths, strict=True):
            item_bytes = math.prod(spec.item_shape) * spec.dtype.itemsize
            low, high = int(each.min()), int(each.max())
            if low < 0 or high * item_bytes > MAX_ROW_BYTES:
                raise TrainingError(
                    f"rank {rank} announced rows with {low} to {high} items in column "
                    f"'{spec.name}', which no worker of this job has"
                )
        sizes = chunk_sizes(self.count(rank), self.store.specs, lengths)
        cuts = zip(*(torch.split(each, sizes) for each in lengths), strict=True)
        for size, known in zip(sizes, cuts if lengths else repeat(()), strict=False):
            yield self.store.empty_packed(size, known)

    def put(self, rank: int, chunks: Iterable[list[Column]]) -> None:
        """Write a rank's rows."""
        first = int(self.counts[:rank].sum())
        for chunk in chunks:
            self.store.write(chunk, first)
            first += len(chunk[0])


def _in_order_of_parts(owners: np.ndarray, counts: np.ndarray) -> Tensor | None:
    """Where rows lie that come rank by rank, in the order of their parts; None if in that order.

    Args:
        owners: the rank that each part comes from, shape (parts,).
        counts: the rows of each part.
    """
    if (np.diff(owners) >= 0).all():
        return None
    as_they_come, starts = np.argsort(owners, kind="stable"), np.empty_like(counts)
    starts[as_they_come] = np.cumsum(counts[as_they_come]) - counts[as_they_come]
    shifts = starts - (np.cumsum(counts) - counts)
    return torch.from_numpy(np.arange(counts.sum()) + np.repeat(shifts, counts))


def _fit(shapes: list[Any], specs: Sequence[ColumnSpec]) -> bool:
    """Whether a row can have these shapes; the specs may leave lengths open."""
    return len(shapes) == len(specs) and all(
        isinstance(shape, list)
        and len(shape) == len(spec.row_shape)
        and (shape == list(spec.row_shape) if spec.padding is not None else _fits(shape, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )


def _fits(shape: list[Any], spec: ColumnSpec) -> bool:
    return (
        all(type(length) is int and length >= 0 for length in shape)
        and math.prod(shape) * spec.dtype.itemsize <= MAX_ROW_BYTES
        and all(
            known in (UNKNOWN, length) for length, known in zip(shape, spec.row_shape, strict=True)
        )
    )
