"""What comes back from the first task of a stage, in a client that trusts it with nothing more."""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import pytest

from sparkdl.errors import TrainingError, WorkerError, WorkerLostError
from sparkdl.spark.launch.answers import (
    Plain,
    described,
    error_with,
    header_of,
    pieces,
    restored,
    told_at_end,
)


def test_errors_come_back_as_what_they_were() -> None:
    lost = WorkerLostError("gone", ranks=(1, 2))
    lost.add_note("said before")
    failed = WorkerError("bad", rank=1, epoch=2, step=3, worker_traceback="line")
    for error in (lost, failed, TrainingError("ended")):
        back = restored(pickle.loads(pickle.dumps(described(error))))
        assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_another_error_comes_back_with_its_traceback() -> None:
    try:
        {}["nothing"]
    except KeyError as error:
        back = restored(described(error))
    assert type(back) is TrainingError
    assert "KeyError: 'nothing'" in str(back)


def test_what_comes_back_runs_no_code() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("true",)

    with pytest.raises(TrainingError, match=r"names posix\.system"):
        Plain(io.BytesIO(pickle.dumps(Evil()))).load()


def test_a_header_comes_back_with_the_error_of_a_task_too() -> None:
    header = {
        "error": described(WorkerLostError("no", ranks=(1,))),
        "lines": [(0, ["a word"] * 1000, 0)],
    }
    told = told_at_end(f"Job aborted: Traceback ...\nRuntimeError: {error_with(header)}\n\tat java")
    assert told is not None
    assert header_of(iter([told])) == header
    assert told_at_end("Job aborted: Traceback ...") is None
    marker = str(error_with({})).rpartition(" ")[0]
    for quoted in ("nothing", "bm90aGluZw=="):  # by an error of the user's
        assert told_at_end(f"ValueError: {marker} {quoted}") is None


def test_a_header_of_several_pieces_comes_back_before_the_values() -> None:
    header, values = {"lines": ["x" * 1000] * 3000}, bytes(range(256)) * 8192
    answer = pieces(header, [memoryview(values)])
    assert header_of(answer) == header
    rest = list(answer)
    assert b"".join(rest) == values
    assert len(rest) == 2
