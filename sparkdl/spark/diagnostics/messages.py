"""What workers send to the services in the driver: their table, checks and queue.

A mistake by a token holder must not become a hang, so whatever is not in the table is an error
that shows it. Rows' statistics and gathered objects are read by ``averager.messages``, as in a fit.
"""

from __future__ import annotations

import queue
import reprlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sparkdl.errors import DataError, TrainingError, WorkerError

MOST_UNREAD = 64
"""The most unread items of one rank."""
MOST_UNREAD_BYTES = 1 << 20
"""Their most bytes, approximately."""
_NUMBER_BYTES = 64


class Lines(NamedTuple):
    """What a rank has printed since it last sent lines."""

    rank: int
    lines: tuple[str, ...]
    left_out: int
    """How many lines after these were left out because they were too many."""


class Report(NamedTuple):
    """Numbers that a rank's function reported."""

    rank: int
    metrics: dict[str, float]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_numbers(value: Any) -> bool:
    # They travel as floats; a whole number could be too large for one.
    return isinstance(value, dict) and all(type(each) is float for each in value.values())


def _is_failure(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_text(value.get(n)) for n in ("message", "traceback"))


MESSAGES: dict[str, dict[str, Callable[[Any], bool]]] = {
    "attend": {"attend": lambda value: type(value) is int, "host": _is_text},
    "lines": {"lines": _are_texts, "left_out": _is_count},
    "report": {"report": _are_numbers},
    "stacks": {"stacks": _is_text},
    "failure": {"failure": _is_failure},
    "returned": {"returned": lambda value: value is True},
}
"""By name: the fields, and what each has to be."""


def read(name: str, rank: int, header: Mapping[str, Any]) -> list[Any]:
    """The fields of a message, in the order of the table.

    Raises:
        TrainingError: one is missing, or is not what it has to be.
    """
    fields = MESSAGES[name]
    if not all(field in header and check(header[field]) for field, check in fields.items()):
        if name == "attend":
            shown = reprlib.repr(header)
            raise TrainingError(f"a worker must join with a rank and a host, not with {shown}")
        raise unreadable(rank, header)
    return [header[field] for field in fields]


def read_lines(rank: int, header: Mapping[str, Any]) -> Lines:
    """What a rank has printed."""
    lines, left_out = read("lines", rank, header)
    return Lines(rank, tuple(lines), left_out)


def read_failure(
    rank: int, header: Mapping[str, Any], returned: Sequence[int] = ()
) -> DataError | WorkerError:
    """The error that a rank reports.

    Args:
        rank: the rank.
        header: what it sent.
        returned: ranks whose functions had already returned.
    """
    (told,) = read("failure", rank, header)
    message = told["message"]
    if told.get("of_data") is True:
        return DataError(message)
    if told.get("of_exchange") is True and returned:
        message = (
            f"{named(returned)} had returned when an exchange failed on rank {rank}: all ranks "
            f"must take the same number of steps\n{message}"
        )
    return WorkerError(message, rank=rank, epoch=0, step=0, worker_traceback=told["traceback"])


def named(ranks: Sequence[int]) -> str:
    """Ranks, formatted for a message."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def unreadable(rank: int, header: Mapping[str, Any]) -> TrainingError:
    """The error that shows what a rank sent."""
    return TrainingError(f"rank {rank} sent a header that no worker sends: {reprlib.repr(header)}")


class Unread:
    """What has been reported and is to be shown, in the order of arrival; any thread may take it.

    A worker may print faster than its output can be shown. Beyond a bound it is not listened to, so
    that the rest waits at the worker and not in the driver's memory.
    """

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[Lines | Report | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._number: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()
        self._waiting: dict[int, Callable[[], None]] = {}
        self._ended = False

    def put(self, told: Lines | Report, wake: Callable[[], None]) -> bool:
        """Add an item, unless the queue has ended.

        Args:
            told: what a rank has reported.
            wake: if this item fills the queue, called once as soon as there is room again.

        Returns:
            Whether the rank has to wait for that call.
        """
        with self._lock:
            if self._ended:
                return False
            self._count(told, 1)
            self._told.put(told)
            if not self._is_full(told.rank):
                return False
            self._waiting[told.rank] = wake
            return True

    def get(self, timeout: float) -> Lines | Report | None:
        """Take the first item; None at the end.

        Raises:
            queue.Empty: none has come within the timeout, in seconds.
        """
        told = self._told.get(timeout=timeout)
        if told is None:
            return None
        with self._lock:
            self._count(told, -1)
            full = self._is_full(told.rank)
            wake = None if full else self._waiting.pop(told.rank, None)
        if wake is not None:
            wake()
        return told

    def end(self) -> None:
        """Accept nothing more, and let nobody wait."""
        with self._lock:
            self._ended = True
            self._told.put(None)
            waiting, self._waiting = self._waiting, {}
        for wake in waiting.values():
            wake()

    def __len__(self) -> int:
        return self._told.qsize()

    def _is_full(self, rank: int) -> bool:
        return self._number[rank] >= MOST_UNREAD or self._bytes[rank] >= MOST_UNREAD_BYTES

    def _count(self, told: Lines | Report, sign: int) -> None:
        size = (
            sum(map(len, told.lines))
            if isinstance(told, Lines)
            else _NUMBER_BYTES * len(told.metrics)
        )
        self._number[told.rank] += sign
        self._bytes[told.rank] += sign * size
