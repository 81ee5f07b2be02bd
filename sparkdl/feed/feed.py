"""The feed: a worker's rows into the partition store once, then minibatches from it every epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from sparkdl.feed.minibatches import Minibatches
from sparkdl.feed.order import (
    HELD_OUT,
    epoch_order,
    even_sizes,
    full_sizes,
)
from sparkdl.feed.partition_store import PartitionStore
from sparkdl.feed.reading import OnRows, Reading
from sparkdl.feed.schema import BatchTransform, FeedSchema, bytes_of_rows
from sparkdl.feed.shards import ShardStatistics
from sparkdl.process.torch_settings import keep_freed_memory
from sparkdl.protocols import Batch

RowExchange = Callable[[PartitionStore, Tensor | None, PartitionStore, int], Tensor | None]
"""(rows, their order, where the received rows go, the epoch that follows or ``HELD_OUT``); takes
ownership of the first, and returns the order of the received rows."""


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """How a feed deals with its rows; the same on every worker.

    Attributes:
        drop_last: whether an epoch's last minibatch is left out if it is short.
        exchange_rows: whether the workers exchange all rows before the first epoch, so that their
            shards are random and equal.
        keep_exchanged: whether workers keep the rows that they had before that exchange, which
            takes as much room again: only then can a lost worker come back alone.
        reshuffle_every: epochs between further exchanges of rows; 0 for none.
        transform: changes each minibatch to train on.
        group_by_length: whether rows of about equal length share a minibatch, where some columns
            are padded.
        skip_invalid: whether rows whose features cannot be used (not decodable, null, NaN or
            infinite) are left out, not refused.
    """

    drop_last: bool = False
    exchange_rows: bool = False
    keep_exchanged: bool = True
    reshuffle_every: int = 0
    transform: BatchTransform | None = None
    group_by_length: bool = False
    skip_invalid: bool = False

    @property
    def epochs_as_read(self) -> float:
        """Epochs before the first exchange, in which workers train on the rows that they read."""
        return 0 if self.exchange_rows else self.reshuffle_every or math.inf

    def reshuffles(self, epoch: int) -> bool:
        """Whether rows are exchanged before an epoch, counted from 1."""
        every = self.reshuffle_every
        if epoch == 1:
            return self.exchange_rows
        return bool(every) and (epoch - 1) % every == 0


@dataclass(eq=False, repr=False)
class Feed:
    """A worker's rows, epoch after epoch; a context manager that removes the store at the end.

    The first epoch starts when the last row has arrived: only then are the data known to be sound,
    all workers' numbers of steps known, and the rows in an order that is the same in every run.
    Reading them first costs one pass at the speed of Spark's own transfer, where checking them in
    a pass of its own would cost the upstream computation a second time.

    Attributes:
        schema: what the columns become.
        batch_size: rows per minibatch; the last of an epoch may have fewer.
        seed: seed of the job; each (seed, epoch, rank) has its own permutation.
        rank: the worker's rank.
        directory: where the partition store may write.
        device: where the minibatches are wanted.
        options: the rest.
    """

    schema: FeedSchema
    _: KW_ONLY
    batch_size: int
    seed: int
    rank: int
    directory: Path
    device: torch.device | str = "cpu"
    options: FeedOptions = field(default_factory=FeedOptions)

    def __post_init__(self) -> None:
        self._training, self._held_out = self._new_store(), self._new_store()
        self._reading = Reading(
            self.schema,
            self.rank,
            self._training,
            self._held_out,
            skip_invalid=self.options.skip_invalid,
            by_partition=self.options.exchange_rows,
        )
        self._orders: dict[PartitionStore, Tensor | None] = {}
        self._exchanged_before, self._held_out_exchanged = 0, False
        device, transform = torch.device(self.device), self.options.transform
        self._minibatches = Minibatches(
            self.schema, device, transform, seed=self.seed, rank=self.rank
        )

    def __enter__(self) -> Feed:
        keep_freed_memory()
        return self

    def __exit__(self, *_: object) -> None:
        self._training.close()
        self._held_out.close()

    @property
    def rows(self) -> int:
        """Rows to train on."""
        return self._training.rows

    @property
    def held_out_rows(self) -> int:
        """Rows to validate with."""
        return self._held_out.rows

    def fill(
        self, source: Iterable[pa.RecordBatch], on_rows: OnRows = lambda rows: None
    ) -> ShardStatistics:
        """Read every row into the store, looking at it on the way.

        Rows that cannot be trained on do not stop the reading; the counts of them are the answer.
        An epoch may follow only if every column is sound.

        Args:
            source: the rows, once; the columns of the schema, then perhaps ``PLACE_COLUMN`` and
                ``ORDER_COLUMN``.
            on_rows: called after each part of a record batch with the rows read so far.
        """
        return self._reading.read(source, on_rows)

    def scale_weights(self, mean: float) -> None:
        """Divide the rows' weights by their mean over all workers' rows to train on.

        The loss of a minibatch is then the mean of its weighted rows, whose expectation is the
        weighted mean over the data; contributions stay weighted by examples, and a learning rate
        means the same whatever the weights' unit.
        """
        self._minibatches.mean_weight = mean

    def reshuffle(self, epoch: int, exchange: RowExchange) -> None:
        """Exchange the rows to train on with the other workers, all before the same epochs.

        Does nothing if the rows were exchanged before that epoch already, by a worker that was
        interrupted since.
        """
        if epoch <= self._exchanged_before:
            return
        self._training = self._exchanged(self._training, exchange, epoch)
        self._exchanged_before = epoch

    def exchange_held_out(self, exchange: RowExchange) -> bool:
        """Exchange the rows to validate with, once: where rows are sorted one worker has them all.

        All workers call it before they first validate; returns whether they were exchanged now.
        """
        if self._held_out_exchanged:
            return False
        self._held_out = self._exchanged(self._held_out, exchange, HELD_OUT)
        self._held_out_exchanged = True
        return True

    def epoch(self, epoch: int, *, first_step: int = 0) -> Iterator[Batch]:
        """Yield every row to train on once, but for those of the minibatches before ``first_step``.

        Each epoch follows a permutation of the order that ``PLACE_COLUMN`` and ``ORDER_COLUMN``
        give the rows, or without them their arrival.

        Those were trained on already, before an interruption. Epochs are counted from 1.
        """
        order = self._epoch_order(epoch)[first_step * self.batch_size :]
        batches = self._minibatches.of_store(self._training, order, self._sizes(len(order)))
        yield from self._minibatches.changed(batches, epoch, first_step)

    def even_epoch(self, epoch: int, steps: int) -> Generator[Batch, None, None]:
        """Yield every row to train on once, in a given number of minibatches of ``even_sizes``.

        If there are more minibatches than rows, some are empty; the order is that of ``epoch``.
        """
        sizes = [even_sizes(self.rows, step, steps) for step in range(steps)]
        yield from self._minibatches.of_store(
            self._training, self._epoch_order(epoch, sizes), sizes
        )

    def settle(self, lengths: Sequence[int | None]) -> None:
        """Learn from others how long arrays are, by column; without rows a worker cannot know."""
        if not self._training.specs:
            self._training.create(self.schema.of_lengths(lengths).stored, 0)

    def held_out(self) -> Iterator[Batch]:
        """Yield every row to validate with once, always in the same order."""
        store = self._held_out
        order = self._order(store)
        if order is None:
            order = torch.arange(store.rows)
        if store.rows and (lengths := self._grouping(store, store.lengths())) is not None:
            order = order[torch.argsort(lengths[order], stable=True)]
        yield from self._minibatches.of_store(store, order, self._sizes(len(order)))

    @property
    def used_rows(self) -> int:
        """Rows that an epoch trains on: all, but for those that ``drop_last`` leaves out."""
        return self.rows - (self.rows % self.batch_size if self.options.drop_last else 0)

    def _sizes(self, rows: int) -> Iterator[int]:
        return full_sizes(rows, self.batch_size)

    def _new_store(self) -> PartitionStore:
        return PartitionStore(self.directory)

    def _exchanged(self, old: PartitionStore, exchange: RowExchange, epoch: int) -> PartitionStore:
        new = self._new_store()
        try:
            self._orders[new] = exchange(old, self._order(old), new, epoch)
        except BaseException:
            new.close()
            raise
        del self._orders[old]
        return new

    def _order(self, store: PartitionStore) -> Tensor | None:
        """The rows' positions in the store, in their order, (rows,), int64; None if as stored."""
        if store not in self._orders:
            self._orders[store] = self._reading.take_order(store)
        return self._orders[store]

    def _epoch_order(self, epoch: int, sizes: Sequence[int] | None = None) -> Tensor:
        """The positions in the store of an epoch's rows, shape (used rows,), int64."""
        store, order = self._training, self._order(self._training)
        lengths = None
        if self.used_rows:
            lengths = self._grouping(store, store.lengths())
            lengths = lengths if lengths is None or order is None else lengths[order]
        sizes = list(sizes or self._sizes(self.used_rows))
        chosen = epoch_order(self.seed, epoch, self.rank, self.rows, self.used_rows, sizes, lengths)
        return chosen if order is None else order.index_select(0, chosen)

    def _grouping(self, store: PartitionStore, lengths: Sequence[Tensor]) -> Tensor | None:
        """By what rows are grouped into minibatches, shape (rows,); None if they are not."""
        if not self.options.group_by_length:
            return None
        row_bytes = bytes_of_rows(store.specs, lengths)
        assert isinstance(row_bytes, Tensor), "rows of equal length cannot be grouped by it"
        return row_bytes
