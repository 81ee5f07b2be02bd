"""The feed: a worker's rows into the partition store once, then minibatches from it every epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from sparkdl.feed.columns.ragged import Column, joined, picked
from sparkdl.feed.columns.schema import BatchTransform, FeedSchema, bytes_of_rows, lengths_in
from sparkdl.feed.minibatches import Chunk, Minibatches, prefetched
from sparkdl.feed.order import (
    HELD_OUT,
    EpochOrder,
    block_sizes,
    even_sizes,
    full_sizes,
)
from sparkdl.feed.reading import Look, OnRows, Reading
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.process.allocator import keep_freed_memory
from sparkdl.protocols import Batch

READ_AHEAD = 8
"""Record batches, of 2 MiB each by default, that may wait while others are trained on."""

RowExchange = Callable[[PartitionStore, Tensor | None, PartitionStore, int], None]
"""(rows, their order, where the received rows go, the epoch that follows or ``HELD_OUT``); takes
ownership of the first."""


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """How a feed deals with its rows; the same on every worker.

    Attributes:
        drop_last: whether an epoch's last minibatch is left out if it is short.
        exchange_rows: whether the workers exchange all rows before the first epoch for which every
            row is there, so that their shards are random and equal.
        keep_exchanged: whether workers keep the rows that they had before that exchange, which
            takes as much room again: only then can a lost worker come back alone.
        reshuffle_every: epochs between further exchanges of rows; 0 for none.
        transform: changes each minibatch to train on.
        resident_bytes: how much of the store may be mapped at a time; None for no limit.
        stream_first_epoch: whether the first epoch trains on rows while others still arrive, each
            block of them shuffled by itself.
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
    resident_bytes: int | None = None
    stream_first_epoch: bool = False
    group_by_length: bool = False
    skip_invalid: bool = False

    def streams(self, epoch: int) -> bool:
        """Whether an epoch, counted from 1, trains on rows as they arrive."""
        return self.stream_first_epoch and epoch == 1

    @property
    def epochs_as_read(self) -> float:
        """Epochs before the first exchange, in which workers train on the rows that they read."""
        if self.exchange_rows:
            return 1 if self.stream_first_epoch else 0
        return self.reshuffle_every or math.inf

    def reshuffles(self, epoch: int) -> bool:
        """Whether rows are exchanged before an epoch, counted from 1."""
        every = self.reshuffle_every
        if self.exchange_rows and epoch == (2 if self.stream_first_epoch else 1):
            return True
        return bool(every) and epoch > 1 and (epoch - 1) % every == 0


class Feed:
    """A worker's rows, epoch after epoch; a context manager that removes the store at the end.

    The first epoch starts when the last row has arrived: only then are the data known to be sound,
    all workers' numbers of steps known, and the rows in an order that is the same in every run.
    Reading them first costs one pass at the speed of Spark's own transfer, where checking them in
    a pass of its own would cost the upstream computation a second time. Where nobody has to know
    the number of steps, ``stream_first_epoch`` trains on each block of rows as it arrives.

    Args:
        schema: what the columns become.
        batch_size: rows per minibatch; the last of an epoch may have fewer.
        seed: seed of the job; each (seed, epoch, rank) has its own permutation.
        rank: the worker's rank.
        directory: where the partition store may write.
        device: where the minibatches are wanted.
        options: the rest.
    """

    def __init__(
        self,
        schema: FeedSchema,
        *,
        batch_size: int,
        seed: int,
        rank: int,
        directory: Path,
        device: torch.device | str = "cpu",
        options: FeedOptions | None = None,
    ) -> None:
        self._schema = schema
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._directory = directory
        self._options = options or FeedOptions()
        self._training = self._new_store()
        self._held_out = self._new_store()
        self._source: Generator[pa.RecordBatch, None, None] | None = None
        self._reading = self._reading_of(())
        self._orders: dict[PartitionStore, Tensor | None] = {}
        self._exchanged_before = 0
        self._held_out_exchanged = False
        self._minibatches = Minibatches(
            schema, torch.device(device), self._options.transform, seed=seed, rank=rank
        )

    def __enter__(self) -> Feed:
        keep_freed_memory()
        return self

    def __exit__(self, *_: object) -> None:
        if self._source is not None:
            self._source.close()
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
            source: the rows, once; the columns of the schema, then perhaps ``ORDER_COLUMN``.
            on_rows: called after each part of a record batch with the rows read so far.
        """
        self._reading = self._reading_of(source, on_rows)
        return self._reading.rest()

    def read_first(
        self, source: Iterable[pa.RecordBatch], on_rows: OnRows = lambda rows: None
    ) -> ShardStatistics:
        """Read what the first epoch begins with: every row, or the first block if it is streamed.

        The arguments are those of ``fill``, without ``ORDER_COLUMN`` if the first epoch is
        streamed; what is returned says whether those are all rows.
        """
        if not self._options.stream_first_epoch:
            return self.fill(source, on_rows)
        # Spark's side reads on only while somebody takes what it has read.
        self._source = prefetched(source, ahead=READ_AHEAD, close_s=1.0)
        self._reading = self._reading_of(self._source, on_rows)
        return self._reading.first_block()

    def read_rest(self) -> ShardStatistics:
        """Read what ``read_first`` and ``arriving`` left; returns what was found in all rows."""
        return self._reading.rest()

    @property
    def complete(self) -> bool:
        """Whether every row was read."""
        return self._reading.complete

    def arriving(self, look: Look) -> Iterator[Batch]:
        """Yield what ``epoch(1)`` does, while its rows arrive; follows ``read_first``."""
        yield from self._minibatches.changed(self._minibatches.of_chunks(self._arriving(look)), 1)

    def _arriving(self, look: Look) -> Iterator[Chunk]:
        order = EpochOrder(self._seed, 1, self._rank)
        pinned = self._minibatches.on_gpu
        for block in self._reading.blocks(look):
            rows = len(block.columns[0])
            used = self._used_of(rows) if block.last else rows
            lengths = self._grouping(self._training, lengths_in(block.columns)) if used else None
            chosen = order.of_block(rows, used, lengths, self._sizes(used))
            columns = [picked(column, chosen, pinned=pinned) for column in block.columns]
            yield columns, list(self._sizes(used)), block.last

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

        Each epoch follows a permutation of the order that ``ORDER_COLUMN`` gives the rows, or
        without it their arrival.

        Those were trained on already, before an interruption. Epochs are counted from 1.
        """
        order = self._epoch_order(epoch)[first_step * self._batch_size :]
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
            self._training.create(self._schema.of_lengths(lengths).stored, 0)

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
        return self._used_of(self.rows)

    def _used_of(self, rows: int) -> int:
        return rows - (rows % self._batch_size if self._options.drop_last else 0)

    def _sizes(self, rows: int) -> Iterator[int]:
        return full_sizes(rows, self._batch_size)

    def _new_store(self) -> PartitionStore:
        return PartitionStore(self._directory, resident_bytes=self._options.resident_bytes)

    def _reading_of(
        self, source: Iterable[pa.RecordBatch], on_rows: OnRows = lambda rows: None
    ) -> Reading:
        return Reading(
            self._schema,
            self._rank,
            self._training,
            self._held_out,
            source,
            on_rows,
            batch_size=self._batch_size,
            drop_last=self._options.drop_last,
            skip_invalid=self._options.skip_invalid,
        )

    def _exchanged(self, old: PartitionStore, exchange: RowExchange, epoch: int) -> PartitionStore:
        new = self._new_store()
        try:
            exchange(old, self._order(old), new, epoch)
        except BaseException:
            new.close()
            raise
        del self._orders[old]
        return new

    def _order(self, store: PartitionStore) -> Tensor | None:
        """The rows' positions in the store, in their order, (rows,), int64; None if as stored."""
        if store not in self._orders:
            keys = self._reading.keys.pop(store, [])
            self._orders[store] = torch.argsort(torch.cat(keys), stable=True) if keys else None
        return self._orders[store]

    def _epoch_order(self, epoch: int, sizes: Sequence[int] | None = None) -> Tensor:
        """The positions in the store of an epoch's rows, shape (used rows,), int64."""
        store, order = self._training, self._order(self._training)
        blocks, lengths = [self.rows], None
        if self._options.streams(epoch):
            row_bytes = bytes_of_rows(store.specs, store.lengths())
            blocks = block_sizes(self.rows, self._batch_size, row_bytes)
        if self.used_rows:
            lengths = self._grouping(store, store.lengths())
            lengths = lengths if lengths is None or order is None else lengths[order]
        draws, first = EpochOrder(self._seed, epoch, self._rank), 0
        drawn: list[Column] = []
        for rows in blocks:
            used = min(rows, max(0, self.used_rows - first))
            of_block = None if lengths is None else lengths[first : first + rows]
            places = draws.of_block(rows, used, of_block, sizes or self._sizes(used))
            drawn.append(first + places if first else places)
            first += rows
        chosen = joined(drawn) if drawn else torch.arange(0)
        assert isinstance(chosen, Tensor)
        return chosen if order is None else order.index_select(0, chosen)

    def _grouping(self, store: PartitionStore, lengths: Sequence[Tensor]) -> Tensor | None:
        """By what rows are grouped into minibatches, shape (rows,); None if they are not."""
        if not self._options.group_by_length:
            return None
        row_bytes = bytes_of_rows(store.specs, lengths)
        assert isinstance(row_bytes, Tensor), "rows of equal length cannot be grouped by it"
        return row_bytes
