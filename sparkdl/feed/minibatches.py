"""From rows to minibatches on the device that trains, alongside its own work if it is a GPU."""

from __future__ import annotations

import ctypes
import functools
import math
import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from sparkdl.errors import ConfigError
from sparkdl.feed.arrival import Block
from sparkdl.feed.columns.ragged import Column, Ragged, cut, picked
from sparkdl.feed.columns.schema import BatchTransform, FeedSchema, bytes_of_rows, lengths_in
from sparkdl.feed.order import (
    GROUP_DRAWS,
    full_sizes,
    generator,
    grouped_by_length,
    stream_seed,
)
from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.protocols import Batch


@dataclass(frozen=True)
class DeviceChunk:
    """Tensors on their way to a device.

    Attributes:
        columns: with their values on the device.
        arrived: set on the device's own queue when the copies are complete; None if they are.
    """

    columns: list[Column]
    arrived: torch.cuda.Event | None = None

    def ready(self) -> list[Column]:
        """The columns, in the order of the current stream's work after their arrival."""
        if self.arrived is not None:
            tensors = [c.values if isinstance(c, Ragged) else c for c in self.columns]
            stream = torch.cuda.current_stream(tensors[0].device)
            stream.wait_event(self.arrived)
            for tensor in tensors:
                # They were allocated on the copying stream, which must not reuse them early.
                tensor.record_stream(stream)
        return self.columns


_copying: dict[torch.device, torch.cuda.Stream] = {}


def to_device(columns: Sequence[Column], device: torch.device) -> DeviceChunk:
    """Start to copy columns to a device.

    Args:
        columns: in pinned memory if the device is a GPU.
        device: where to.
    """
    if device.type != "cuda":
        return DeviceChunk([column.to(device) for column in columns])
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


T = TypeVar("T")

CHUNK_BYTES = 4 << 20
"""What is gathered from the store at a time, and then cut into minibatches: large enough that
Python's part is nothing, small enough for a core's cache."""
AHEAD = 2
"""Items that may be ready before anybody wants them."""


class _End:
    """Follows the last item; holds what ended the source, if that was an error."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(
    source: Iterable[T], *, ahead: int = AHEAD, close_s: float = math.inf
) -> Generator[T, None, None]:
    """Yield what ``source`` yields, made ahead of need in a thread of its own.

    The thread ends with the source, with an error in it, which is raised here, or when the iterator
    is closed.

    Args:
        source: used by that thread only.
        ahead: items that may be ready before anybody wants them.
        close_s: the longest that closing waits for the thread, in seconds; for sources that may be
            stuck, and that nobody else uses.
    """
    ready: queue.Queue[T | _End] = queue.Queue(ahead)
    closed = threading.Event()

    def put(item: T | _End) -> None:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in source:
                put(item)
                if closed.is_set():
                    return
        except BaseException as error:  # raised where the items are used
            put(_End(error))
        else:
            put(_End(None))

    thread = threading.Thread(target=make, name="sparkdl-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        closed.set()
        until = time.monotonic() + close_s
        while thread.is_alive() and time.monotonic() < until:
            if not ready.empty():
                ready.get_nowait()  # the thread may be waiting for room
            thread.join(0.01)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 64 << 20
"""The most memory that stays with the process after it was freed."""
MAPPED_BYTES = 32 << 20
"""Larger allocations go back at once; glibc takes no larger threshold."""


@functools.cache
def keep_freed_memory() -> None:
    """Keep freed memory in the process, if it has glibc.

    A minibatch is about a megabyte that is freed when the next one comes. glibc would give such
    memory back to the system each time, and the next minibatch would pay a page fault for every
    4 KiB of it: a fifth of a millisecond, measured as 2.5 % of a training step of 9 ms.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


class Minibatches:
    """Cuts rows into minibatches, on the device and as the user's function changes them.

    Args:
        schema: what the columns become.
        batch_size: rows per minibatch; the last of an epoch may have fewer.
        seed: of the job.
        rank: the worker's rank.
        device: where the minibatches are wanted.
        transform: changes each minibatch to train on.

    Attributes:
        mean_weight: what the rows' weights are divided by.
    """

    def __init__(
        self,
        schema: FeedSchema,
        batch_size: int,
        seed: int,
        rank: int,
        device: torch.device,
        transform: BatchTransform | None,
    ) -> None:
        self.mean_weight = 1.0
        self._schema = schema
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._device = device
        self._transform = transform

    def of_store(
        self, store: PartitionStore, order: Tensor, sizes: Iterable[int]
    ) -> Iterator[Batch]:
        """Yield minibatches of these sizes, which add up to the length of the order."""
        chunks = list(_chunked(sizes, CHUNK_BYTES // max(1, store.row_bytes)))
        on_gpu = self._device.type == "cuda"

        def gathered() -> Generator[DeviceChunk, None, None]:
            rows = torch.split(order, [sum(chunk) for chunk in chunks]) if chunks else ()
            for chosen in rows:
                yield to_device(store.take(chosen, pinned=on_gpu), self._device)

        # On a CPU the cores that would gather are those that compute, and the two threads would
        # wait for each other at Python's lock.
        with closing(prefetched(gathered()) if on_gpu else gathered()) as ready:
            left = len(chunks)
            for chunk, gathering in zip(chunks, ready, strict=True):
                columns, left = gathering.ready(), left - 1
                yield from self._cut(columns, chunk, last=not left)

    def of_blocks(
        self, blocks: Iterable[Block], *, drop_last: bool, group_by_length: bool
    ) -> Iterator[Batch]:
        """Yield minibatches of blocks of rows, each in an order of its own."""
        draws, group_draws = (
            generator(self._seed, 1, self._rank),
            generator(self._seed, 1, self._rank, GROUP_DRAWS),
        )
        on_gpu = self._device.type == "cuda"
        for block in blocks:
            rows = len(block.columns[0])
            order = torch.randperm(rows, generator=draws)
            if block.last and drop_last:
                order = order[: rows - rows % self._batch_size]
            sizes = list(full_sizes(len(order), self._batch_size))
            if group_by_length:
                row_bytes = bytes_of_rows(self._schema.stored, lengths_in(block.columns))
                assert isinstance(row_bytes, Tensor)
                order = grouped_by_length(order, row_bytes[order], sizes, group_draws)
            chosen = [picked(column, order, pinned=on_gpu) for column in block.columns]
            yield from self._cut(to_device(chosen, self._device).ready(), sizes, last=block.last)

    def _cut(self, columns: list[Column], sizes: list[int], *, last: bool) -> Iterator[Batch]:
        """Yield minibatches of these sizes; ``last`` says whether the epoch ends with them."""
        if self._schema.weight is not None:
            weights = columns[-1]
            assert isinstance(weights, Tensor)
            # Weights that float32 cannot hold are of the right size once they are scaled.
            columns[-1] = (weights.double() / self.mean_weight).float()
        cuts = (cut(column, sizes) for column in columns)
        for number, piece in enumerate(zip(*cuts, strict=True), start=1):
            yield self._schema.batch(piece, last=last and number == len(sizes))

    def changed(self, batches: Iterator[Batch], epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield minibatches as the user's function makes them, if there is one."""
        if self._transform is None:
            yield from batches
            return
        for index, batch in enumerate(batches, start=first_step):
            yield self._transformed(batch, epoch, index)

    def _transformed(self, batch: Batch, epoch: int, index: int) -> Batch:
        assert self._transform is not None
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(stream_seed(self._seed, epoch, self._rank, 1 + index))
            changed = self._transform(batch)
        if not isinstance(changed, Batch):
            raise ConfigError(
                f"batchTransform returns a {type(changed).__name__}; it takes and returns a Batch, "
                "for example dataclasses.replace(batch, features=...)"
            )
        return replace(changed, last=batch.last)


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
