"""Rows that are trained on while others still arrive: the first epoch, if it is streamed.

The rows come in blocks, each shuffled by itself. A block is handed out only once more rows have
arrived, or it is certain that none will, so that the last minibatch is known to be the last. The
same blocks can be had from the store afterwards (``block_order``): an interrupted worker goes on
from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdl.feed.columns.ragged import Column, joined
from sparkdl.feed.columns.schema import FeedSchema, bytes_of_rows, lengths_in
from sparkdl.feed.order import block_rows, block_sizes
from sparkdl.feed.reading import Reading
from sparkdl.feed.statistics.column import COUNTS, ColumnStatistics
from sparkdl.feed.statistics.fingerprint import fingerprint
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.feed.store.partition_store import PartitionStore

OnRows = Callable[[int], None]
"""Called with the number of rows read so far, for example to say that the worker is alive."""

Look = Callable[[ShardStatistics], None]
"""Shows what was found so far to whoever decides if it can be trained on; returns if it can."""


@dataclass(frozen=True)
class Block:
    """Rows that arrived one after another.

    Attributes:
        columns: one per ``stored`` column of the schema, of n rows.
        last: whether no minibatch will be trained on after those of this block.
    """

    columns: list[Column]
    last: bool


class Arrivals:
    """A worker's rows, block by block while they are read into its store.

    Args:
        schema: what the columns become.
        reading: reads them.
        parts: what its ``parts`` yields.
        on_rows: called after each part with the rows read so far.
        training: where it puts the rows to train on.
        batch_size: rows per minibatch.
        drop_last: whether a last minibatch is left out if it is short.
    """

    def __init__(
        self,
        schema: FeedSchema,
        reading: Reading,
        parts: Iterator[list[Column]],
        on_rows: OnRows,
        training: PartitionStore,
        *,
        batch_size: int,
        drop_last: bool,
    ) -> None:
        self.complete = False
        self._schema = schema
        self._reading = reading
        self._parts = parts
        self._on_rows = on_rows
        self._training = training
        self._batch_size = batch_size
        self._needed_behind = batch_size if drop_last else 1
        self._waiting: list[list[Column]] = []
        self._rows_waiting = 0
        self._shown: ShardStatistics | None = None
        self._opening: int | None = None

    def first(self) -> ShardStatistics:
        """Read the first block; returns what was found, for a first look."""
        self._collect()
        if self._waiting:
            # The same rows whatever the record batches are: a checkpoint that is written before the
            # last row is there is recognized by them.
            opening = [column[: self._next_block()] for column in self._joined()]
            self._opening = fingerprint(opening)
        self._shown = self._shard()
        return self._shown

    def rest(self) -> ShardStatistics:
        """Read what is left without handing it out; returns what was found in all."""
        for _ in self._parts:
            self._on_rows(self._reading.rows)
        self.complete = True
        self._shown = self._shard()
        return self._shown

    def blocks(self, look: Look) -> Iterator[Block]:
        """Yield every row to train on once, as they arrive.

        Args:
            look: called before rows that could be refused are handed out, and before the last
                block with what was found in all rows.
        """
        while True:
            self._collect()
            self._show(look)
            while self._rows_waiting:
                size = min(self._next_block(), self._rows_waiting)
                left = self._rows_waiting - size
                if not self.complete and left < self._needed_behind:
                    break
                last = left < self._needed_behind
                yield Block(self._take(size), last)
                if last:
                    return
            if self.complete:
                return

    def _next_block(self) -> int:
        """Rows of the next block; more than are waiting if it takes more."""
        pieces = (bytes_of_rows(self._schema.stored, lengths_in(part)) for part in self._waiting)
        by_row = [piece for piece in pieces if isinstance(piece, Tensor)]
        if not by_row:
            return block_rows(self._batch_size, self._training.row_bytes)
        # Rows without bytes stand for those to come: if those that wait do not fill a block, it
        # takes at least one more.
        more = torch.cat([*by_row, torch.zeros(self._batch_size, dtype=torch.int64)])
        return block_sizes(len(more), self._batch_size, more)[0]

    def _shard(self) -> ShardStatistics:
        return replace(self._reading.shard(complete=self.complete), opening=self._opening)

    def _collect(self) -> None:
        """Read until a block can be handed out."""
        while (
            not self.complete
            and self._reading.sound
            and (not self._waiting or self._rows_waiting < self._next_block() + self._needed_behind)
        ):
            part = next(self._parts, None)
            if part is None:
                self.complete = True
                return
            if part:
                self._waiting.append(part)
                self._rows_waiting += len(part[0])
            # Last, for it may raise, and the rows have to be there for whoever goes on.
            self._on_rows(self._reading.rows)

    def _show(self, look: Look) -> None:
        shard, shown = self._shard(), self._shown
        assert shown is not None
        if shard.complete != shown.complete or _is_news(shown.columns, shard.columns, self._schema):
            look(shard)
            self._shown = shard
        assert self._reading.sound, "rows that cannot be tensors were not refused"

    def _take(self, rows: int) -> list[Column]:
        columns = self._joined()
        self._waiting = [[column[rows:] for column in columns]] if len(columns[0]) > rows else []
        self._rows_waiting -= rows
        return [column[:rows] for column in columns]

    def _joined(self) -> list[Column]:
        """The rows that wait, by column."""
        # What is left of a large part is one piece, and would be copied once for each block of it.
        return [joined(pieces) for pieces in zip(*self._waiting, strict=True)]


def _is_news(
    before: Sequence[ColumnStatistics], now: Sequence[ColumnStatistics], schema: FeedSchema
) -> bool:
    """Whether something was found since that may have to be refused.

    Of integers and labels, new extremes as well: classes and indices that a model may not have.
    """
    labels = {spec.name for spec in schema.labels}
    return any(
        any(getattr(new, name) and not getattr(old, name) for name in COUNTS)
        or (old.shortest, old.longest) != (new.shortest, new.longest)
        or (
            (spec.name in labels or not spec.dtype.is_floating_point)
            and (old.smallest, old.largest) != (new.smallest, new.largest)
        )
        for old, new, spec in zip(before, now, schema.columns, strict=True)
    )
