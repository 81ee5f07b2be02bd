"""Reading a worker's rows, once: decoded, looked at and stored, one record batch after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from sparkdl.feed.column_statistics import (
    ColumnStatistics,
    places_from,
    scan,
)
from sparkdl.feed.decode import (
    Decoded,
    decode,
    kept,
    small_parts,
    to_column,
)
from sparkdl.feed.fingerprint import MODULUS, row_hashes
from sparkdl.feed.packed import ORDER_COLUMN, PLACE_COLUMN, POSITION_BITS
from sparkdl.feed.partition_store import PartitionStore
from sparkdl.feed.schema import Column, FeedSchema, picked
from sparkdl.feed.shards import Part, ShardStatistics, unusable
from sparkdl.protocols import ColumnSpec

OnRows = Callable[[int], None]
"""Called with the number of rows read so far, for example to say that the worker is alive."""


@dataclass(eq=False, repr=False)
class Reading:
    """A worker's rows on their way into its stores, once.

    Attributes:
        schema: what the columns become.
        rank: the worker's rank, for places in messages.
        training: receives the rows to train on.
        held_out: receives those to validate with.
        skip_invalid: whether rows whose features cannot be used are left out, not refused.
        by_partition: whether to tell how many rows each partition has.
        rows: how many were read so far, with those that were left out.
        statistics: what was found in them, one per column of the schema.
    """

    schema: FeedSchema
    rank: int
    training: PartitionStore
    held_out: PartitionStore
    _: KW_ONLY
    skip_invalid: bool = False
    by_partition: bool = False

    def __post_init__(self) -> None:
        self.rows = self._skipped = 0
        self.statistics = tuple(ColumnStatistics() for _ in self.schema.columns)
        stores = (self.training, self.held_out)
        self._places: dict[PartitionStore, list[np.ndarray]] = {each: [] for each in stores}
        self._keys: dict[PartitionStore, list[np.ndarray]] = {each: [] for each in stores}
        self._weights: list[np.ndarray] = []
        self._fingerprints = dict.fromkeys(stores, 0)

    @property
    def sound(self) -> bool:
        """Whether each column can be what it is to become, as far as it has been read."""
        columns = zip(self.statistics, self.schema.columns, strict=True)
        return all(found.can_become(spec) for found, spec in columns)

    def read(self, source: Iterable[pa.RecordBatch], on_rows: OnRows) -> ShardStatistics:
        """Read every row; returns what was found in them.

        Rows that cannot be trained on do not stop the reading, but from then on nothing is stored.

        Args:
            source: the rows; the columns of the schema, then perhaps ``PLACE_COLUMN`` and
                ``ORDER_COLUMN``.
            on_rows: called after each part of a record batch with the rows read so far.
        """
        specs = self.schema.columns
        for record_batch in source:
            if record_batch.num_rows == 0:
                continue
            others = record_batch.schema.names[len(specs) :]
            for columns in small_parts(record_batch.columns, specs):
                decoded = [decode(*pair) for pair in zip(columns[: len(specs)], specs, strict=True)]
                also = dict(zip(others, columns[len(specs) :], strict=True))
                places, keys = self._places_of(also, len(columns[0])), also.get(ORDER_COLUMN)
                valid = self._valid(decoded, places) if self.skip_invalid else None
                if valid is not None:
                    decoded = [kept(column, valid) for column in decoded]
                    keys = None if keys is None else keys.filter(pa.array(valid))
                self.statistics = tuple(
                    known + scan(column, spec, places, is_weight=spec is self.schema.weight)
                    for known, column, spec in zip(self.statistics, decoded, specs, strict=True)
                )
                self.rows += len(places)
                places = places if valid is None else places[valid]
                if self.sound and len(places):
                    self._store(decoded, places, keys)
                on_rows(self.rows)
        self.training.flush()
        self.held_out.flush()
        return self._shard()

    def take_order(self, store: PartitionStore) -> Tensor | None:
        """The positions of a store's rows, in the order that they have in every run; once.

        Returns:
            Shape (rows,), int64; None if they are stored in that order.
        """
        places, keys = self._places.pop(store, []), self._keys.pop(store, [])
        if not places:
            return None
        place = np.concatenate(places)
        if keys:
            order = np.lexsort((np.concatenate(keys), place >> POSITION_BITS))
        elif (place[1:] > place[:-1]).all():
            return None
        else:
            order = np.argsort(place, kind="stable")
        return torch.from_numpy(order)

    def _places_of(self, also: dict[str, pa.Array], rows: int) -> np.ndarray:
        """Where the next rows are; rows that do not say are a partition of this worker's."""
        if PLACE_COLUMN not in also:
            return places_from(self.rank, self.rows, rows)
        found: np.ndarray = also[PLACE_COLUMN].to_numpy()
        return found

    def _shard(self) -> ShardStatistics:
        held_out = self.held_out.rows
        parts = self._parts()
        return ShardStatistics(
            self.rows - self._skipped - held_out,
            self.statistics,
            held_out,
            sum((weight for *_, weight in parts), 0.0),
            parts=parts if self.by_partition else None,
            fingerprint=self._fingerprints[self.training],
            held_out_fingerprint=self._fingerprints[self.held_out],
            skipped=self._skipped,
        )

    def _parts(self) -> tuple[Part, ...]:
        """The rows by partition."""
        trained, held_out = self._by_number(self.training), self._by_number(self.held_out)
        weights: dict[int, float] = {}
        if self._weights:
            owners = np.concatenate(self._places[self.training]) >> POSITION_BITS
            # Sorted, because a shuffle delivers the rows in any order and sums depend on it.
            order = np.lexsort((found := np.concatenate(self._weights), owners))
            numbers, starts = np.unique(owners[order], return_index=True)
            cut = np.split(found[order], starts[1:])
            weights = {int(n): float(each.sum()) for n, each in zip(numbers, cut, strict=True)}
        return tuple(
            (number, trained.get(number, 0), held_out.get(number, 0), weights.get(number, 0.0))
            for number in sorted({*trained, *held_out})
        )

    def _by_number(self, store: PartitionStore) -> dict[int, int]:
        places = np.concatenate([np.empty(0, np.int64), *self._places[store]])
        numbers, rows = np.unique(places >> POSITION_BITS, return_counts=True)
        return dict(zip(numbers.tolist(), rows.tolist(), strict=True))

    def _valid(self, decoded: list[Decoded], places: np.ndarray) -> np.ndarray | None:
        """Which rows have features that can be used, None for all; the others are counted."""
        count, rows = len(self.schema.features), len(places)
        valid, found = unusable(decoded[:count], self.schema.features, places)
        features = (a + b for a, b in zip(self.statistics, found, strict=False))
        self.statistics = (*features, *self.statistics[count:])
        self._skipped += rows - int(valid.sum())
        return None if valid.all() else valid

    def _store(self, decoded: list[Decoded], places: np.ndarray, keys: pa.Array | None) -> None:
        """Append a part's rows."""
        schema = self.schema.of_lengths([column.longest for column in self.statistics])
        specs = schema.columns
        columns = [to_column(column.values, s) for column, s in zip(decoded, specs, strict=True)]
        by_content = keys is not None and pa.types.is_null(keys.type)
        known = [places] if keys is None or by_content else [places, keys.to_numpy()]
        if schema.validation is None:
            self._put(self.training, schema.stored, columns, known, by_content=by_content)
            return
        indicator = columns.pop(len(schema.stored))
        assert isinstance(indicator, Tensor)
        held_out = indicator.bool()
        for store, chosen in ((self.held_out, held_out), (self.training, ~held_out)):
            rows = chosen.nonzero()[:, 0]
            if len(rows):
                chosen_rows = [picked(column, rows) for column in columns]
                chosen_known = [each[rows.numpy()] for each in known]
                self._put(store, schema.stored, chosen_rows, chosen_known, by_content=by_content)

    def _put(
        self,
        store: PartitionStore,
        specs: tuple[ColumnSpec, ...],
        columns: list[Column],
        known: list[np.ndarray],
        *,
        by_content: bool,
    ) -> None:
        if self.schema.weight is not None and store is self.training:
            weights = columns[-1]
            assert isinstance(weights, Tensor)
            self._weights.append(weights.numpy().copy())
        packed = store.append(specs, columns)
        hashes = row_hashes(
            packed, may_hold_nan=any(statistics.not_finite for statistics in self.statistics)
        )
        places, *keys = known
        self._places[store].append(places.copy())  # not to keep the record batch
        self._keys[store] += (
            [hashes.view(np.int64)] if by_content else [each.copy() for each in keys]
        )
        found = int(hashes.sum(dtype=np.uint64))
        self._fingerprints[store] = (self._fingerprints[store] + found) % MODULUS
