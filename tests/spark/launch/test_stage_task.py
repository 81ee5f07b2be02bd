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
from sparkdl.spark.launch import stage_task
from sparkdl.spark.launch.beside import RunInStage
from sparkdl.spark.launch.stage_task import ALL_SAID, SERVED, run_stage_task


def test_a_worker_that_stays_after_the_run_is_ended_and_fails_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()

    def rows(_: RunInStage) -> Iterator[Row]:
        yield Row(rank=SERVED, result=b"the model")
        yield Row(rank=SERVED, result=ALL_SAID)
        assert ended.wait(60)
        raise RuntimeError("the operation was interrupted")

    monkeypatch.setattr(RunInStage, "_rows", rows)
    session: Any = SimpleNamespace(
        addTag=lambda tag: None, removeTag=lambda tag: None, interruptTag=lambda tag: ended.set()
    )
    plain: dict[str, Any] = {"entry": "os:path", "begin_s": 1.0, "payload": b"", "tasks": 2}
    run = RunInStage(spark=session, **plain, ranks_a_task=1, device="cpu", shipment=None, rows=None)
    assert list(run.answered(0.2)) == [b"the model"]


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
    arguments: dict[str, Any] = {"payload": None, "further": (), "tasks": 2, "ranks": 1}
    arguments |= {"apart": False, "begin_s": 0.0, "shipment": None}
    task = run_stage_task("os:path", **arguments, versions={}, batches=iter(()))
    with pytest.raises(DeadlineError, match=r"the first task, on host-0:1, has not begun to serve"):
        list(task)
    ended.set()
