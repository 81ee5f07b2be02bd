"""Reading a worker's rows, once: decoded, looked at and stored, one record batch after another.

They are trained on when the last one is there or, if the first epoch is streamed, in blocks while
others still arrive, each shuffled by itself. A block is handed out only once more rows have
arrived, or it is certain that none will, so that the last minibatch is known to be the last. The
same blocks can be had from the store afterwards: an interrupted worker goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from sparkdl.feed.columns.ragged import Column, joined, picked
from sparkdl.feed.columns.schema import FeedSchema, bytes_of_rows, lengths_in
from sparkdl.feed.order import block_sizes
from sparkdl.feed.record_batches.decode import (
    Decoded,
    decode,
    kept,
    small_parts,
    to_column,
    to_tensor,
)
from sparkdl.feed.record_batches.packed import ORDER_COLUMN
from sparkdl.feed.statistics.column import (
    COUNTS,
    ColumnStatistics,
    adds_nothing,
    scan,
    scan_least,
)
from sparkdl.feed.statistics.fingerprint import MODULUS, fingerprint, row_hashes
from sparkdl.feed.statistics.shards import ShardStatistics, unusable
from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.protocols import ColumnSpec

ORDER = ColumnSpec(ORDER_COLUMN, torch.int64)


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


class Reading:
    """A worker's rows on their way into its stores, once.

    Args:
        schema: what the columns become.
        rank: the worker's rank, for places in messages.
        training: receives the rows to train on.
        held_out: receives those to validate with.
        source: the rows; the columns of the schema, then perhaps ``ORDER_COLUMN``.
        on_rows: called after each part of a record batch with the rows read so far.
        batch_size: rows per minibatch, for blocks.
        drop_last: whether a last minibatch is left out if it is short.
        skip_invalid: whether rows whose features cannot be used are left out, not refused.

    Attributes:
        rows: how many were read so far, with those that were left out.
        complete: whether those are all.
        statistics: what was found in them, one per column of the schema.
        keys: by store, what its rows are sorted by if they have ``ORDER_COLUMN``: int64.
    """

    def __init__(
        self,
        schema: FeedSchema,
        rank: int,
        training: PartitionStore,
        held_out: PartitionStore,
        source: Iterable[pa.RecordBatch],
        on_rows: OnRows = lambda rows: None,
        *,
        batch_size: int = 1,
        drop_last: bool = False,
        skip_invalid: bool = False,
    ) -> None:
        self.rows = 0
        self._skip_invalid = skip_invalid
        self._skipped = 0
        self.complete = False
        self.statistics = tuple(ColumnStatistics() for _ in schema.columns)
        self.keys: dict[PartitionStore, list[Tensor]] = {training: [], held_out: []}
        self._schema = schema
        self._rank = rank
        self._training = training
        self._held_out = held_out
        self._on_rows = on_rows
        self._batch_size = batch_size
        self._needed_behind = batch_size if drop_last else 1
        self._weights: list[Tensor] = []
        self._fingerprints = {training: 0, held_out: 0}
        self._parts = self._read(source)
        self._waiting: list[list[Column]] = []
        self._rows_waiting = 0
        self._opening: int | None = None
        self._shown = self._shard()

    @property
    def sound(self) -> bool:
        """Whether each column can be what it is to become, as far as it has been read."""
        columns = zip(self.statistics, self._schema.columns, strict=True)
        return all(found.can_become(spec) for found, spec in columns)

    def rest(self) -> ShardStatistics:
        """Read every row that is left, without handing it out; returns what was found in all.

        Rows that cannot be trained on do not stop the reading, but from then on nothing is stored.
        """
        for _ in self._parts:
            self._on_rows(self.rows)
        self.complete = True
        self._shown = self._shard()
        return self._shown

    def first_block(self) -> ShardStatistics:
        """Read the first block; returns what was found, for a first look."""
        self._collect()
        if self._waiting:
            # The same rows whatever the record batches are: a checkpoint that is written before the
            # last row is there is recognized by them.
            opening = [column[: self._next_block()] for column in self._joined()]
            self._opening = fingerprint(opening)
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
        specs = self._training.specs
        pieces = (bytes_of_rows(specs, lengths_in(part)) for part in self._waiting)
        by_row = [piece for piece in pieces if isinstance(piece, Tensor)]
        # Rows without bytes stand for those to come: if those that wait do not fill a block, it
        # takes at least one more minibatch.
        more = torch.zeros(self._batch_size, dtype=torch.int64)
        row_bytes = torch.cat([*by_row, more]) if by_row else bytes_of_rows(specs, [])
        return block_sizes(self._rows_waiting + len(more), self._batch_size, row_bytes)[0]

    def _collect(self) -> None:
        """Read until a block can be handed out."""
        while (
            not self.complete
            and self.sound
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
            self._on_rows(self.rows)

    def _show(self, look: Look) -> None:
        shard, shown = self._shard(), self._shown
        if shard.complete != shown.complete or _is_news(shown.columns, shard.columns, self._schema):
            look(shard)
            self._shown = shard
        assert self.sound, "rows that cannot be tensors were not refused"

    def _take(self, rows: int) -> list[Column]:
        columns = self._joined()
        self._waiting = [[column[rows:] for column in columns]] if len(columns[0]) > rows else []
        self._rows_waiting -= rows
        return [column[:rows] for column in columns]

    def _joined(self) -> list[Column]:
        """The rows that wait, by column."""
        # What is left of a large part is one piece, and would be copied once for each block of it.
        return [joined(pieces) for pieces in zip(*self._waiting, strict=True)]

    def _shard(self) -> ShardStatistics:
        held_out = self._held_out.rows
        # Sorted, because a shuffle delivers the rows in any order and sums depend on it.
        weights = torch.cat(self._weights).sort().values if self._weights else None
        weight = 0.0 if weights is None else weights.sum().item()
        return ShardStatistics(
            self.rows - self._skipped - held_out,
            self.statistics,
            held_out,
            weight,
            self.complete,
            fingerprint=self._fingerprints[self._training],
            held_out_fingerprint=self._fingerprints[self._held_out],
            opening=self._opening,
            skipped=self._skipped,
        )

    def _read(self, source: Iterable[pa.RecordBatch]) -> Iterator[list[Column]]:
        """Read into the stores; yields the rows to train on, or no columns where there are none."""
        specs = self._schema.columns
        for record_batch in source:
            if record_batch.num_rows == 0:
                continue
            for columns in small_parts(record_batch.columns, specs):
                decoded = [decode(*pair) for pair in zip(columns[: len(specs)], specs, strict=True)]
                keys = columns[len(specs)] if len(columns) > len(specs) else None
                rows = len(columns[0])
                valid = self._valid(decoded, rows) if self._skip_invalid else None
                if valid is not None:
                    decoded = [kept(column, valid) for column in decoded]
                    keys = None if keys is None else keys.filter(pa.array(valid))
                self._scan(decoded)
                self.rows += rows
                none_left = valid is not None and not valid.any()
                yield self._store(decoded, keys) if self.sound and not none_left else []
        self._training.flush()
        self._held_out.flush()

    def _valid(self, decoded: list[Decoded], rows: int) -> np.ndarray | None:
        """Which rows have features that can be used, None for all; the others are counted."""
        count = len(self._schema.features)
        place = (self._rank, self.rows)
        valid, found = unusable(decoded[:count], self._schema.features, rows, place)
        features = (a + b for a, b in zip(self.statistics, found, strict=False))
        self.statistics = (*features, *self.statistics[count:])
        self._skipped += rows - int(valid.sum())
        return None if valid.all() else valid

    def _scan(self, decoded: list[Decoded]) -> None:
        place = (self._rank, self.rows)
        columns = zip(self.statistics, decoded, self._schema.columns, strict=True)
        self.statistics = tuple(
            known if adds_nothing(column, spec, known) else known + scan(column, spec, place)
            for known, column, spec in columns
        )
        if self._schema.weight is not None:
            index = len(self._schema.stored) - 1
            found = list(self.statistics)
            found[index] += scan_least(decoded[index], place)
            self.statistics = tuple(found)

    def _store(self, decoded: list[Decoded], keys: pa.Array | None) -> list[Column]:
        """Append a part's rows; returns those to train on."""
        schema = self._schema.of_lengths([column.longest for column in self.statistics])
        specs = schema.columns
        columns = [to_column(column.values, s) for column, s in zip(decoded, specs, strict=True)]
        by_content = keys is not None and pa.types.is_null(keys.type)
        if keys is not None and not by_content:
            columns.append(to_tensor(keys, ORDER))
        if schema.validation is None:
            return self._put(self._training, schema.stored, columns, by_content=by_content)
        indicator = columns.pop(len(schema.stored))
        assert isinstance(indicator, Tensor)
        held_out = indicator.bool()
        put: list[Column] = []
        for store, chosen in ((self._held_out, held_out), (self._training, ~held_out)):
            rows = chosen.nonzero()[:, 0]
            chosen_rows = [picked(column, rows) for column in columns] if len(rows) else []
            put = (
                self._put(store, schema.stored, chosen_rows, by_content=by_content)
                if chosen_rows
                else []
            )
        return put

    def _put(
        self,
        store: PartitionStore,
        specs: tuple[ColumnSpec, ...],
        columns: list[Column],
        *,
        by_content: bool,
    ) -> list[Column]:
        if len(columns) > len(specs):
            self.keys[store].append(_copied(columns.pop()))
        if self._schema.weight is not None and store is self._training:
            self._weights.append(_copied(columns[-1]))
        packed = store.append(specs, columns)
        hashes = row_hashes(
            packed, may_hold_nan=any(statistics.not_finite for statistics in self.statistics)
        )
        if by_content:
            self.keys[store].append(torch.from_numpy(hashes.view(np.int64)))
        found = int(hashes.sum(dtype=np.uint64))
        self._fingerprints[store] = (self._fingerprints[store] + found) % MODULUS
        return columns


def _copied(numbers: Column) -> Tensor:
    assert isinstance(numbers, Tensor)
    return numbers.clone()


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
