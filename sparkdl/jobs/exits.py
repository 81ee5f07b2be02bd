"""How a job ends: the exit codes, which say whether to try again."""

from __future__ import annotations

import enum

from pyspark.errors import AnalysisException, ParseException

from sparkdl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InUseError,
    ModelError,
    SetupError,
    SparkDLError,
)


class Exit(enum.IntEnum):
    """A job's exit code; ``meaning`` is what --help and the docs say about it."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Exit:  # noqa: D102
        made = int.__new__(cls, code)
        made._value_ = code
        made.meaning = meaning
        return made

    DONE = 0, "the output is complete, or already was for this run_id"
    UNEXPECTED = 1, "any other error: see the traceback"
    CONFIGURATION = 2, "the command line or the configuration is wrong; retrying will not help"
    DATA = 3, "rows, columns or tables do not fit; retrying will not help"
    MODEL = 4, "model, loss or optimizer do not fit; retrying will not help"
    SETUP = 5, "Java or a Python package is missing, or versions differ; retrying will not help"
    TRAINING = 6, "training failed; with a run_id the next attempt resumes it"
    STORAGE = 7, "a file could not be written or read; retrying may help"
    IN_USE = 75, "another process is writing this output; try again later"
    TERMINATED = 143, "the job was told to end (SIGTERM); with a run_id the next attempt resumes it"


_CODES: list[tuple[type[BaseException], Exit]] = [
    (InUseError, Exit.IN_USE),
    (ConfigError, Exit.CONFIGURATION),
    (DataError, Exit.DATA),
    (ModelError, Exit.MODEL),
    (SetupError, Exit.SETUP),
    (CheckpointError, Exit.STORAGE),
    (SparkDLError, Exit.TRAINING),
    # Spark's error for a missing path, table or column, and for SQL that it cannot parse.
    (AnalysisException, Exit.DATA),
    (ParseException, Exit.DATA),
    (OSError, Exit.STORAGE),
]


def exit_of(error: BaseException) -> Exit:
    """The code for an error: that of the first class in the list that it belongs to."""
    if isinstance(error, SystemExit) and error.code == Exit.TERMINATED:
        return Exit.TERMINATED
    return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.UNEXPECTED)
