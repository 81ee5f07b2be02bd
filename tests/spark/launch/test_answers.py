"""What comes back from the first task of a stage, in a client that trusts it with nothing more."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from auditing import deeds
from hostile import arbitrary, damaged
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import SparkDLError, TrainingError, WorkerError, WorkerLostError
from sparkdl.estimator.checks.row_checks import Checked
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.report.recording import Recording, Setup
from sparkdl.spark.launch.beside import (
    MAX_HEADER_BYTES,
    ForwardedLogs,
    error_fields,
    header_of,
    pieces,
    readable,
    replay_logs,
    restored_error,
)
from sparkdl.spark.launch.launcher import as_training_error

COLUMN, LABEL = ColumnSpec("x", torch.float32, (UNKNOWN,)), ColumnSpec("y", torch.int64)
CHECKED = Checked((COLUMN.of_length(3),), {None: 2, "score": None}, (LABEL,))
HEADER: dict[str, Any] = {
    "lines": [[0, ["a word"], 2]],
    "logged": [["sparkdl.test_answers", logging.WARNING, "careful"]],
    "reports": [[1, {"accuracy": 0.5}]],
    "error": error_fields(WorkerLostError("no", ranks=(1,))),
    "checked": CHECKED.as_json(),
    "recording": Recording(2, Setup(model="Linear", period=5)).as_json(),
}


def received(octets: bytes) -> None:
    """Read all that a client reads of a header."""
    with readable():
        header = header_of(iter([struct.pack("<q", len(octets)), octets])) or {}
        replay_logs(header)
        restored_error(header["error"])
        Checked.from_json(header["checked"], FeedSchema((COLUMN,), LABEL))
        Recording.from_json(header["recording"])


def test_errors_come_back_as_what_they_were() -> None:
    lost = WorkerLostError("gone", ranks=(1, 2))
    lost.add_note("said before")
    failed = WorkerError("bad", rank=1, epoch=2, step=3, worker_traceback="line")
    for error in (lost, failed, TrainingError("ended")):
        back = restored_error(json.loads(json.dumps(error_fields(error))))
        assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_another_error_comes_back_with_its_traceback() -> None:
    try:
        {}["nothing"]
    except KeyError as error:
        back = restored_error(error_fields(error))
    assert type(back) is TrainingError
    assert "KeyError: 'nothing'" in str(back)


def test_what_the_rows_told_comes_back_as_it_was() -> None:
    back = Checked.from_json(
        json.loads(json.dumps(CHECKED.as_json())), FeedSchema((COLUMN,), LABEL)
    )
    assert back == CHECKED


@given(damaged(HEADER) | arbitrary)
def test_a_header_that_no_task_sends_is_refused_and_nothing_runs(header: Any) -> None:
    received(json.dumps(HEADER).encode())
    with deeds() as done, suppress(TrainingError):
        received(json.dumps(header).encode())
    assert done == []


@given(st.binary(max_size=200))
def test_bytes_that_no_task_sends_are_refused_and_nothing_runs(octets: bytes) -> None:
    with deeds() as done, pytest.raises(TrainingError, match="cannot be read"):
        received(octets)
    assert done == []


def test_a_header_is_not_taken_in_part_nor_without_a_limit() -> None:
    length, *rest = pieces({"lines": ["x" * 1000] * 3000})
    with pytest.raises(TrainingError, match="of 3012011 bytes"):
        header_of(iter([length, *rest[:-1]]))
    endless = iter(lambda: b"x" * 1000, None)
    for size in (-1, MAX_HEADER_BYTES + 1):
        with pytest.raises(TrainingError, match="would have"):
            header_of(_chained(struct.pack("<q", size), endless))


def _chained(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def test_a_header_of_several_pieces_comes_back_before_the_values() -> None:
    header, values = {"lines": ["x" * 1000] * 3000}, bytes(range(256)) * 8192
    answer = pieces(header, [memoryview(values)])
    assert header_of(answer) == header
    rest = list(answer)
    assert b"".join(rest) == values
    assert len(rest) == 2


QUOTED = st.sampled_from(
    [
        "what serves the workers has ended, and says to the driver: eJwLSC0qzszPAwAKqALN",
        "sparkdl cannot run on this executor: ",
        "\nsparkdl.errors.WorkerLostError: rank 1\n",
        "ExecutorLostFailure",
        'Cannot run program "x": error=2, no\n\tat java.Y\n',
        "Python in worker has different version 3.9 than that in driver 3.11, ",
        "[CAST_INVALID_INPUT] The value '",
    ]
)


@given(st.lists(QUOTED | st.text(max_size=20), max_size=6))
def test_whatever_an_errors_text_quotes_it_becomes_an_error_and_nothing_runs(
    quoted: list[str],
) -> None:
    with deeds() as done:
        found = as_training_error(RuntimeError("".join(quoted)))
    assert isinstance(found, SparkDLError)
    assert done == []


def test_what_was_shown_logged_and_reported_is_so_again(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with ForwardedLogs() as logs:
        logging.getLogger("sparkdl.test_answers").warning("careful with %s", "it")
    logs.show(1, ["first", "second"], 3)
    logs.report(1, {"accuracy": 0.5})
    caplog.clear()
    reported: list[Any] = []
    replay_logs(json.loads(json.dumps(logs.header)), lambda *each: reported.append(each))
    assert capsys.readouterr().out.splitlines()[:2] == ["[rank 1] first", "[rank 1] second"]
    assert [each.getMessage() for each in caplog.records] == ["careful with it"]
    assert reported == [(1, {"accuracy": 0.5})]
