"""What is made ahead of need: minibatches' rows on their way to a GPU, and record batches."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from sparkdl.feed.columns.ragged import Column, Ragged


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


T = TypeVar("T")

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
