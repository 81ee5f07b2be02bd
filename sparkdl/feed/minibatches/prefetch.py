"""Make the next items while the last one is used: a thread, and a queue that bounds it."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Generator, Iterable
from typing import TypeVar

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
