"""Reading a worker's rows, once: decoded, looked at and stored, one record batch after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from sparkdl.feed.columns.ragged import Column, picked
from sparkdl.feed.columns.schema import FeedSchema
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
    ColumnStatistics,
    scan,
    scan_least,
)
from sparkdl.feed.statistics.fingerprint import MODULUS, row_hashes
from sparkdl.feed.statistics.shards import ShardStatistics, unusable
from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.protocols import ColumnSpec

ORDER = ColumnSpec(ORDER_COLUMN, torch.int64)


OnRows = Callable[[int], None]
"""Called with the number of rows read so far, for example to say that the worker is alive."""


class Reading:
    """A worker's rows on their way into its stores, once.

    Args:
        schema: what the columns become.
        rank: the worker's rank, for places in messages.
        training: receives the rows to train on.
        held_out: receives those to validate with.
        skip_invalid: whether rows whose features cannot be used are left out, not refused.

    Attributes:
        rows: how many were read so far, with those that were left out.
        statistics: what was found in them, one per column of the schema.
        keys: by store, what its rows are sorted by if they have ``ORDER_COLUMN``: int64.
    """

    def __init__(
        self,
        schema: FeedSchema,
        rank: int,
        training: PartitionStore,
        held_out: PartitionStore,
        *,
        skip_invalid: bool = False,
    ) -> None:
        self.rows = 0
        self._skip_invalid = skip_invalid
        self._skipped = 0
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

    def read(self, source: Iterable[pa.RecordBatch], on_rows: OnRows) -> ShardStatistics:
        """Read every row; returns what was found in them.

        Rows that cannot be trained on do not stop the reading, but from then on nothing is stored.

        Args:
            source: the rows; the columns of the schema, then perhaps ``ORDER_COLUMN``.
            on_rows: called after each part of a record batch with the rows read so far.
        """
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
                if self.sound and not none_left:
                    self._store(decoded, keys)
                on_rows(self.rows)
        self._training.flush()
        self._held_out.flush()
        return self._shard()

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
            fingerprint=self._fingerprints[self._training],
            held_out_fingerprint=self._fingerprints[self._held_out],
            skipped=self._skipped,
        )

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
            known + scan(column, spec, place) for known, column, spec in columns
        )
        if self._schema.weight is not None:
            index = len(self._schema.stored) - 1
            found = list(self.statistics)
            found[index] += scan_least(decoded[index], place)
            self.statistics = tuple(found)

    def _store(self, decoded: list[Decoded], keys: pa.Array | None) -> None:
        """Append a part's rows."""
        schema = self._schema.of_lengths([column.longest for column in self.statistics])
        specs = schema.columns
        columns = [to_column(column.values, s) for column, s in zip(decoded, specs, strict=True)]
        by_content = keys is not None and pa.types.is_null(keys.type)
        if keys is not None and not by_content:
            columns.append(to_tensor(keys, ORDER))
        if schema.validation is None:
            self._put(self._training, schema.stored, columns, by_content=by_content)
            return
        indicator = columns.pop(len(schema.stored))
        assert isinstance(indicator, Tensor)
        held_out = indicator.bool()
        for store, chosen in ((self._held_out, held_out), (self._training, ~held_out)):
            rows = chosen.nonzero()[:, 0]
            if len(rows):
                chosen_rows = [picked(column, rows) for column in columns]
                self._put(store, schema.stored, chosen_rows, by_content=by_content)

    def _put(
        self,
        store: PartitionStore,
        specs: tuple[ColumnSpec, ...],
        columns: list[Column],
        *,
        by_content: bool,
    ) -> None:
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


def _copied(numbers: Column) -> Tensor:
    assert isinstance(numbers, Tensor)
    return numbers.clone()
