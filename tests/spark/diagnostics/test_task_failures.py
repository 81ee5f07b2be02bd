"""Spark's words for the end of a process, and which setting they call for."""

from __future__ import annotations

import re

from sparkdl.errors import TrainingError, WorkerLostError
from sparkdl.spark.diagnostics.task_failures import end_of_a_rank, memory_advice
from sparkdl.spark.launch.launcher import as_training_error

LOST = "ExecutorLostFailure (executor 3 exited caused by one of the running tasks) Reason: "


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
        (LOST + "Command exited with code 52", "raise spark.executor.memory$"),
        ("java.lang.OutOfMemoryError: Java heap space", "raise spark.executor.memory$"),
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
