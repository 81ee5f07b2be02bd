"""Whatever a function raises ends its run with a WorkerError that names it, cut to size."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import NoReturn

import pytest
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.errors import WorkerError, WorkerLostError


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoException(BaseException):
    pass


def raise_(kind: type[BaseException], text: str, times: int = 1) -> NoReturn:
    raise kind(text * times)


def interrupt_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


@pytest.mark.slow
def test_an_error_of_any_class_is_told_with_its_traceback(spark: SparkSession) -> None:
    for kind, times, told in (
        (Silent, 1, "Silent: <exception str"),
        (NoException, 1, "NoException: why"),
        (KeyboardInterrupt, 1, "KeyboardInterrupt: why"),
        (GeneratorExit, 1, "GeneratorExit: why"),
        (SystemExit, 1, "SystemExit: why"),
        (ValueError, 17_000_000, "ValueError: whywhy"),
    ):
        with pytest.raises(WorkerError, match=r"rank 0 on .*: ") as caught:
            sparkdl.run(raise_, kind, "why", times, num_workers=1)
        assert told in str(caught.value)
        assert "in raise_" in caught.value.worker_traceback
        assert len(str(caught.value)) < 30_000


def test_a_process_that_is_interrupted_is_lost_and_has_raised_nothing(spark: SparkSession) -> None:
    with pytest.raises(WorkerLostError, match="was ended by SIGINT"):
        sparkdl.run(interrupt_itself, num_workers=1)


def test_the_code_with_which_a_function_leaves_is_told(spark: SparkSession) -> None:
    with pytest.raises(WorkerError, match="SystemExit: 3"):
        sparkdl.run(sys.exit, 3, num_workers=1)
