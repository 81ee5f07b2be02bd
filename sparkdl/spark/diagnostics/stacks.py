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
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a task's process imports no torch for this
    from sparkdl.spark.diagnostics.run_service import RunService
    from sparkdl.transport.channel import Channel

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


class ReportingWorker:
    """A worker that is connected to the driver; see ``service.Session``.

    Args:
        run: listens to it, and handles its end; it is connected to this.
        channel: its connection.

    Attributes:
        channel: as given.
        rank: the worker's rank, once it has said so.
        where: the rank, the host and the process, for messages.
        answer: to the last question; empty if it left instead.
    """

    def __init__(self, run: RunService, channel: Channel) -> None:
        self.channel, self.rank, self.where = channel, -1, ""
        self.answer = Future[str]()
        self.conversation = partial(run.listen, self)
        self.failed = self.left = partial(run.lost, self)
        self._connected = run.connected
        self._connected.append(self)

    def note_heartbeat(self) -> None:
        """Heartbeats do nothing: its silence is not timed."""

    def closed(self) -> None:
        """Handle the closing of the connection."""
        self._connected.remove(self)
        self.note("")

    def note(self, stacks: str) -> None:
        """Take its answer."""
        if not self.answer.done():
            self.answer.set_result(stacks[:MAX_CHARACTERS])


@dataclass(eq=False)
class Stacks:
    """The driver's end: asks workers what they are doing, from any thread.

    Attributes:
        connected: the workers that are connected.
        post: has something done in the service's thread.
    """

    connected: list[ReportingWorker]
    post: Callable[[Callable[[], None]], None]
    _asking: threading.Lock = field(default_factory=threading.Lock, init=False)

    def ask(self, ranks: Iterable[int] | None = None) -> str:
        """Ask connected workers, and wait up to ``ANSWER_S`` for their answers.

        Args:
            ranks: whom to ask; everyone by default.

        Returns:
            The stacks of each; empty if none is connected.
        """
        told = self._ask(ranks)
        return "\n".join(_tell(where, answer) for where, answer in told.values())

    def tops(self, ranks: Iterable[int]) -> dict[int, str]:
        """Ask connected workers which line their main threads are executing.

        Args:
            ranks: whom to ask.

        Returns:
            By rank: file, line, function and the line's text, or a note that it did not answer.
        """
        return {
            rank: _top(answer) if answer is not None else _tell(where, None)
            for rank, (where, answer) in self._ask(ranks).items()
        }

    def _ask(self, ranks: Iterable[int] | None) -> dict[int, tuple[str, str | None]]:
        """Where workers are, and their stacks, by rank; None for one that did not answer."""
        with self._asking:
            known = {worker.rank: worker for worker in self.connected.copy() if worker.where}
            wanted = sorted(known if ranks is None else known.keys() & set(ranks))
            asked = [known[rank] for rank in wanted]
            for worker in asked:
                worker.answer = Future()
                self.post(partial(worker.channel.send_header, {"stacks": True}))
            wait([worker.answer for worker in asked], ANSWER_S)
            # A worker that has left meanwhile was not stuck.
            return {
                worker.rank: (worker.where, answer)
                for worker in asked
                if (answer := worker.answer.result() if worker.answer.done() else None) != ""
            }


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
