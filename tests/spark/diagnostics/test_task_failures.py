"""Spark's words for the end of a process, and which setting they call for."""

from __future__ import annotations

import pytest

from sparkdl.errors import TrainingError, WorkerLostError
from sparkdl.spark.diagnostics.task_failures import end_of_a_rank, memory_advice
from sparkdl.spark.launch.launcher import as_training_error

LOST = "ExecutorLostFailure (executor 3 exited caused by one of the running tasks) Reason: "


@pytest.mark.parametrize(
    ("reason", "setting"),
    [
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
    ],
)
def test_want_of_memory_names_the_setting_to_raise(reason: str, setting: str) -> None:
    assert setting.removesuffix("$") in memory_advice(reason)
    assert not setting.endswith("$") or memory_advice(reason).endswith(setting.removesuffix("$"))


@pytest.mark.parametrize(
    "reason",
    [
        LOST + "Command exited with code 1",
        LOST + "Command exited with code 1370",
        LOST + "worker lost: heartbeat timed out",
    ],
)
def test_other_ends_are_not_blamed_on_memory(reason: str) -> None:
    assert memory_advice(reason) == ""


def test_a_process_that_may_have_left_by_itself_is_not_blamed_on_memory_alone() -> None:
    told = memory_advice("Python worker exited unexpectedly (crashed)")
    assert told.index("os._exit") < told.index("memory")
    assert "os._exit" not in memory_advice("the process 71 of rank 1 on a was ended by SIGKILL")


def test_a_job_that_failed_for_a_lost_process_is_a_loss_and_others_are_not() -> None:
    assert isinstance(as_training_error(RuntimeError(LOST + "exit")), WorkerLostError)
    assert type(as_training_error(RuntimeError("UNRESOLVED_COLUMN"))) is TrainingError


@pytest.mark.parametrize(
    ("how", "advises"), [("exited with code 0", False), ("was ended by SIGKILL", True)]
)
def test_how_a_ranks_process_has_ended_is_found_in_sparks_words(how: str, advises: bool) -> None:
    line = f"the process 71 of rank 1 on a {how}"
    text = f"Stage failed\nTraceback:\nsparkdl.errors.WorkerLostError: {line}\n\n\tat a.b.C\n"
    found = end_of_a_rank(text)
    assert found.startswith(line)
    assert ("memoryOverhead" in found) is advises
    assert end_of_a_rank("Stage failed\nZeroDivisionError: x") == ""
