"""The driver's wait for the workers of a function ends, whatever Spark does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from pyspark import SparkStageInfo

from sparkdl.errors import DeadlineError, TrainingError
from sparkdl.spark.diagnostics import watchdog
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.functions import serving
from sparkdl.spark.functions.serving import watch
from sparkdl.spark.launch.launcher import WorkerJob
from sparkdl.transport.service import Service


@pytest.fixture
def service() -> Iterator[RunService]:
    """All of its ranks have finished."""
    with Service("127.0.0.1") as connections, RunService(connections, 2, lambda *_: None) as opened:
        opened._done.update((0, 1))
        yield opened


def job_that(
    rows: Callable[[], Any], service: RunService, reads: tuple[Any, int] | None = None
) -> WorkerJob:
    """Spark's job of two tasks, of which ``rows`` gives what they have yielded."""
    frame = SimpleNamespace(mapInArrow=lambda *_, **__: SimpleNamespace(collect=rows))
    names = ("getLocalProperty", "setJobGroup", "addJobTag", "cancelJobsWithTag")
    context = SimpleNamespace(**{name: lambda *_, **__: None for name in names})
    context.getConf = dict[str, str]
    spark: Any = SimpleNamespace(range=lambda *_: frame, sparkContext=context)
    job = WorkerJob(
        spark,
        b"",
        lambda payload: lambda batches: batches,
        service.fail,
        description="a test",
        device="cpu",
        tasks=2,
        ranks_a_task=1,
        barrier=True,
        rows=reads,
        ended_early="",
    )
    return job if reads else job.__enter__()


def test_a_spark_job_that_outlives_its_ranks_ends_the_run(
    service: RunService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "RESULTS_S", 0.5)
    ends = threading.Event()
    job = job_that(lambda: ends.wait(300), service)
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"all 2 workers have finished, but .* within 0.5 s"):
        watch(service, job)
    assert time.monotonic() - started < 150
    ends.set()


def test_results_that_arrive_late_are_waited_for(service: RunService) -> None:
    def late() -> list[Any]:
        time.sleep(0.5)
        results = [(1, "b"), (0, "a")]
        return [SimpleNamespace(rank=r, result=cloudpickle.dumps(v)) for r, v in results]

    job = job_that(late, service)
    watch(service, job)
    assert [cloudpickle.loads(row.result) for row in job.yielded()] == ["a", "b"]


def test_results_that_are_lost_after_all_have_finished_are_an_error(service: RunService) -> None:
    def too_large() -> None:
        raise RuntimeError("Total size of serialized results is bigger than spark.driver.maxResult")

    job = job_that(too_large, service)
    watch(service, job)
    with pytest.raises(TrainingError, match="results is bigger than"):
        job.yielded()


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunService]:
    """None of its ranks has joined, and time is up."""
    monkeypatch.setattr(serving, "JOIN_S", 0.0)
    with Service("127.0.0.1") as connections, RunService(connections, 2, lambda *_: None) as opened:
        yield opened


def test_rows_are_waited_for_but_not_the_tasks_in_which_ranks_hang_before_they_join(
    joining: RunService, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    job = job_that(lambda: None, joining, reads=(None, 0))

    def stages() -> list[SparkStageInfo]:
        """First of five tasks, then of two whose rows are shuffled, then the workers' own."""
        asked.append(len(asked))
        assert len(asked) < 20
        tasks = 5 if len(asked) <= 2 else 2
        return [SparkStageInfo(len(asked), 0, "", tasks, tasks, 0, 0)]

    monkeypatch.setattr(job.jobs, "stages", stages)
    monkeypatch.setattr(watchdog, "feeds_a_shuffle", lambda _, stage: stage <= 4)
    with pytest.raises(DeadlineError, match=r"rank 0, 1 of 2 workers did not start within 0 s"):
        watch(joining, job)
    assert len(asked) == 5


def test_a_rank_that_prints_all_the_time_delays_no_deadline_for_another(
    joining: RunService, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(range(5))
    monkeypatch.setattr(joining, "show_next", lambda _: next(lines) >= 0)
    with pytest.raises(DeadlineError, match="rank 0, 1 of 2 workers did not start"):
        watch(joining, None)
