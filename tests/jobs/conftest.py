"""Makes jobs and their package importable, as when jobs/train.py is run, and lends a session."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sparkdl.jobs import command

JOBS = Path(__file__).parents[2] / "jobs"
if str(JOBS) not in sys.path:
    sys.path.insert(0, str(JOBS))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """No job's handler outlives its test: the stream that it writes to is closed then."""
    yield
    root, steps = logging.getLogger(), logging.getLogger("sparkdl.jobs.steps")
    for logger in (root, steps):
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler:  # pytest's own are of other kinds
                logger.removeHandler(handler)
    root.setLevel(logging.WARNING)
    steps.propagate = True
    logging.captureWarnings(False)


@pytest.fixture
def shared_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs use the session of all tests, and leave it."""
    monkeypatch.setattr(command, "_session", lambda settings: contextlib.nullcontext(spark))
