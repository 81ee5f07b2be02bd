"""Failures of tasks, and the stacks of workers that hang."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from services import console_of, run_of
from waiting import eventually

from sparkdl.errors import TrainingError, WorkerLostError
from sparkdl.spark.diagnostics import stacks
from sparkdl.spark.diagnostics.run_client import RunClient
from sparkdl.spark.diagnostics.run_service import RunService
from sparkdl.spark.diagnostics.stacks import describe_threads
from sparkdl.spark.diagnostics.task_failures import end_of_a_rank, memory_advice
from sparkdl.spark.launch.launcher import as_training_error

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
        (
            LOST + "Command exited with code 52",
            HEAP_ADVICE,
        ),
        (
            "java.lang.OutOfMemoryError: Java heap space",
            HEAP_ADVICE,
        ),
        ("Python worker exited unexpectedly (crashed)", "spark.executor.memoryOverhead"),
    ]
    told = [(reason, setting, memory_advice(reason)) for reason, setting in reasons]
    assert [each for each in told if not re.search(each[1], each[2])] == []


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


def test_the_stacks_of_every_other_thread_are_described_the_main_threads_first(
    stuck: None,
) -> None:
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
