"""What workers report is of a size that can be added up and shown."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from every_row import every

from sparkdl.averager.messages.headers import (
    failure_header,
    join_header,
    raise_reported_failure,
    read_join,
    read_shard,
    read_validation,
    read_window,
    shard_header,
    validation_header,
    window_header,
)
from sparkdl.errors import CollectiveError, TrainingError
from sparkdl.events import ValidationReport, WindowReport
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.feed.statistics.shards import ShardStatistics

WINDOW = WindowReport(rank=0, epoch=1, step=1, examples=2, loss_sum=0.5, last=False)
VALIDATION = ValidationReport(rank=0, epoch=1, examples=2, loss_sum=0.5, weight=2.0)
SHARD = ShardStatistics(3, (ColumnStatistics(smallest=0, largest=2),))
HUGE = 10**400
"""JSON can say it, and no float holds it: sums and means of it are an OverflowError."""


@every("name", ["examples", "loss_sum", "epoch", "step", "group_weight"])
@every("number", [HUGE, -HUGE, 1 << 64])
def test_a_window_of_numbers_beyond_64_bits_is_refused(name: str, number: int) -> None:
    header = window_header(WINDOW)
    header["window"][name] = number
    with pytest.raises(TrainingError, match="rank 0 sent"):
        read_window(header, 0)


@every(
    "number",
    [HUGE, -HUGE, math.inf, math.nan, True, None],
)
def test_what_a_window_has_measured_is_a_few_numbers_that_floats_hold(number: Any) -> None:
    header = window_header(replace(WINDOW, measured={"noise": 2.0}))
    assert read_window(header, 0).measured == {"noise": 2.0}
    header["window"]["measured"]["noise"] = number
    with pytest.raises(
        TrainingError, match="rank 0 sent the report of a window that cannot be its own"
    ):
        read_window(header, 0)


@every(
    ("missing", "ranks"),
    [([3, 1], (3, 1)), ([], ()), ([-1, "2", 2.0, True, None, [4]], ()), ("12", ()), ({}, ())],
)
def test_of_whom_a_worker_misses_only_what_may_be_a_rank_is_believed(
    missing: Any, ranks: tuple[int, ...]
) -> None:
    header = failure_header(CollectiveError("the reduction failed", ranks=(3,)))
    assert header["missing"] == [3]
    for said in ({**header, "missing": missing}, {"broken": "the reduction failed"}):
        with pytest.raises(CollectiveError, match="the reduction failed") as caught:
            raise_reported_failure(said)
        assert caught.value.ranks == (ranks if "missing" in said else ())


@every("name", ["examples", "loss_sum", "weight"])
def test_a_validation_of_numbers_beyond_64_bits_is_refused(name: str) -> None:
    header = validation_header(VALIDATION)
    header["validation"][name] = HUGE
    with pytest.raises(TrainingError, match="rank 0 sent"):
        read_validation(header, 0)


@every("name", ["rows", "held_out", "weight"])
def test_rows_beyond_64_bits_are_refused(name: str) -> None:
    header = shard_header(SHARD)
    header["shard"][name] = HUGE
    with pytest.raises(TrainingError, match="rank 0 sent"):
        read_shard(header, 0)


@every("name", ["nulls", "longest", "smallest", "places"])
def test_statistics_beyond_64_bits_are_refused(name: str) -> None:
    header = shard_header(SHARD)
    (column,) = header["shard"]["columns"]
    column[name] = {"smallest": [HUGE, 1]} if name == "places" else HUGE
    with pytest.raises(TrainingError, match="rank 0 sent"):
        read_shard(header, 0)


@every("name", ["join", "attempt", "task"])
def test_a_worker_that_joins_with_numbers_beyond_64_bits_is_refused(name: str) -> None:
    with pytest.raises(TrainingError, match="starts with a rank and a host"):
        read_join({"join": 0, "host": "h", "attempt": 0, "task": 0} | {name: HUGE})


def test_what_joins_is_read_back_and_its_fingerprint_has_to_be_text() -> None:
    header = join_header(3, 1, 2, "f1")
    assert read_join(header) == (3, header["host"], 1, 2, "f1")
    with pytest.raises(TrainingError, match="starts with a rank and a host"):
        read_join({**header, "frozen": 7})


def test_the_largest_of_64_bits_is_taken() -> None:
    header = window_header(WINDOW)
    header["window"]["examples"] = (1 << 63) - 1
    assert read_window(header, 0).examples == (1 << 63) - 1


def test_what_is_refused_is_quoted_in_part_only() -> None:
    """The message goes to every worker, whose headers are limited, and into the log."""
    report: dict[str, Any] = asdict(WINDOW) | {"epoch": "x" * 1_000_000}
    with pytest.raises(TrainingError) as caught:
        read_window({"window": report}, 0)
    assert len(str(caught.value)) < 1_000
    with pytest.raises(TrainingError) as caught:
        read_join({"host": ["x" * 1_000_000] * 3})
    assert len(str(caught.value)) < 1_000
