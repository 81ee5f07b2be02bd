"""A few threads for what may block, not joined at interpreter exit as an executor's are."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

EXIT_S = 5.0
"""Seconds that an exiting process gives to jobs that would end by themselves."""

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonPool:
    """Run jobs, in the order in which they come, on at most ``size`` threads named ``name``."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.threads, self._closed = list[threading.Thread](), False
        _pools.add(self)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Submit a job; it is cancelled if the pool has been closed."""
        future: Future[T] = Future()
        with self._lock:
            if not self._closed:
                if (number := len(self.threads)) < self._size:
                    name = f"{self._name}_{number}"
                    thread = threading.Thread(target=self._run, name=name, daemon=True)
                    thread.start()
                    self.threads.append(thread)
                self._jobs.put((future, job))
            else:
                future.cancel()
        return future

    def close(self, *, cancel: bool = False) -> None:
        """Take no more jobs, and wait for none; ``cancel`` those that have not begun."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while cancel:
                    if (waiting := self._jobs.get_nowait()) is not None:
                        waiting[0].cancel()
            for _ in self.threads:  # each takes one, once the remaining jobs are taken
                self._jobs.put(None)

    def _run(self) -> None:
        while (taken := self._jobs.get()) is not None:
            future, job = taken
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(job())
            except BaseException as error:  # for whoever waits for the future
                future.set_exception(error)
            del future, job, taken  # an idle thread keeps nothing alive


_pools: weakref.WeakSet[DaemonPool] = weakref.WeakSet()


@atexit.register
def _let_end() -> None:
    until, threads = time.monotonic() + EXIT_S, []
    for pool in list(_pools):
        pool.close()
        threads += pool.threads
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
