"""What the workers are doing, asked from the driver: the stacks of all their threads.

    driver                          worker
    {"stacks": true}        ------>
                            <------ {"stacks": text}

The question travels on the connection that carries what a worker prints, and a dedicated thread
answers it. A process that is stopped, or in which native code holds the GIL, cannot answer; in the
latter case ``kill -USR1`` on the worker's host writes its stacks to the executor's log.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

ANSWER_S = 2.0
"""Seconds that workers have to answer."""
MAX_CHARACTERS = 20_000
"""The most characters of one worker's answer."""
THREAD = "thread "
"""Precedes the name of each thread."""


def describe_threads() -> str:
    """The stacks of all threads of this process except the calling one, the main thread's first."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: (thread is not main, thread.name))
    parts = []
    for thread in threads:
        if thread is not threading.current_thread() and thread.ident in frames:
            lines = "".join(traceback.format_stack(frames[thread.ident]))
            parts.append(f"{THREAD}{thread.name}, most recent call last:\n{lines}")
    return "".join(parts).rstrip()[:MAX_CHARACTERS]


def write_threads_on_signal() -> None:
    """Write the stacks to this process's standard error on SIGUSR1, unless that has a handler."""
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL and sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True, chain=False)


class _Worker(NamedTuple):
    """A worker that can be asked."""

    where: str
    ask: Callable[[], None]


class Stacks:
    """The driver's end: asks workers what they are doing, from any thread."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._condition = threading.Condition()
        self._workers: dict[int, _Worker] = {}
        self._answers: dict[int, str] = {}

    @contextmanager
    def of(self, rank: int, joined: Mapping[str, Any], ask: Callable[[], None]) -> Iterator[None]:
        """Let a worker be asked for as long as it is connected.

        Args:
            rank: the worker's rank.
            joined: the header with which it joined; it has the worker's host and process ID.
            ask: sends it the question.
        """
        where = f"rank {rank} on {joined.get('host')}, process {joined.get('pid')}"
        worker = _Worker(where, ask)
        with self._condition:
            self._workers[rank] = worker
        try:
            yield
        finally:
            with self._condition:
                if self._workers.get(rank) is worker:
                    del self._workers[rank]
                self._condition.notify_all()

    def note(self, rank: int, text: str) -> None:
        """Take a worker's answer."""
        with self._condition:
            self._answers[rank] = text[:MAX_CHARACTERS]
            self._condition.notify_all()

    def ask(self, ranks: Iterable[int] | None = None) -> str:
        """Ask connected workers, and wait up to ``ANSWER_S`` for their answers.

        Args:
            ranks: whom to ask; everyone by default.

        Returns:
            The stacks of each; empty if none is connected.
        """
        told = self._ask(ranks)
        return "\n".join(_tell(worker.where, answer) for worker, answer in told.values())

    def tops(self, ranks: Iterable[int]) -> dict[int, str]:
        """Ask connected workers which line their main threads are executing.

        Args:
            ranks: whom to ask.

        Returns:
            By rank: file, line, function and the line's text, or a note that it did not answer.
        """
        return {
            rank: _top(answer) if answer is not None else _tell(worker.where, None)
            for rank, (worker, answer) in self._ask(ranks).items()
        }

    def _ask(self, ranks: Iterable[int] | None) -> dict[int, tuple[_Worker, str | None]]:
        """Workers and their stacks, by rank; None for one that did not answer."""
        with self._asking:
            with self._condition:
                self._answers.clear()
                wanted = self._workers.keys() if ranks is None else set(ranks)
                asked = {
                    rank: self._workers[rank] for rank in sorted(wanted & self._workers.keys())
                }
            for worker in asked.values():
                worker.ask()
            until = time.monotonic() + ANSWER_S
            with self._condition:
                self._condition.wait_for(
                    lambda: asked.keys() & self._workers.keys() <= self._answers.keys(),
                    timeout=until - time.monotonic(),
                )
                answers = dict(self._answers)
                # A worker that has left meanwhile was not stuck.
                stayed = [rank for rank in asked if rank in answers or rank in self._workers]
        return {rank: (asked[rank], answers.get(rank)) for rank in stayed}


def _top(stacks: str) -> str:
    """The last lines of the first thread in a text by ``describe_threads``."""
    first = stacks.partition(f"\n{THREAD}")[0]
    frames = [line.strip() for line in first.splitlines()]
    starts = [index for index, line in enumerate(frames) if line.startswith("File ")]
    return ": ".join(frames[starts[-1] : starts[-1] + 2]) if starts else first


def _tell(where: str, answer: str | None) -> str:
    if answer is not None:
        return f"{where}:\n{answer}"
    process = where.rpartition(" ")[2]
    return (
        f"{where} did not answer within {ANSWER_S:g} s: it is stopped or cut off, or native "
        f"code holds Python's lock; kill -USR1 {process} on its host writes its stacks to the "
        "executor's log"
    )
