"""Ranks in processes of a task, a stage whose first task serves the others, and what it answers."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import pickle
import signal
import struct
import sys
import threading
import time
import zipfile
import zipimport
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from auditing import deeds
from hostile import arbitrary, damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark import BarrierTaskContext
from pyspark.sql import Row
from subprocesses import printed_by
from waiting import is_there

from sparkdl.errors import DeadlineError, SparkDLError, TrainingError, WorkerError, WorkerLostError
from sparkdl.estimator.checks.row_checks import Checked
from sparkdl.feed.packed import ORDER_COLUMN
from sparkdl.feed.schema import FeedSchema
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.report.recording import Recording, Setup
from sparkdl.spark.launch import beside, stage_task
from sparkdl.spark.launch.beside import (
    MAX_HEADER_BYTES,
    ForwardedLogs,
    error_fields,
    header_of,
    pieces,
    read_stage,
    readable,
    replay_logs,
    restored_error,
)
from sparkdl.spark.launch.launcher import as_training_error
from sparkdl.spark.launch.rank_host import RankCall, _answer, host_ranks, shares
from sparkdl.spark.launch.stage_task import END_OF_ANSWER, SERVICE_ROW, run_stage_task


def rows(places: Any, values: Any = None) -> pa.RecordBatch:
    values = range(len(places)) if values is None else values
    return pa.record_batch(
        {"c0": pa.array(values, pa.int64()), ORDER_COLUMN: pa.array(places, pa.int64())}
    )


places_of_rows = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60)


@settings(deadline=None)
@given(places_of_rows, st.integers(1, 9))
def test_every_row_is_one_ranks(places: list[int], ranks: int) -> None:
    cut = shares(rows(places), ranks)
    assert len(cut) == ranks
    assert sorted(v for share in cut for v in share["c0"].to_pylist()) == list(range(len(places)))


@settings(deadline=None)
@given(places_of_rows, st.integers(1, 9), st.integers(1, 60), st.randoms())
def test_a_ranks_rows_are_the_same_in_whatever_order_and_batches_they_come(
    places: list[int], ranks: int, cut: int, random: Any
) -> None:
    numbered = list(enumerate(places))
    random.shuffle(numbered)
    found: list[set[int]] = [set() for _ in range(ranks)]
    for part in (numbered[:cut], numbered[cut:]):
        batch = rows([place for _, place in part], [number for number, _ in part])
        for mine, share in zip(found, shares(batch, ranks), strict=True):
            mine |= set(share["c0"].to_pylist())
    wanted = [set(share["c0"].to_pylist()) for share in shares(rows(places), ranks)]
    assert found == wanted


def test_hashed_rows_are_shared_evenly() -> None:
    places = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 80_000)
    sizes = [share.num_rows for share in shares(rows(places), 8)]
    assert max(sizes) / min(sizes) < 1.1


# What the ranks do. Their processes import this module.


def tell(rank: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Its number, its process, a variable, and the rows it was given."""
    values = [value for batch in batches for value in batch["c0"].to_pylist()]
    told = {"rank": [rank], "pid": [os.getpid()], "set": [os.environ.get("TOLD")], "rows": [values]}
    yield pa.record_batch({name: pa.array(value) for name, value in told.items()})


def misbehave(
    end: str, sleeper: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    if end == "sleep":
        Path(sleeper).write_text(str(os.getpid()))
        time.sleep(300)
    while not Path(sleeper).is_file():
        time.sleep(0.05)
    if end == "raise":
        raise ZeroDivisionError("the reactor is empty")
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)
    yield from batches


def calls(function: str, *arguments: tuple[Any, ...]) -> list[RankCall]:
    return [
        RankCall(rank=4 + index, entry=f"{__name__}:{function}", arguments=each)
        for index, each in enumerate(arguments)
    ]


def test_ranks_run_in_processes_of_their_own_on_shares_of_the_rows() -> None:
    batches = [
        rows(range(start, start + 10), range(start, start + 10)) for start in range(0, 50, 10)
    ]
    ranks = [
        RankCall(rank=r, entry=f"{__name__}:tell", arguments=(r,), environment={"TOLD": f"to {r}"})
        for r in range(2)
    ]

    first, second = [answer.to_pylist()[0] for answer in host_ranks(ranks, iter(batches))]

    assert [first["rank"], second["rank"]] == [0, 1]
    assert [first["set"], second["set"]] == ["to 0", "to 1"]
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    assert first["rows"] == list(range(0, 50, 2))
    assert second["rows"] == list(range(1, 50, 2))
    assert not is_there(first["pid"])
    assert not is_there(second["pid"])


def test_a_rank_finds_what_was_made_since_the_server_began_and_reads_no_zip_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, known, again = tmp_path / "later", tmp_path / "known", list[str]()
    archive = tmp_path / "zipped.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("own_zipped.py", "")
    known.mkdir()
    monkeypatch.setattr(sys, "path", [*map(str, (archive, folder, known)), *sys.path])
    assert importlib.util.find_spec("own_later") is None
    folder.mkdir()
    (folder / "own_later.py").write_text("from own_new import answer")
    unchanged = known.stat()
    (known / "own_new.py").write_text("def answer(batches):\n    return ['found']\n")
    os.utime(known, ns=(unchanged.st_atime_ns, unchanged.st_mtime_ns))  # as some systems leave it
    monkeypatch.setattr(
        zipimport.zipimporter, "invalidate_caches", lambda self: again.append(self.archive)
    )
    told = pickle.dumps(dict(os.environ)) + pickle.dumps(("own_later:answer", ()))

    assert _answer(io.BytesIO(told)) == ["found"]

    assert not again


def test_the_end_of_a_rank_removes_no_socket_of_the_users(tmp_path: Path) -> None:
    ended = """if True:
        import atexit, os, socket, sys
        from sparkdl.spark.launch import fork_server
        users = socket.socket(socket.AF_UNIX)
        users.bind(sys.argv[1])
        fork_server._ADDRESS = sys.argv[1]
        if os.fork() == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        os.wait()
        print(os.path.exists(sys.argv[1]))
    """
    assert printed_by("-c", ended, tmp_path / "socket") == "True\n"


def test_rows_are_not_copied_on_the_way_to_a_rank() -> None:
    batch, before = rows(range(1 << 17)), pa.default_memory_pool()
    copies = pa.proxy_memory_pool(before)  # counts what is allocated from now on
    pa.set_memory_pool(copies)
    try:
        (answer,) = host_ranks(calls("tell", (0,)), [batch])
    finally:
        pa.set_memory_pool(before)
    assert answer["rows"].to_pylist() == [batch["c0"].to_pylist()]
    assert copies.max_memory() < batch.nbytes


@pytest.mark.parametrize(
    ("end", "error", "told"),
    [
        ("raise", TrainingError, "rank 5 on .*(?s:.*)in misbehave(?s:.*)the reactor is empty"),
        ("die", WorkerLostError, "process [0-9]+ of rank 5 on .* was ended by SIGKILL"),
        pytest.param(
            "leave",
            WorkerLostError,
            "process [0-9]+ of rank 5 on .* exited with code 3 ",
            marks=pytest.mark.gate,
        ),
    ],
)
def test_the_end_of_one_rank_is_told_and_ends_the_others(
    tmp_path: Path, end: str, error: type[Exception], told: str
) -> None:
    sleeper = tmp_path / "pid"
    ranks = calls("misbehave", ("sleep", str(sleeper)), (end, str(sleeper)))
    with pytest.raises(error, match=told):
        list(host_ranks(ranks, [rows([1, 2])]))
    assert not is_there(int(sleeper.read_text()))


def test_an_error_among_the_rows_ends_all_ranks(tmp_path: Path) -> None:
    sleeper = tmp_path / "pid"

    def broken() -> Iterator[pa.RecordBatch]:
        yield rows([1, 2])
        while not sleeper.is_file():
            time.sleep(0.05)
        raise LookupError("upstream")

    with pytest.raises(LookupError, match="upstream"):
        list(host_ranks(calls("misbehave", ("sleep", str(sleeper))), broken()))
    assert not is_there(int(sleeper.read_text()))


def test_a_worker_that_stays_after_the_run_is_ended_and_fails_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()

    def rows(*_: Any, **__: Any) -> Iterator[Row]:
        for piece in pieces(ForwardedLogs().header, [memoryview(b"the model")]):
            yield Row(rank=SERVICE_ROW, result=piece)
        yield Row(rank=0, result=b"its result")
        yield Row(rank=SERVICE_ROW, result=END_OF_ANSWER)
        assert ended.wait(60)
        raise RuntimeError("the operation was interrupted")

    monkeypatch.setattr(beside, "run_tasks", rows)
    monkeypatch.setattr(beside, "send", lambda *_: None)
    session: Any = SimpleNamespace(
        addTag=lambda tag: None, removeTag=lambda tag: None, interruptTag=lambda tag: ended.set()
    )
    workers: Any = SimpleNamespace(
        frame=SimpleNamespace(sparkSession=session), num_tasks=2, ranks_a_task=1
    )
    found = read_stage(
        workers,
        "os:path",
        b"",
        lambda _, values: b"".join(values),
        begin_s=1.0,
        patience_s=0.2,
        shipment=None,
    )
    assert found == (b"the model", {0: b"its result"})


def test_a_run_whose_connect_server_was_restarted_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: Any) -> None:
        raise RuntimeError("no active session")

    def restarted(*_: Any, **__: Any) -> Iterator[Row]:
        said = "[RESPONSE_ALREADY_RECEIVED] INVALID_HANDLE.SESSION_NOT_FOUND on the server"
        raise RuntimeError(said)
        yield

    monkeypatch.setattr(beside, "run_tasks", restarted)
    monkeypatch.setattr(beside, "send", lambda *_: None)
    session: Any = SimpleNamespace(
        addTag=lambda tag: None, removeTag=lambda tag: None, interruptTag=gone
    )
    workers: Any = SimpleNamespace(
        frame=SimpleNamespace(sparkSession=session), num_tasks=2, ranks_a_task=1
    )
    with pytest.raises(TrainingError, match=r"it was restarted, .* Call the session's stop\(\)"):
        read_stage(workers, "os:path", b"", lambda *_: None, begin_s=1.0, shipment=None)


def test_a_first_task_that_never_comes_to_the_first_meeting_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()
    context = SimpleNamespace(
        getTaskInfos=lambda: [SimpleNamespace(address=f"host-{task}:1") for task in range(2)],
        partitionId=lambda: 1,
        allGather=lambda _: ended.wait(600),
    )
    monkeypatch.setattr(BarrierTaskContext, "get", lambda: context)
    monkeypatch.setattr(stage_task, "MEET_S", 0.0)
    arguments: dict[str, Any] = {"payload": None, "tasks": 2, "ranks": 1}
    arguments |= {"apart": False, "begin_s": 0.0, "shipment": None}
    task = run_stage_task("os:path", **arguments, versions={}, batches=iter(()))
    with pytest.raises(DeadlineError, match=r"the first task, on host-0:1, has not begun to serve"):
        list(task)
    ended.set()


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
