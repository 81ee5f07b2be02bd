"""Checks what workers send to the services in the driver: a mistake must not become a hang."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import DataError, TrainingError, WorkerError


@dataclass(frozen=True)
class Lines:
    """What a rank has printed since it last sent lines."""

    rank: int
    lines: tuple[str, ...]
    left_out: int
    """How many lines after these were left out because they were too many."""


@dataclass(frozen=True)
class Report:
    """Numbers that a rank's function reported."""

    rank: int
    metrics: dict[str, float]


def read_attend(header: Mapping[str, Any]) -> tuple[int, str]:
    """Rank and host of a worker that joins.

    Raises:
        TrainingError: the header does not have them.
    """
    rank, host = header.get("attend"), header.get("host")
    if type(rank) is not int or not isinstance(host, str):
        shown = reprlib.repr(header)
        raise TrainingError(f"a worker must join with a rank and a host, not with {shown}")
    return rank, host


def read_lines(rank: int, header: Mapping[str, Any]) -> Lines:
    """What a rank has printed.

    Raises:
        TrainingError: the header does not say.
    """
    lines, left_out = header.get("lines"), header.get("left_out")
    if (
        not isinstance(lines, list)
        or not all(isinstance(line, str) for line in lines)
        or type(left_out) is not int
        or left_out < 0
    ):
        raise unreadable(rank, header)
    return Lines(rank, tuple(lines), left_out)


def read_report(rank: int, header: Mapping[str, Any]) -> Report:
    """Numbers that a rank reports.

    Raises:
        TrainingError: the header has none.
    """
    metrics = header.get("report")
    # They travel as floats; a whole number could be too large for one.
    if not isinstance(metrics, dict) or not all(type(each) is float for each in metrics.values()):
        raise unreadable(rank, header)
    return Report(rank, metrics)


def read_stacks(rank: int, header: Mapping[str, Any]) -> str:
    """What a rank is doing.

    Raises:
        TrainingError: the header does not say.
    """
    text = header.get("stacks")
    if not isinstance(text, str):
        raise unreadable(rank, header)
    return text


def read_failure(
    rank: int, header: Mapping[str, Any], returned: Sequence[int] = ()
) -> DataError | WorkerError:
    """The error that a rank reports.

    Args:
        rank: the rank.
        header: what it sent.
        returned: ranks whose functions had already returned.

    Raises:
        TrainingError: the header does not have it.
    """
    told = header.get("failure")
    if not isinstance(told, dict):
        raise unreadable(rank, header)
    message, worker_traceback = told.get("message"), told.get("traceback")
    if not isinstance(message, str) or not isinstance(worker_traceback, str):
        raise unreadable(rank, header)
    if told.get("of_data") is True:
        return DataError(message)
    if told.get("of_exchange") is True and returned:
        message = (
            f"{named(returned)} had returned when an exchange failed on rank {rank}: all ranks "
            f"must take the same number of steps\n{message}"
        )
    return WorkerError(message, rank=rank, epoch=0, step=0, worker_traceback=worker_traceback)


def named(ranks: Sequence[int]) -> str:
    """Ranks, formatted for a message."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def unreadable(rank: int, header: Mapping[str, Any]) -> TrainingError:
    """The error that shows what a rank sent."""
    return TrainingError(f"rank {rank} sent a header that no worker sends: {reprlib.repr(header)}")
