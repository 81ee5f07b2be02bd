"""Reading a worker's rows: decoded, looked at and stored, one record batch after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from sparkdl.feed.columns.ragged import Column, picked
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.record_batches.decode import Decoded, decode, to_column, to_tensor
from sparkdl.feed.record_batches.packed import ORDER_COLUMN
from sparkdl.feed.statistics.column import ColumnStatistics, adds_nothing, scan, scan_least
from sparkdl.feed.statistics.fingerprint import MODULUS, row_hashes
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.protocols import ColumnSpec

ORDER = ColumnSpec(ORDER_COLUMN, torch.int64)
DECODED_BYTES = 64 << 20
"""The most bytes that rows are decoded into at a time; images are far larger than their files."""


class Reading:
    """A worker's rows on their way into its stores, once.

    Args:
        schema: what the columns become.
        rank: the worker's rank, for places in messages.
        training: receives the rows to train on.
        held_out: receives those to validate with.

    Attributes:
        rows: how many were read so far.
        statistics: what was found in them, one per column of the schema.
        keys: by store, what its rows are sorted by if they have ``ORDER_COLUMN``: int64.
    """

    def __init__(
        self, schema: FeedSchema, rank: int, training: PartitionStore, held_out: PartitionStore
    ) -> None:
        self.rows = 0
        self.statistics = tuple(ColumnStatistics() for _ in schema.columns)
        self.keys: dict[PartitionStore, list[Tensor]] = {training: [], held_out: []}
        self._schema = schema
        self._rank = rank
        self._training = training
        self._held_out = held_out
        self._weights: list[Tensor] = []
        self._fingerprints = {training: 0, held_out: 0}

    @property
    def sound(self) -> bool:
        """Whether each column can be what it is to become, as far as it has been read."""
        columns = zip(self.statistics, self._schema.columns, strict=True)
        return all(found.can_become(spec) for found, spec in columns)

    def parts(self, source: Iterable[pa.RecordBatch]) -> Iterator[list[Column]]:
        """Read every row into the stores, looking at it on the way.

        Rows that cannot be trained on do not stop the reading, but from then on nothing is stored.

        Args:
            source: the rows, once; the columns of the schema, then perhaps ``ORDER_COLUMN``.

        Yields:
            The rows to train on, as they arrive, one column per ``stored`` column of the schema; no
            columns where there are no rows.
        """
        specs = self._schema.columns
        for record_batch in source:
            if record_batch.num_rows == 0:
                continue
            for columns in _parts(record_batch, specs):
                decoded = [decode(*pair) for pair in zip(columns[: len(specs)], specs, strict=True)]
                self._scan(decoded)
                self.rows += len(columns[0])
                keys = columns[len(specs)] if len(columns) > len(specs) else None
                yield self._store(decoded, keys) if self.sound else []
        self._training.flush()
        self._held_out.flush()

    def shard(self, *, complete: bool = True) -> ShardStatistics:
        """What was found in the rows that were read.

        Args:
            complete: whether those are all.
        """
        held_out = self._held_out.rows
        # Sorted, because a shuffle delivers the rows in any order and sums depend on it.
        weights = torch.cat(self._weights).sort().values if self._weights else None
        weight = 0.0 if weights is None else weights.sum().item()
        return ShardStatistics(
            self.rows - held_out,
            self.statistics,
            held_out,
            weight,
            complete,
            fingerprint=self._fingerprints[self._training],
            held_out_fingerprint=self._fingerprints[self._held_out],
        )

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


def _parts(record_batch: pa.RecordBatch, specs: tuple[ColumnSpec, ...]) -> Iterator[list[pa.Array]]:
    """The columns of a record batch, cut so that what they are decoded into stays small."""
    columns = record_batch.columns
    elements = max(
        spec.encoding.grown_elements(values, spec.row_shape)
        for values, spec in zip(columns, specs, strict=False)  # the order has no spec
    )
    rows = max(1, DECODED_BYTES // (8 * elements)) if elements else record_batch.num_rows
    if rows >= record_batch.num_rows:
        yield columns
        return
    for start in range(0, record_batch.num_rows, rows):
        yield [values.slice(start, rows) for values in columns]
