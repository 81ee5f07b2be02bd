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


@pytest.fixture
def shared_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs use the session of all tests, and leave it and the logging as they were."""
    root, steps = logging.getLogger(), logging.getLogger("sparkdl.jobs.steps")
    before = (root.handlers, root.level, steps.handlers, steps.propagate)
    monkeypatch.setattr(command, "_session", lambda settings: contextlib.nullcontext(spark))
    yield
    root.handlers, root.level, steps.handlers, steps.propagate = before
    logging.captureWarnings(False)
