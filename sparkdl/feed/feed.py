"""The feed: minibatches from a stream of record batches in epoch 1, from the store afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import torch
from torch import Tensor

from sparkdl.feed.columns import FeedSchema, to_tensor
from sparkdl.feed.store import PartitionStore
from sparkdl.protocols import Batch


class Feed:
    """A worker's rows, epoch after epoch; a context manager that removes the store at the end.

    Args:
        source: the rows, once; columns in the order of ``schema.columns``.
        schema: what the columns become.
        batch_size: rows a minibatch; the last of an epoch may have fewer.
        seed: seed of the job; each (seed, epoch, rank) has its own permutation.
        rank: the worker's rank.
        directory: where the partition store may write.
    """

    def __init__(
        self,
        source: Iterable[pa.RecordBatch],
        schema: FeedSchema,
        *,
        batch_size: int,
        seed: int,
        rank: int,
        directory: Path,
    ) -> None:
        self._source = source
        self._schema = schema
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._store = PartitionStore(schema.columns, directory)

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._store.close()

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield every row once.

        Epoch 1 keeps the order of arrival and fills the store; later ones follow a permutation of
        their own.

        Args:
            epoch: counted from 1.
        """
        pieces = self._stream() if epoch == 1 else self._shuffled(epoch)
        held: list[Tensor] | None = None
        for piece in pieces:
            if held is not None:
                yield self._batch(held, last=False)
            held = piece
        if held is not None:
            yield self._batch(held, last=True)

    def _batch(self, columns: list[Tensor], *, last: bool) -> Batch:
        *features, targets = columns
        return Batch(tuple(features), targets, last)

    def _stream(self) -> Iterator[list[Tensor]]:
        rest: list[Tensor] = []
        for record_batch in self._source:
            columns = [
                to_tensor(record_batch.column(index), spec)
                for index, spec in enumerate(self._schema.columns)
            ]
            self._store.append(columns)
            if rest and len(rest[0]):
                columns = [torch.cat(pair) for pair in zip(rest, columns, strict=True)]
            whole = len(columns[0]) - len(columns[0]) % self._batch_size
            for start in range(0, whole, self._batch_size):
                yield [column[start : start + self._batch_size] for column in columns]
            rest = [column[whole:] for column in columns]
        if rest and len(rest[0]):
            yield rest

    def _shuffled(self, epoch: int) -> Iterator[list[Tensor]]:
        columns = self._store.tensors()
        order = permutation(self._store.rows, seed=self._seed, epoch=epoch, rank=self._rank)
        for start in range(0, len(order), self._batch_size):
            indices = order[start : start + self._batch_size]
            yield [column.index_select(0, indices) for column in columns]


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
