"""Ranks of a task whose rows come only once all tasks have ended: the end of the run ends them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark import BarrierTaskContext

from sparkdl.errors import DeadlineError, WorkerLostError
from sparkdl.spark.launch import stage_task
from sparkdl.spark.launch.rank_host import RankCall, host_ranks
from sparkdl.spark.launch.stage_task import _ended_after, run_stage_task


class Meeting:
    """Stands for a task's context: the first task comes to the meeting once the run is over."""

    def __init__(self, patience_s: float) -> None:
        self.run_over = threading.Event()
        self._told = ["", str(patience_s)]

    def allGather(self, _: str) -> list[str]:
        assert self.run_over.wait(60)
        return self._told


def rank(function: str) -> Iterator[pa.RecordBatch]:
    """What a rank yields, in a process of its own."""
    call = RankCall(rank=1, entry=f"{__name__}:{function}", arguments=())
    return host_ranks([call], [])


def answers(batches: object) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch({"told": ["all"]})


def hangs(batches: object) -> Iterator[pa.RecordBatch]:
    time.sleep(600)
    yield from answers(batches)


def dies(batches: object) -> Iterator[pa.RecordBatch]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield from answers(batches)


def ended_after(meeting: Meeting, function: str) -> list[dict[str, Any]]:
    context = cast(BarrierTaskContext, meeting)
    return [each.to_pydict() for each in _ended_after(context, rank(function))]


def test_a_rank_that_leaves_before_the_run_ends_has_answered() -> None:
    meeting = Meeting(patience_s=600.0)
    end = threading.Timer(1.0, meeting.run_over.set)
    end.start()
    assert ended_after(meeting, "answers") == [{"told": ["all"]}]
    assert meeting.run_over.is_set()  # else the meeting would go on in the process's next task
    end.join()


def test_a_rank_that_is_stuck_when_the_run_ends_is_ended_and_fails_nobody() -> None:
    meeting = Meeting(patience_s=0.2)
    meeting.run_over.set()
    assert ended_after(meeting, "hangs") == []


def test_a_rank_that_is_lost_before_the_run_ends_fails_its_task() -> None:
    meeting = Meeting(patience_s=600.0)
    with pytest.raises(WorkerLostError, match=r"rank 1 on .* was ended by SIGKILL"):
        ended_after(meeting, "dies")
    meeting.run_over.set()


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
    arguments |= {"apart": False, "together": False, "begin_s": 0.0, "shipment": None}
    task = run_stage_task("os:path", **arguments, broadcasts={}, versions={}, batches=iter(()))
    with pytest.raises(DeadlineError, match=r"the first task, on host-0:1, has not begun to serve"):
        list(task)
    ended.set()
