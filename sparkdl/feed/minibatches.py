"""From rows to minibatches on the device that trains, made ahead of need for a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from sparkdl.errors import ConfigError
from sparkdl.feed.order import stream_seed
from sparkdl.feed.partition_store import PartitionStore
from sparkdl.feed.schema import BatchTransform, Column, FeedSchema, Ragged, cut
from sparkdl.protocols import Batch

CHUNK_BYTES = 4 << 20
"""What is gathered from the store at a time, and then cut into minibatches: large enough that
Python's part is nothing, small enough for a core's cache."""


@dataclass(frozen=True)
class DeviceChunk:
    """Columns on their way to a GPU.

    Attributes:
        columns: with their values on the device.
        arrived: set on the device's own queue when the copies are complete.
    """

    columns: list[Column]
    arrived: torch.cuda.Event

    def ready(self) -> list[Column]:
        """The columns, in the order of the current stream's work after their arrival."""
        tensors = [c.values if isinstance(c, Ragged) else c for c in self.columns]
        stream = torch.cuda.current_stream(tensors[0].device)
        stream.wait_event(self.arrived)
        for tensor in tensors:
            # They were allocated on the copying stream, which must not reuse them early.
            tensor.record_stream(stream)
        return self.columns


_copying: dict[torch.device, torch.cuda.Stream] = {}


def to_gpu(columns: Sequence[Column], device: torch.device) -> DeviceChunk:
    """Start to copy columns, which are in pinned memory, to a GPU."""
    if device not in _copying:
        _copying[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = _copying[device]
    with torch.cuda.stream(stream):
        moved = [
            column.to(device)
            if isinstance(column, Ragged)
            else column.to(device, non_blocking=True)
            for column in columns
        ]
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(stream)
    return DeviceChunk(moved, arrived)


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

        def gathered() -> Iterator[tuple[list[Column], list[int], bool]]:
            chunks = list(_chunked(sizes, CHUNK_BYTES // max(1, store.row_bytes)))
            first = 0
            for number, chunk in enumerate(chunks, start=1):
                rows = order[first : first + sum(chunk)]
                first += len(rows)
                yield store.take(rows, pinned=self.on_gpu), chunk, number == len(chunks)

        # On a CPU the cores that would gather are those that compute, and the two threads would
        # wait for each other at Python's lock.
        if not self.on_gpu:
            for columns, chunk, last in gathered():
                yield from self._cut(columns, chunk, last=last)
            return

        def moved() -> Iterator[tuple[DeviceChunk, list[int], bool]]:
            for columns, chunk, last in gathered():
                yield to_gpu(columns, self.device), chunk, last

        with closing(prefetched(moved())) as ready:
            for on_device, chunk, last in ready:
                yield from self._cut(on_device.ready(), chunk, last=last)

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


T = TypeVar("T")

AHEAD = 2
"""Items that may be ready before anybody wants them."""


_END = object()
"""Follows the last item."""


def prefetched(source: Iterable[T]) -> Generator[T, None, None]:
    """Yield what ``source`` yields, made ahead of need in a thread of its own.

    The thread ends with the source, with an error in it, which is raised here, or when the iterator
    is closed.

    Args:
        source: used by that thread only.
    """
    items = iter(source)
    with ThreadPoolExecutor(1, thread_name_prefix="sparkdl-prefetch") as pool:
        ready = deque(pool.submit(next, items, _END) for _ in range(AHEAD))
        try:
            while (item := ready.popleft().result()) is not _END:
                ready.append(pool.submit(next, items, _END))
                yield cast(T, item)
        finally:
            for each in ready:
                each.cancel()
