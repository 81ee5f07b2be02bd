"""Plans which worker gets which rows, and serves a worker's rows to those that fetch them.

Each fetch has its own connection; an exchange serves the rows that the worker had before it:

    worker that fetches                       worker that serves
    {"rows_for": rank, "epoch": epoch} ---->  wait until this worker has come to that exchange
                                       <----  {"waiting": true}, now and then
                                       <----  {"rows": how many, "shapes": of a row's columns}
                                       <----  their lengths, of each column of unequal lengths
                                       <----  their values, chunk by chunk
    {"taken": true}                    ---->
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import math
import reprlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import DeadlineError, DisconnectedError, TrainingError
from sparkdl.feed.order import HELD_OUT, full_sizes, stream_seed
from sparkdl.feed.partition_store import PartitionStore
from sparkdl.feed.schema import Column, Ragged, bytes_of_rows
from sparkdl.protocols import ColumnSpec
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.transport.connection import Connection
from sparkdl.transport.port import Port

CHUNK_BYTES = 1 << 20
"""How much is sent at once: small enough to be in a core's cache still when it is sent after being
gathered, and when it is written after being received."""
LENGTHS_AT_ONCE = CHUNK_BYTES // 8
"""How many lengths of rows are sent at once."""
WAITING_S = 1.0
"""Seconds between two heartbeats to a worker that waits for rows."""


@dataclass(eq=False)
class Offer:
    """The rows that one worker had before an exchange, and which of them each worker gets.

    Attributes:
        store: the rows; owned from here on.
        order: the order that they have in every run, shape (rows,), int64; None for the stored
            order.
        counts: how many rows of each of its parts each rank gets, shape (parts, ranks).
        keys: for each part (seed, epoch, its number), which determines who gets which rows.
        keep: whether rows may be asked for again after everyone has them.
    """

    store: PartitionStore
    order: Tensor | None
    counts: np.ndarray
    keys: Sequence[tuple[int, int, int]]
    keep: bool = field(kw_only=True)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _shares: list[np.ndarray] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._by_rank: list[int] = self.counts.sum(axis=0).tolist()
        self._missing = {rank for rank, count in enumerate(self._by_rank) if count}

    @property
    def world_size(self) -> int:
        """Number of ranks that can get rows."""
        return len(self._by_rank)

    @property
    def shapes(self) -> list[list[int]] | None:
        """Shape of one row in each column; None if this worker has seen no rows."""
        return [list(spec.row_shape) for spec in self.store.specs] or None

    def count(self, rank: int) -> int:
        """How many rows a rank gets."""
        return self._by_rank[rank]

    def chunks(self, rank: int) -> Iterator[list[Column]]:
        """A rank's rows, as from ``PartitionStore.take_packed``, ``CHUNK_BYTES`` at a time."""
        if not self._by_rank[rank]:
            return
        rows = self._rows_of(rank)
        sizes = chunk_sizes(len(rows), self.store.specs, self.store.lengths(rows))
        for chosen in torch.split(rows, sizes):
            yield self.store.take_packed(chosen)

    def lengths(self, rank: int) -> list[Tensor]:
        """Lengths of a rank's rows in each column of unequal lengths, shape (rows,), int64."""
        return self.store.lengths(self._rows_of(rank)) if self._by_rank[rank] else []

    def taken(self, rank: int) -> None:
        """Take note that a rank has received its rows."""
        with self._lock:
            self._missing.discard(rank)
            if self._missing:
                return
            # Frees 8 bytes per row; computed again for a worker that comes back.
            self._shares = None
            if not self.keep:
                self.store.close()

    def _rows_of(self, rank: int) -> Tensor:
        with self._lock:
            if self._shares is None:
                self._shares = self._shared()
            share = torch.from_numpy(self._shares[rank])
        return share if self.order is None else self.order[share]

    def _shared(self) -> list[np.ndarray]:
        """The rows that each rank gets, part by part."""
        starts = self.counts.sum(axis=1).cumsum() - self.counts.sum(axis=1)
        by_part = [
            [start + share for share in shares(counts.tolist(), key=key)]
            for start, counts, key in zip(starts, self.counts, self.keys, strict=True)
        ]
        return [np.concatenate(of_rank) for of_rank in zip(*by_part, strict=True)]


class RowServer:
    """Serve one worker's rows to the others until closed; a context manager.

    Args:
        host: the address at which the others reach this worker.
        token: the job's secret, which both ends of each connection prove that they know.
        deadline_s: the longest for which others wait here for rows, in seconds.
        tls: whether the rows are encrypted in transit.
        visit: serves a connection on which something other than rows is asked for, given the
            connection and the request; without it, such requests are refused.

    Attributes:
        address: where it listens, as ``connect_to`` reads it: JSON for the other workers.
    """

    def __init__(
        self,
        host: str,
        token: str,
        deadline_s: float,
        *,
        tls: bool = False,
        visit: Callable[[Connection, dict[str, Any]], None] | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        self._visit = visit
        self._condition = threading.Condition()
        self._offers: dict[int, Offer] = {}
        self._closed = False
        self._port = Port(host, token, self._serve, encrypted=tls)
        self.address: list[Any] = [host, self._port.number, self._port.fingerprint]

    def __enter__(self) -> RowServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(self, epoch: int, offer: Offer) -> None:
        """Let others fetch the rows from before an exchange.

        Args:
            epoch: the epoch that follows the exchange, or ``HELD_OUT``.
            offer: the rows.
        """
        with self._condition:
            self._offers[epoch] = offer
            self._condition.notify_all()

    def offered(self, epoch: int) -> Offer | None:
        """What was offered before, for a worker that goes through the same exchange again."""
        return self._offers.get(epoch)

    def close(self) -> None:
        """Stop serving, and give up the rows."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._port.close()
        for offer in self._offers.values():
            offer.store.close()

    def _serve(self, connection: Connection) -> None:
        """Serve one fetch; called in a thread of the port, which expects lost connections."""
        with contextlib.suppress(DisconnectedError, DeadlineError):
            try:
                self._answer(connection)
            except TrainingError as error:
                connection.send_header({"refused": str(error)})

    def _answer(self, connection: Connection) -> None:
        asked = connection.receive_header()
        if self._visit is not None and "rows_for" not in asked:
            self._visit(connection, asked)
            return
        rank, epoch = asked.get("rows_for"), asked.get("epoch")
        if type(rank) is not int or type(epoch) is not int or epoch < HELD_OUT:
            raise TrainingError(f"{reprlib.repr(asked)} is not a request for rows")
        offer = self._wait_for(epoch, connection)
        if offer is None:
            return
        if rank not in range(offer.world_size):
            raise TrainingError(f"there is no rank {reprlib.repr(rank)} to send rows to")
        connection.send_header({"rows": offer.count(rank), "shapes": offer.shapes})
        for lengths in offer.lengths(rank):
            for piece in torch.split(lengths, LENGTHS_AT_ONCE):
                connection.send_values(piece)
        for chunk in offer.chunks(rank):
            for column in chunk:
                values = column.values if isinstance(column, Ragged) else column
                connection.send_values(values.view(-1))
        if "taken" in connection.receive_header():
            offer.taken(rank)

    def _wait_for(self, epoch: int, connection: Connection) -> Offer | None:
        """The rows from before an exchange, once this worker has reached it; None if it has not."""
        until = time.monotonic() + self._deadline_s
        while (left := until - time.monotonic()) > 0:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._closed or epoch in self._offers, timeout=min(left, WAITING_S)
                )
                if self._closed or epoch in self._offers:
                    return self._offers.get(epoch)
            # Fails as soon as nobody is waiting at the other end.
            connection.send_header({"waiting": True})
        return None


def chunk_sizes(rows: int, specs: Sequence[ColumnSpec], lengths: Sequence[Tensor]) -> list[int]:
    """How many rows are sent in each chunk; both ends compute the same.

    Args:
        rows: how many rows are sent in all.
        specs: their columns.
        lengths: the rows' lengths in each column of unequal lengths, shape (rows,).
    """
    row_bytes = bytes_of_rows(specs, lengths)
    if not isinstance(row_bytes, Tensor):
        return list(full_sizes(rows, max(1, CHUNK_BYTES // max(1, row_bytes))))
    reached = row_bytes.cumsum(0)
    stops, so_far = [0], 0
    while stops[-1] < rows:
        # As many rows as it takes to reach the size, whatever follows them.
        last = int(torch.searchsorted(reached, so_far + CHUNK_BYTES))
        stops.append(min(rows, last + 1))
        so_far = int(reached[last]) if last < len(reached) else 0
    return [stop - start for start, stop in itertools.pairwise(stops)]


def connect_to(
    rank: int, addresses: Sequence[Any], me: int, token: str, silence_s: float, *, encrypted: bool
) -> Connection:
    """Connect to where another worker serves its rows, as ``ServiceAddress.connect`` does.

    Args:
        rank: whose rows are wanted.
        addresses: what all workers reported, by rank.
        me: the rank that wants them.
        token: the job's secret.
        silence_s: the longest that one message may make no progress, in seconds.
        encrypted: whether the rows have to be encrypted.

    Raises:
        TrainingError: no worker of this job reports such an address.
    """
    told = addresses[rank] if rank < len(addresses) else None
    kinds = (str, int, str if encrypted else type(None))
    if (
        not isinstance(told, list)
        or tuple(map(type, told)) != kinds
        or told[1] not in range(1, 1 << 16)
        or not _is_address(told[0])
        or (encrypted and not told[2].isascii())
    ):
        raise TrainingError(
            f"rank {rank} gave {reprlib.repr(told)} as the address of its rows, which "
            "is not an address"
        )
    host, port, fingerprint = told
    address = ServiceAddress(host, port, token, fingerprint)
    return address.connect(me, f"rank {rank}", silence_s)


def _is_address(host: str) -> bool:
    """Whether a host is a numeric address, and not a name that would have to be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


DRAWABLE = 999_999_999
"""The most items that numpy draws from without replacement."""


def exchange_plan(rows: Sequence[int], workers: int, *, seed: int, epoch: int) -> np.ndarray:
    """How many rows of each part each worker gets, so that all have the same number afterwards.

    The counts are those of a redistribution in which every assignment of rows to workers is equally
    likely: part by part, the multivariate hypergeometric distribution of its rows over the places
    that are still free. Of more than ``DRAWABLE`` rows, several are drawn together.

    Args:
        rows: of each part: a partition, or what a worker has of one.
        workers: how many there are.
        seed: the job's seed.
        epoch: the epoch that follows, or ``HELD_OUT``.

    Returns:
        Shape (parts, workers), int64. Row sums are ``rows``; column sums differ by one at most.
    """
    total = sum(rows)
    share, left_over = divmod(total, workers)
    free = np.full(workers, share)
    free[:left_over] += 1
    drawn = np.random.Generator(np.random.PCG64(stream_seed(seed, epoch, 0, 1)))
    plan = np.zeros((len(rows), workers), dtype=np.int64)
    for size in sorted({max(1, math.ceil(total / DRAWABLE)), 1}, reverse=True):
        places = (free - plan.sum(axis=0)) // size
        for part, count in enumerate((np.array(rows) - plan.sum(axis=1)) // size):
            # "marginals" draws in O(workers), whatever the number of rows.
            drawn_rows = drawn.multivariate_hypergeometric(
                places, min(count, places.sum()), method="marginals"
            )
            places -= drawn_rows
            plan[part] += size * drawn_rows
    return plan


def shares(counts: Sequence[int], *, key: tuple[int, int, int]) -> list[np.ndarray]:
    """Which rows of a part each worker gets: every choice is equally likely.

    Args:
        counts: how many go to each rank, by rank.
        key: (seed, epoch, number of the part).

    Returns:
        For each rank the rows that it gets, shape (count,), int64, ascending.
    """
    target = np.repeat(np.arange(len(counts), dtype=np.min_scalar_type(len(counts))), counts)
    np.random.Generator(np.random.PCG64(stream_seed(*key, 2))).shuffle(target)
    # A stable sort of such short integers is a radix sort.
    return np.split(np.argsort(target, kind="stable"), np.cumsum(counts)[:-1])
