"""A stage whose first task serves the others: it does not begin to, or another does not leave."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import BarrierTaskContext
from pyspark.sql import Row

from sparkdl.errors import DeadlineError
from sparkdl.spark.launch import beside, stage_task
from sparkdl.spark.launch.beside import ForwardedLogs, pieces, read_stage
from sparkdl.spark.launch.stage_task import END_OF_ANSWER, SERVICE_ROW, run_stage_task


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
