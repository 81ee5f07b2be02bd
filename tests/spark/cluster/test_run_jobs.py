"""The jobs of a run end when it does, whenever it is interrupted; Spark itself is not needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from py4j.protocol import Py4JError

from sparkdl.spark.cluster import run_jobs
from sparkdl.spark.cluster.run_jobs import RunJobs

PATIENCE_S = 60.0


class Context:
    """A Spark context that counts how often it is asked to cancel jobs."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked = threading.Semaphore(0)
        self.error = error

    def getLocalProperty(self, name: str) -> None:
        return None

    def setJobGroup(self, *args: Any, **kwargs: Any) -> None:
        pass

    addJobTag = setJobGroup

    def cancelJobsWithTag(self, tag: str) -> None:
        self.asked.release()
        if self.error is not None:
            raise self.error

    def wait(self, times: int) -> None:
        for _ in range(times):
            assert self.asked.acquire(timeout=PATIENCE_S)


def jobs_on(context: Context) -> RunJobs:
    return RunJobs(context, "a test")  # type: ignore[arg-type]


def never(error: Exception) -> None:
    raise AssertionError(error)


@pytest.fixture(autouse=True)
def plain_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_jobs, "InheritableThread", threading.Thread)


def test_a_job_that_spark_gets_only_after_the_cancel_is_cancelled_too() -> None:
    context = Context()
    jobs = jobs_on(context)
    begun = threading.Event()

    def plan_and_submit() -> None:
        begun.set()
        context.wait(3)  # whatever Spark is asked before that, it knows no job

    jobs.start(plan_and_submit, never)
    assert begun.wait(PATIENCE_S)
    jobs.end()
    assert jobs.ended


def test_a_second_interrupt_leaves_no_job_running(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context()
    jobs = jobs_on(context)
    goes_on = threading.Event()

    def plan_and_submit() -> None:
        goes_on.wait(PATIENCE_S)
        context.wait(3)

    def interrupted(patience_s: float) -> bool:
        raise KeyboardInterrupt

    jobs.start(plan_and_submit, never)
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jobs.end(PATIENCE_S)
    assert not jobs.ended
    goes_on.set()
    assert jobs.wait(PATIENCE_S)


def test_an_interrupt_as_its_thread_starts_keeps_a_job_from_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets: list[Callable[[], None]] = []

    class Interrupted(threading.Thread):
        def __init__(self, target: Callable[[], None], **kwargs: Any) -> None:
            super().__init__(target=target, **kwargs)
            targets.append(target)

        def start(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_jobs, "InheritableThread", Interrupted)
    context = Context()
    jobs = jobs_on(context)
    called: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        jobs.start(lambda: called.append(1), never)
    assert not jobs.ended
    jobs.end()
    assert jobs.ended
    targets[0]()  # the thread had been started all the same
    assert not called


def test_a_job_that_was_left_to_end_is_not_cancelled() -> None:
    context = Context()
    jobs = jobs_on(context)
    jobs.start(lambda: None, never)
    jobs.end(PATIENCE_S)
    assert jobs.ended
    assert not context.asked.acquire(blocking=False)


def test_a_spark_that_cancels_no_more_raises_nothing_in_its_place() -> None:
    for error in (Py4JError("An error occurred while calling o31.sc"), ConnectionRefusedError()):
        context = Context(error)
        jobs = jobs_on(context)
        goes_on, told = threading.Event(), []

        def fails(waits: threading.Event = goes_on, raised: Exception = error) -> None:
            waits.wait(PATIENCE_S)
            raise raised

        jobs.start(fails, told.append)
        jobs.cancel()
        context.wait(1)
        goes_on.set()
        assert jobs.wait(PATIENCE_S)
        assert told == [error]


def test_a_thread_that_cannot_inherit_the_callers_properties_tells_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark's JVM cannot be asked without a file descriptor, for example."""
    refused = OSError("Too many open files")

    class Disinherited(threading.Thread):
        def __init__(self, target: Callable[[], None], **kwargs: Any) -> None:
            super().__init__(target=self.inherit, **kwargs)

        def inherit(self) -> None:
            raise refused

    monkeypatch.setattr(run_jobs, "InheritableThread", Disinherited)
    jobs, told = jobs_on(Context()), list[Exception]()
    jobs.start(lambda: None, told.append)
    assert jobs.wait(PATIENCE_S)
    assert told == [refused]
