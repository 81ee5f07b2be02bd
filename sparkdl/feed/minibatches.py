"""From rows to minibatches on the device that trains, alongside its own work if it is a GPU."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdl.errors import ConfigError
from sparkdl.feed.columns.ragged import Column, cut
from sparkdl.feed.columns.schema import BatchTransform, FeedSchema
from sparkdl.feed.order import stream_seed
from sparkdl.feed.prefetch import DeviceChunk, prefetched, to_gpu
from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.protocols import Batch

CHUNK_BYTES = 4 << 20
"""What is gathered from the store at a time, and then cut into minibatches: large enough that
Python's part is nothing, small enough for a core's cache."""
Chunk = tuple[list[Column], list[int], bool]
"""Rows, how many each of their minibatches has, and whether the epoch ends with them."""


@dataclass(eq=False)
class Minibatches:
    """Cuts rows into minibatches on a device.

    Attributes:
        schema: what the columns become.
        device: where the minibatches are wanted.
        transform: changes each minibatch to train on.
        seed: of the job.
        rank: the worker's rank.
        mean_weight: what the rows' weights are divided by.
    """

    schema: FeedSchema
    device: torch.device
    transform: BatchTransform | None
    seed: int
    rank: int
    mean_weight: float = 1.0

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, which fetches rows from pinned memory."""
        return self.device.type == "cuda"

    def of_store(
        self, store: PartitionStore, order: Tensor, sizes: Iterable[int]
    ) -> Iterator[Batch]:
        """Yield minibatches of these sizes, which add up to the length of the order."""

        def gathered() -> Iterator[Chunk]:
            chunks = list(_chunked(sizes, CHUNK_BYTES // max(1, store.row_bytes)))
            first = 0
            for number, chunk in enumerate(chunks, start=1):
                rows = order[first : first + sum(chunk)]
                first += len(rows)
                yield store.take(rows, pinned=self.on_gpu), chunk, number == len(chunks)

        return self.of_chunks(gathered(), ahead=True)

    def of_chunks(self, chunks: Iterable[Chunk], *, ahead: bool = False) -> Iterator[Batch]:
        """Yield the minibatches of chunks of rows, which may be made ``ahead`` for a GPU."""
        # On a CPU the cores that would gather are those that compute, and the two threads would
        # wait for each other at Python's lock.
        if not self.on_gpu:
            for columns, sizes, last in chunks:
                yield from self._cut(columns, sizes, last=last)
            return

        def moved() -> Generator[tuple[DeviceChunk, list[int], bool], None, None]:
            for columns, sizes, last in chunks:
                yield to_gpu(columns, self.device), sizes, last

        with closing(prefetched(moved()) if ahead else moved()) as ready:
            for chunk, sizes, last in ready:
                yield from self._cut(chunk.ready(), sizes, last=last)

    def _cut(self, columns: list[Column], sizes: list[int], *, last: bool) -> Iterator[Batch]:
        if self.schema.weight is not None:
            weights = columns[-1]
            assert isinstance(weights, Tensor)
            # Weights that float32 cannot hold are of the right size once they are scaled.
            columns[-1] = (weights.double() / self.mean_weight).float()
        cuts = (cut(column, sizes) for column in columns)
        for number, piece in enumerate(zip(*cuts, strict=True), start=1):
            yield self.schema.batch(piece, last=last and number == len(sizes))

    def changed(self, batches: Iterator[Batch], epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield minibatches as the user's function makes them, if there is one."""
        if self.transform is None:
            yield from batches
            return
        for index, batch in enumerate(batches, start=first_step):
            with torch.random.fork_rng(devices=[self.device] if self.on_gpu else []):
                torch.manual_seed(stream_seed(self.seed, epoch, self.rank, 1 + index))
                changed = self.transform(batch)
            if not isinstance(changed, Batch):
                raise ConfigError(
                    f"batchTransform returns a {type(changed).__name__}; it takes and returns a "
                    "Batch, for example dataclasses.replace(batch, features=...)"
                )
            yield replace(changed, last=batch.last)


def _chunked(sizes: Iterable[int], rows: int) -> Iterator[list[int]]:
    """Group minibatches into chunks of at most so many rows, or of one minibatch."""
    chunk: list[int] = []
    total = 0
    for size in sizes:
        if chunk and total + size > rows:
            yield chunk
            chunk, total = [], 0
        chunk.append(size)
        total += size
    if chunk:
        yield chunk
