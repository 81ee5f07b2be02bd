"""The feed: a worker's rows into the partition store once, then minibatches from it every epoch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import torch
from torch import Tensor

from sparkdl.feed.columns import ORDER_COLUMN, FeedSchema, to_tensor
from sparkdl.feed.facts import ColumnFacts, ShardFacts, look_at
from sparkdl.feed.store import PartitionStore
from sparkdl.protocols import Batch, ColumnSpec

ORDER = ColumnSpec(ORDER_COLUMN, torch.int64)


class Feed:
    """A worker's rows, epoch after epoch; a context manager that removes the store at the end.

    The first epoch starts when the last row has arrived: only then are the data known to be sound,
    all workers' numbers of steps known, and the rows in an order that is the same in every run.
    Reading them first costs one pass at the speed of Spark's own transfer, where checking them in
    a pass of its own would cost the upstream computation a second time.

    Args:
        schema: what the columns become.
        batch_size: rows a minibatch; the last of an epoch may have fewer.
        seed: seed of the job; each (seed, epoch, rank) has its own permutation.
        rank: the worker's rank.
        directory: where the partition store may write.
    """

    def __init__(
        self, schema: FeedSchema, *, batch_size: int, seed: int, rank: int, directory: Path
    ) -> None:
        self._schema = schema
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._store = PartitionStore(directory)
        self._order: Tensor | None = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._store.close()

    def fill(
        self,
        source: Iterable[pa.RecordBatch],
        on_rows: Callable[[int], None] = lambda rows: None,
    ) -> ShardFacts:
        """Read every row into the store, looking at it on the way.

        Rows that cannot be trained on do not stop the reading; the counts of them are the answer.

        Args:
            source: the rows, once; the columns of the schema, then perhaps ``ORDER_COLUMN``.
            on_rows: called after each record batch with the rows read so far.

        Returns:
            What was found; an epoch may follow only if every column is sound.
        """
        rows = 0
        facts = [ColumnFacts() for _ in self._schema.columns]
        for record_batch in source:
            if record_batch.num_rows == 0:
                continue
            columns = record_batch.columns[: len(facts)]
            facts = list(map(operator.add, facts, map(look_at, columns, self._schema.columns)))
            if all(column.sound for column in facts):
                self._append(record_batch, [column.longest for column in facts])
            rows += record_batch.num_rows
            on_rows(rows)
        return ShardFacts(rows, tuple(facts))

    def epoch(self, epoch: int, *, first_step: int = 0) -> Iterator[Batch]:
        """Yield every row once, but for those of the minibatches before ``first_step``.

        Epoch 1 keeps the order of ``ORDER_COLUMN``, or without it that of arrival; later ones
        follow a permutation of it.

        Args:
            epoch: counted from 1.
            first_step: minibatches that were trained on already, before an interruption.
        """
        rows, columns = self._store.rows, self._columns()
        order = self._order
        if epoch > 1:
            shuffled = permutation(rows, seed=self._seed, epoch=epoch, rank=self._rank)
            order = shuffled if order is None else order[shuffled]
        for start in range(first_step * self._batch_size, rows, self._batch_size):
            stop = min(start + self._batch_size, rows)
            if order is None:
                taken = [column[start:stop] for column in columns]
            else:
                indices = order[start:stop]
                taken = [column.index_select(0, indices) for column in columns]
            yield Batch(tuple(taken[:-1]), taken[-1], last=stop == rows)

    def _append(self, record_batch: pa.RecordBatch, lengths: list[int | None]) -> None:
        specs = list(self._schema.of_lengths(lengths).columns)
        if record_batch.num_columns > len(specs):
            specs.append(ORDER)
        arrays = record_batch.columns
        self._store.append(
            specs, [to_tensor(values, spec) for values, spec in zip(arrays, specs, strict=True)]
        )

    def _columns(self) -> list[Tensor]:
        columns = self._store.tensors()
        if len(columns) > len(self._schema.columns):
            keys = columns.pop()
            if self._order is None:
                self._order = torch.argsort(keys, stable=True)
        return columns


def permutation(rows: int, *, seed: int, epoch: int, rank: int) -> Tensor:
    """The order in which a worker sees its rows in one epoch.

    Args:
        rows: how many there are.
        seed: the job's seed.
        epoch: counted from 1.
        rank: the worker's rank.

    Returns:
        Shape (rows,), int64, a permutation of 0 to rows - 1.
    """
    generator = torch.Generator()
    # One stream a (seed, epoch, rank): multiplying by odd constants keeps neighbours apart.
    mixed = seed * 0x9E3779B97F4A7C15 + epoch * 0xC2B2AE3D27D4EB4F + rank * 0x165667B19E3779F9
    generator.manual_seed(mixed % (1 << 63))
    return torch.randperm(rows, generator=generator)
