"""Why a worker is silent or gone: stacks, and how its task has failed."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from frames import estimator, frame, with_features
from models import append_line, lines, task_rank
from pyspark import SparkStageInfo
from pyspark import cloudpickle as spark_cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType
from services import console_of, run_of
from torch import Tensor, nn
from virtual_time import VirtualClock, coordinator_of
from waiting import eventually

from sparkdl.averager import Averager
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import STRAGGLER_S
from sparkdl.averager.coordination.run_state import RunSpec
from sparkdl.averager.service.saving import Snapshot
from sparkdl.averager.service.server import EdgeOptions
from sparkdl.averager.values.center import CenterSpec
from sparkdl.driver import lifecycle
from sparkdl.errors import DeadlineError, TrainingError, WorkerLostError
from sparkdl.spark.cluster.run_jobs import RunJobs
from sparkdl.spark.diagnostics import stacks
from sparkdl.spark.diagnostics.run_client import RunClient
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.diagnostics.stacks import Stacks, describe_threads
from sparkdl.spark.diagnostics.task_failures import (
    end_of_a_rank,
    host_of_last_failure,
    memory_advice,
    with_sparks_reason,
)
from sparkdl.spark.launch.launcher import as_training_error

for pickles in (cloudpickle, spark_cloudpickle):
    pickles.register_pickle_by_value(sys.modules[__name__])


TIMEOUT_S = 60.0
SPARK_S = 120.0
"""The longest that a test waits for what Spark does."""


class Driver:
    """What a test knows of the driver of a fit, and lets it do.

    Attributes:
        clock: by which its workers are late.
        averagers: those that it has opened.
    """

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.averagers: list[Averager] = []

    def wait(self, seconds: float) -> None:
        """Time passes for the driver."""
        self.clock.run(self.averagers[-1], seconds)

    @property
    def coordinator(self) -> Coordinator:
        return coordinator_of(self.averagers[-1])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """One for which time passes only when the test says so."""
    driver = Driver()

    def opened(
        spec: RunSpec, center: CenterSpec, snapshot: Snapshot, edge: EdgeOptions
    ) -> Averager:
        driver.averagers.append(Averager(spec, center, snapshot, replace(edge, now=driver.clock)))
        return driver.averagers[-1]

    monkeypatch.setattr(lifecycle, "Averager", opened)
    return driver


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file that is there once the driver has asked the workers where they are stuck."""
    ask, path = Stacks.ask, tmp_path / "asked"

    def ask_first(stacks: Stacks, ranks: Any = None) -> str:
        answers = ask(stacks, ranks)
        if answers:
            path.touch()
        return answers

    monkeypatch.setattr(Stacks, "ask", ask_first)
    return str(path)


@contextmanager
def meanwhile(call: Callable[[], None]) -> Iterator[None]:
    """Do something beside the block, which has been done when it ends."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(call)
        yield
        done.result(SPARK_S)


def waits_for_a_lock(path: str) -> None:
    until = time.monotonic() + SPARK_S
    while not Path(path).exists() and time.monotonic() < until:
        time.sleep(0.05)


class Stuck(nn.Module):
    """Rank 1 waits in its third pass, the first time that it comes there, for a file."""

    def __init__(self, path: str, awaits: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.path, self.awaits, self.passes = path, awaits, 0

    def forward(self, features: Tensor) -> Tensor:
        self.passes += task_rank() == 1
        if self.passes == 3 and not lines(self.path):
            append_line(self.path, "here")
            waits_for_a_lock(self.awaits)
        return self.layer(features)


@pytest.mark.nightly
def test_the_error_about_a_silent_worker_has_its_stacks(
    spark: SparkSession, tmp_path: Path, driver: Driver, asked: str
) -> None:
    stuck = str(tmp_path / "stuck")

    def be_late() -> None:
        assert eventually(lambda: bool(lines(stuck)), SPARK_S)
        assert eventually(lambda: set(driver.coordinator.round.waiting) == {0})
        driver.wait(TIMEOUT_S + 1)

    fits = estimator(model=Stuck(stuck, asked), epochs=3, timeout=TIMEOUT_S, maxFailures=0)
    with (
        pytest.raises(DeadlineError, match=r"rank 1 .* did not contribute to round") as raised,
        meanwhile(be_late),
    ):
        fits.fit(frame(spark))
    shown = "".join(traceback.format_exception(raised.value))
    told = shown.partition("Workers that have not left:\n")[2]
    assert "in waits_for_a_lock" in told[told.index("rank 1 on ") :]


@pytest.mark.nightly
def test_the_stacks_of_a_worker_that_is_dropped_are_logged_and_training_goes_on(
    spark: SparkSession,
    tmp_path: Path,
    driver: Driver,
    asked: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stuck = str(tmp_path / "stuck")

    def be_late() -> None:
        assert eventually(lambda: bool(lines(stuck)), SPARK_S)
        assert eventually(lambda: set(driver.coordinator.round.waiting) == {0})
        driver.coordinator.members._longest_window = 1.0  # nobody is late before one has been seen
        driver.wait(STRAGGLER_S + 1)

    with caplog.at_level(logging.WARNING, logger="sparkdl"), meanwhile(be_late):
        fitted = estimator(model=Stuck(stuck, asked), epochs=3).fit(frame(spark))
    assert [epoch.examples for epoch in fitted.history] == [60] * 3
    told = [r.getMessage() for r in caplog.records if "still running" in r.getMessage()]
    assert len(told) == 1
    assert "rank 1 on " in told[0]
    assert "in waits_for_a_lock" in told[0]


def signal_soon(path: Path) -> threading.Thread:
    """Send this process SIGUSR1 once a worker has said that it is busy."""

    def send() -> None:
        assert eventually(lambda: bool(lines(path)), SPARK_S)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.nightly
def test_at_sigusr1_the_driver_writes_where_the_workers_of_a_fit_are(
    spark: SparkSession, tmp_path: Path, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sender = signal_soon(tmp_path / "stuck")
    estimator(model=Stuck(str(tmp_path / "stuck"), asked), epochs=2).fit(frame(spark))
    sender.join()
    told = capsys.readouterr().err
    assert "rank 0 on " in told
    assert "rank 1 on " in told
    assert "in waits_for_a_lock" in told
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.fixture
def looks(tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a file for each time that the watchdog has seen tasks run, named by its number.

    Most of the timeout passes each time.
    """
    folder, stages_of = tmp_path / "looks", RunJobs.stages
    folder.mkdir()

    def look(jobs: RunJobs) -> list[SparkStageInfo]:
        stages = stages_of(jobs)
        if any(stage.numActiveTasks for stage in stages) and len(list(folder.iterdir())) < 6:
            driver.wait(0.8 * TIMEOUT_S)
            Path(folder, str(len(list(folder.iterdir())))).touch()
        return stages

    monkeypatch.setattr(RunJobs, "stages", look)
    return str(folder)


def slowly(folder: str, look: Callable[[int], int]) -> Any:
    """A function of Spark's that returns what it is given, but only after so many looks."""

    def wait(value: int) -> int:
        waits_for_a_lock(f"{folder}/{look(value)}")
        return value

    return F.udf(wait, LongType(), useArrow=False)


@pytest.mark.gate
def test_an_upstream_that_takes_longer_than_the_timeout_is_waited_for(
    spark: SparkSession, driver: Driver, looks: str
) -> None:
    ids = spark.range(0, 15, 1, 15).select(
        slowly(looks, lambda value: value // 3)("id").alias("id")
    )
    upstream = ids.repartition(2)
    fitted: Any = estimator(timeout=TIMEOUT_S, batchSize=4).fit(with_features(upstream))
    assert fitted.history[0].examples == 15
    assert driver.clock.passed > 3 * TIMEOUT_S


@pytest.mark.gate
def test_a_single_task_upstream_that_takes_longer_than_the_timeout_is_waited_for(
    spark: SparkSession, driver: Driver, looks: str
) -> None:
    """As many tasks as workers, and nothing for Spark to report while they run."""
    ids = spark.range(0, 2, 1, 2).select(slowly(looks, lambda value: 4)("id").alias("id"))
    upstream = ids.repartition(2)
    upstream = upstream.select(F.explode(F.sequence("id", F.col("id") + 4)).alias("id"))
    fitted: Any = estimator(timeout=TIMEOUT_S, batchSize=4).fit(with_features(upstream))
    assert fitted.history[0].examples == 10
    assert driver.clock.passed > 3 * TIMEOUT_S


LOST = "ExecutorLostFailure (executor 3 exited caused by one of the running tasks) Reason: "
HEAP_ADVICE = r"raise spark\.executor\.memory, or, if rows .* lower .*maxRecordsPerBatch$"


def test_want_of_memory_names_the_setting_to_raise() -> None:
    reasons = [
        (LOST + "Command exited with code 137", "spark.executor.memoryOverhead"),
        (LOST + "Container from a bad node. Exit status: 137.", "spark.executor.memoryOverhead"),
        (
            LOST + "Container killed by YARN for exceeding memory limits. 5 GB of 5 GB used.",
            "spark.executor.memoryOverhead",
        ),
        (
            LOST
            + "The executor with id 3 exited with exit code 137(SIGKILL, possible container OOM).",
            "spark.executor.memoryOverhead",
        ),
        (LOST + "Command exited with code 52", HEAP_ADVICE),
        ("java.lang.OutOfMemoryError: Java heap space", HEAP_ADVICE),
        ("Python worker exited unexpectedly (crashed)", "spark.executor.memoryOverhead"),
    ]
    told = [(reason, setting, memory_advice(reason)) for reason, setting in reasons]
    assert [each for each in told if not re.search(each[1], each[2])] == []


def test_a_lost_worker_is_explained_by_its_own_job_and_not_by_a_later_one_in_the_callers_group(
    spark: SparkSession,
) -> None:
    context = spark.sparkContext

    def fail(rows: Iterator[int]) -> None:
        raise ValueError

    context.setJobGroup("a cell of a notebook", "a search that fits several models at once")
    try:
        jobs, raised = RunJobs(context, "a run that fails"), list[Exception]()
        jobs.start(lambda: context.parallelize([1], 1).foreachPartition(fail), raised.append)
        assert jobs.wait(SPARK_S)
        assert raised
        assert context.parallelize([1], 1).count() == 1
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
        context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]
    assert host_of_last_failure(jobs) is not None
    explained = with_sparks_reason(WorkerLostError("rank 0 is silent", ranks=(0,)), jobs)
    assert re.search(r"Spark says of rank 0 on \S+: \S+\.PythonException", str(explained))


def test_other_ends_are_not_blamed_on_memory() -> None:
    ends = ("Command exited with code 1", "Command exited with code 1370", "heartbeat timed out")
    assert [memory_advice(LOST + end) for end in ends] == [""] * 3


def test_a_process_that_may_have_left_by_itself_is_not_blamed_on_memory_alone() -> None:
    told = memory_advice("Python worker exited unexpectedly (crashed)")
    assert told.index("os._exit") < told.index("memory")
    assert "os._exit" not in memory_advice("the process 71 of rank 1 on a was ended by SIGKILL")


def test_a_job_that_failed_for_a_lost_process_is_a_loss_and_others_are_not() -> None:
    assert isinstance(as_training_error(RuntimeError(LOST + "exit")), WorkerLostError)
    assert type(as_training_error(RuntimeError("UNRESOLVED_COLUMN"))) is TrainingError


def test_a_task_whose_executor_has_no_heap_left_is_a_loss_with_the_setting_to_raise() -> None:
    task = "Lost task 0.3 in stage 1.0 (TID 6) (10.0.0.2 executor 3): "
    told = as_training_error(RuntimeError(f"{task}java.lang.OutOfMemoryError: Java heap space"))
    assert isinstance(told, WorkerLostError)
    assert re.search(HEAP_ADVICE, str(told))


def test_how_a_ranks_process_has_ended_is_found_in_sparks_words() -> None:
    for how, advises in (("exited with code 0", False), ("was ended by SIGKILL", True)):
        line = f"the process 71 of rank 1 on a {how}"
        error = f"sparkdl.errors.WorkerLostError: {line}"
        found = end_of_a_rank(f"Stage failed\nTraceback:\n{error}\n\n\tat a.b.C\n")
        assert found.startswith(line)
        assert ("memoryOverhead" in found) is advises
    assert end_of_a_rank("Stage failed\nZeroDivisionError: x") == ""


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def console(request: pytest.FixtureRequest) -> Iterator[RunService]:
    shown = lambda rank, lines, left_out: None  # noqa: E731
    with console_of(shown, tls=request.param) as opened:
        yield opened


@pytest.fixture
def stuck() -> Iterator[None]:
    """A thread that sleeps in a function of this name."""
    over = threading.Event()

    def waits_for_godot() -> None:
        over.wait(30)

    thread = threading.Thread(target=waits_for_godot, name="stuck")
    thread.start()
    yield
    over.set()
    thread.join()


def wait_until_connected(console: RunService, ranks: set[int]) -> None:
    assert eventually(lambda: {each.rank for each in console.connected if each.where} == ranks, 60)


def test_the_stacks_of_every_other_thread_are_described_the_main_threads_first(stuck: None) -> None:
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(describe_threads()), name="asking")
    asking.start()
    asking.join()
    threads = [line.split(",")[0] for line in found[0].splitlines() if line.startswith("thread ")]
    assert threads[0] == "thread MainThread"
    assert "thread stuck" in threads
    assert "thread asking" not in threads
    assert "in waits_for_godot" in found[0]


def test_workers_answer_beside_what_they_print(console: RunService, stuck: None) -> None:
    with RunClient(console.address, 0) as first, RunClient(console.address, 1) as second:
        wait_until_connected(console, {0, 1})
        first.send_lines(["before"], 0)
        told = console.stacks.ask()
        second.send_lines(["after"], 0)
        ranks = [line.split(" on ")[0] for line in told.splitlines() if line.startswith("rank ")]
        assert ranks == ["rank 0", "rank 1"]
        assert told.count("in waits_for_godot") == 2
        assert console.stacks.ask([1]).startswith("rank 1 on ")
        for client in (first, second):
            client.finish()


def test_the_line_that_a_workers_main_thread_runs_is_told_alone(console: RunService) -> None:
    found: list[dict[int, str]] = []
    with RunClient(console.address, 0) as client:
        wait_until_connected(console, {0})
        asking = threading.Thread(target=lambda: found.append(console.stacks.tops([0, 1])))
        asking.start()
        asking.join(20)
        client.finish()
    # The main thread is this test's, which waits in join.
    (top,) = found[0].values()
    assert re.fullmatch(r'File ".*threading.py", line \d+, in \w+: .*', top)


def test_a_worker_that_cannot_answer_is_named_with_its_process(
    console: RunService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ANSWER_S", 0.2)
    monkeypatch.setattr(RunClient, "_listen", lambda self: None)
    with RunClient(console.address, 3):
        wait_until_connected(console, {3})
        assert "did not answer within 0.2 s: it is stopped or cut off" in console.stacks.ask()


def test_whoever_has_left_is_not_asked(console: RunService) -> None:
    with RunClient(console.address, 0) as client:
        wait_until_connected(console, {0})
        client.finish()
    wait_until_connected(console, set())
    assert console.stacks.ask() == ""


def test_the_ranks_of_a_function_answer_while_they_wait_for_others(stuck: None) -> None:
    with (
        run_of(2) as run,
        RunClient(run.address, 0) as waiting,
        RunClient(run.address, 1) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        gathering = pool.submit(waiting.gather, {"a": 1})
        wait_until_connected(run, {0, 1})
        assert "in waits_for_godot" in run.stacks.ask([0])
        assert other.gather({"b": 2}) == [{"a": 1}, {"b": 2}]
        assert gathering.result(timeout=60) == [{"a": 1}, {"b": 2}]
        waiting.finish()
        other.finish()
