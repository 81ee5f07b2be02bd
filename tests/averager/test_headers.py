"""What workers report is of a size that can be added up and shown."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
from every_row import every_row
from hostile import damaged
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.averager.headers import (
    MAX_STATES_BYTES,
    failure_header,
    join_header,
    raise_reported_failure,
    read_epoch_losses,
    read_join,
    read_size,
    received,
    shard_header,
    statistics_header,
    window_header,
)
from sparkdl.errors import CollectiveError, TrainingError
from sparkdl.events import ValidationReport, WindowReport
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.shards import DataStatistics, ShardStatistics
from sparkdl.phases import PhaseTimes

WINDOW = WindowReport(rank=3, epoch=1, step=1, examples=2, loss_sum=0.5, last=False)
VALIDATION = ValidationReport(rank=3, epoch=1, examples=2, loss_sum=0.5, weight=2.0)
SHARD = ShardStatistics(3, (ColumnStatistics(smallest=0, largest=2),))
HUGE = 10**400
"""JSON can say it, and no float holds it: sums and means of it are an OverflowError."""
TOO_LARGE: list[Any] = [HUGE, -HUGE, 1 << 64]
STATISTICS = DataStatistics((3, 0), (ColumnStatistics(nulls=1, places={"nulls": (0, 2)}),), 4, 2.5)


def statistics_of(header: dict[str, Any]) -> DataStatistics:
    return received(DataStatistics, header["statistics"], None)


def of_rank_3(kind: type, field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda header: received(kind, header[field], 3)


def at(where: str, *names: str, wrong: list[Any]) -> dict[str, list[Any]]:
    """The same values that are wrong, in several places of a header."""
    return {where + name: wrong for name in names}


TIMES = PhaseTimes(10.0, 16.0, (1.0, 2.0, 0.5, 0.5, 1.5, 0.5), 100, 200, 0.001)
MEASURED = window_header(replace(WINDOW, measured={"noise": 2.0}))
STATES = {"states": MAX_STATES_BYTES // 4}
SAYS_SO = "rank 3 sent"


@every_row(
    (
        of_rank_3(WindowReport, "window"),
        MEASURED,
        SAYS_SO,
        at("window.", "examples", "loss_sum", "epoch", "step", "group_weight", wrong=TOO_LARGE),
    ),
    (
        of_rank_3(WindowReport, "window"),
        MEASURED,
        SAYS_SO,
        {"window.measured.noise": [HUGE, -HUGE, math.inf, math.nan, True, None]},
    ),
    (
        of_rank_3(WindowReport, "window"),
        MEASURED,
        SAYS_SO,
        {"window.rank": [2], "window.staleness": [1], "window.counted": [-1.0, math.nan]},
    ),
    (
        of_rank_3(ValidationReport, "validation"),
        {"validation": asdict(VALIDATION)},
        SAYS_SO,
        at("validation.", "examples", "loss_sum", "weight", wrong=TOO_LARGE),
    ),
    (
        of_rank_3(ShardStatistics, "shard"),
        shard_header(SHARD),
        SAYS_SO,
        at("shard.", "rows", "held_out", "weight", wrong=TOO_LARGE)
        | at("shard.columns.0.", "nulls", "longest", "smallest", wrong=[HUGE])
        | {"shard.columns.0.places": [{"smallest": [HUGE, 1]}]},
    ),
    (
        read_join,
        join_header(3, 1, 2, "f1"),
        "starts with a rank and a host",
        at("", "join", "attempt", "task", wrong=TOO_LARGE) | {"frozen": [7]},
    ),
    (
        statistics_of,
        statistics_header(STATISTICS),
        "a worker sent",
        {"statistics.shard_rows": [[3, -1], 3, None]},
    ),
    (
        partial(read_size, rank=3, limit=STATES["states"], field="states"),
        STATES,
        "rank 3 sent .* instead of its states",
        {"states": [-1, STATES["states"] + 1, 1.0, True, "8", None, [8]]},
    ),
    (
        partial(read_epoch_losses, rank=3),
        {"epoch_losses": 1, "known": 0},
        "rank 3 sent an invalid request for losses",
        {"known": [None, 1, -1, 0.0], "epoch_losses": ["1", True, [1]]},
    ),
    (
        of_rank_3(PhaseTimes, "phases"),
        {"phases": asdict(TIMES)},
        SAYS_SO,
        {
            "phases": [[asdict(TIMES)]],
            "phases.seconds": [{}, [1.0] * 5]
            + [[1.0] * 5 + [last] for last in (-1.0, math.nan, math.inf, "1", True)],
            "phases.began": [math.inf, 17.0],
            "phases.ended": [None],
            "phases.sent": [-1, 1.5],
            "phases.received": [1 << 80],
            "phases.uncertainty": [-0.1],
            "phases.more": [1],
        },
    ),
)
def test_what_no_worker_sends_is_refused(
    read: Callable[[Any], Any], header: dict[str, Any], words: str, wrong: dict[str, list[Any]]
) -> None:
    read(json.loads(json.dumps(header)))
    for path, values in wrong.items():
        *above, name = path.split(".")
        for value in values:
            changed = json.loads(json.dumps(header))
            place = changed
            for each in above:
                place = place[int(each) if each.isdigit() else each]
            place[name] = value
            with pytest.raises(TrainingError, match=words):
                read(changed)


SENT: list[tuple[Callable[[Any], Any], dict[str, Any]]] = [
    (lambda said: received(WindowReport, said, 3), MEASURED["window"]),
    (lambda said: received(ValidationReport, said, 3), asdict(VALIDATION)),
    (lambda said: received(ShardStatistics, said, 3), shard_header(SHARD)["shard"]),
    (
        lambda said: received(DataStatistics, said, None),
        statistics_header(STATISTICS)["statistics"],
    ),
    (lambda said: read_join(said if isinstance(said, dict) else {}), join_header(3, 1, 2, "f1")),
    (lambda said: received(PhaseTimes, said, 3), asdict(TIMES)),
]


@settings(deadline=None)
@given(data=st.data())
def test_whatever_a_worker_says_is_taken_or_refused_in_words(data: st.DataObject) -> None:
    read, said = data.draw(st.sampled_from(SENT))
    with suppress(TrainingError):
        read(data.draw(damaged(said)))


@every_row(([3, 1], (3, 1)), ([], ()), ([-1, "2", 2.0, True, None, [4]], ()), ("12", ()), ({}, ()))
def test_of_whom_a_worker_misses_only_what_may_be_a_rank_is_believed(
    missing: Any, ranks: tuple[int, ...]
) -> None:
    header = failure_header(CollectiveError("the reduction failed", ranks=(3,)))
    assert header["missing"] == [3]
    for said in ({**header, "missing": missing}, {"broken": "the reduction failed"}):
        with pytest.raises(CollectiveError, match="the reduction failed") as caught:
            raise_reported_failure(said)
        assert caught.value.ranks == (ranks if "missing" in said else ())


def test_what_joins_is_read_back() -> None:
    header = join_header(3, 1, 2, "f1")
    assert read_join(header) == (3, header["host"], 1, 2, "f1")


def test_the_largest_of_64_bits_is_taken() -> None:
    header = window_header(WINDOW)
    header["window"]["examples"] = (1 << 63) - 1
    assert received(WindowReport, header["window"], 3).examples == (1 << 63) - 1


def test_what_is_refused_is_quoted_in_part_only() -> None:
    """The message goes to every worker, whose headers are limited, and into the log."""
    report: dict[str, Any] = asdict(WINDOW) | {"epoch": "x" * 1_000_000}
    with pytest.raises(TrainingError) as caught:
        received(WindowReport, report, 0)
    assert len(str(caught.value)) < 1_000
    with pytest.raises(TrainingError) as caught:
        read_join({"host": ["x" * 1_000_000] * 3})
    assert len(str(caught.value)) < 1_000


def test_the_statistics_of_all_survive_their_header() -> None:
    found = statistics_of(json.loads(json.dumps(statistics_header(STATISTICS))))
    assert found == STATISTICS
    assert found.columns[0].where("nulls") == "row 2 of partition 0"


def test_the_size_of_what_need_not_be_sent_may_be_missing() -> None:
    assert read_size({}, 0, 4, default=0) == 0
    with pytest.raises(TrainingError, match=r"rank 0 sent .* instead of its worker state"):
        read_size({}, 0, 4)
