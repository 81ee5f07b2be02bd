"""How a job ends: its exit code, and its result as JSON, whether it succeeded or failed."""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyspark
import torch
from pyarrow import fs
from pyspark.errors import AnalysisException, IllegalArgumentException, ParseException

from sparkdl.durable.local_files import LocalFiles, put_file
from sparkdl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InUseError,
    ModelError,
    SetupError,
    SparkDLError,
    TrainingError,
)
from sparkdl.redaction import without_credentials
from sparkdl.user_code.tracebacks import TRACEBACK_CHARACTERS, text_of
from sparkdl.version import __version__


def circumstances(began: datetime, application: str | None) -> dict[str, Any]:
    """When a job ran, and with which versions."""
    ended = datetime.now(timezone.utc)
    return {
        "started": began.isoformat(timespec="seconds"),
        "finished": ended.isoformat(timespec="seconds"),
        "seconds": round((ended - began).total_seconds(), 3),
        "application_id": application,
        "versions": {
            "sparkdl-torch": __version__,
            "torch": str(torch.__version__),
            "pyspark": pyspark.__version__,
            "python": platform.python_version(),
        },
    }


def failure(
    job: str, run_id: str | None, code: Exit, error: BaseException, shown: Callable[[str], str]
) -> dict[str, Any]:
    """What the result says about a job that failed, besides its circumstances.

    Args:
        job: the job.
        run_id: its run.
        code: how it ended.
        error: why.
        shown: takes the secrets out of a text.
    """
    return {
        "format": 1,
        "job": job,
        "run_id": run_id,
        "status": "failed",
        "exit_code": int(code),
        "error": {
            "type": type(error).__name__,
            "message": (
                code.meaning
                if code is Exit.TERMINATED
                else shown(text_of(error, TRACEBACK_CHARACTERS))
            ),
            "meaning": code.meaning,
        },
    }


def finite(value: Any) -> Any:
    """The same value for JSON and others' eyes: NaN and infinity become null, URIs lose secrets."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, dict):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value


def clear_result(path: str) -> None:
    """Delete an earlier attempt's result file, lest it be taken for this one's.

    Raises:
        CheckpointError: no result file can be written there.
    """
    with _written(path) as (files, target):
        if files.get_file_info(target).type != fs.FileType.NotFound:
            files.delete_file(target)


def write_result(path: str, result: dict[str, Any]) -> None:
    """Write a result file atomically, over any existing one.

    Raises:
        CheckpointError: it cannot be written.
    """
    with _written(path) as (files, target):
        data = (json.dumps(finite(result), indent=1) + "\n").encode()
        put_file(files, target, lambda file: file.write(data))


@contextlib.contextmanager
def _written(path: str) -> Iterator[tuple[LocalFiles, str]]:
    given = Path(path).expanduser().absolute()
    try:
        target = f"{os.path.realpath(given.parent)}/{given.name}"
        files = LocalFiles()
        files.create_dir(os.path.dirname(target))
        kind = files.get_file_info(target).type
        if kind not in (fs.FileType.File, fs.FileType.NotFound) and not os.path.islink(target):
            raise OSError("what is there is no file")
        yield files, target
    except OSError as error:
        raise CheckpointError(
            f"the result file {given} cannot be written: {error}. Set a different result_file, "
            "or omit it"
        ) from error


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
    # Its error for what else it takes no rows with: a stage's missing column, an unknown codec.
    (IllegalArgumentException, Exit.DATA),
    (OSError, Exit.STORAGE),
]
_REFUSED_ROWS = re.compile(r"\bSQLSTATE: (?:22|39|P0)")
"""Of the SQL standard's classes, in Spark's errors of a row that it cannot compute: a data
exception, a function that fails (a null or an unseen label in a stage), and raise_error."""


def exit_of(error: BaseException) -> Exit:
    """The code for an error: that of the first class in the list that it belongs to."""
    if isinstance(error, SystemExit) and error.code == Exit.TERMINATED:
        return Exit.TERMINATED
    code = next((code for kind, code in _CODES if isinstance(error, kind)), Exit.UNEXPECTED)
    # PySpark has no class for most of them, and a fit raises what its Spark job did as its own.
    of_spark = code is Exit.UNEXPECTED or type(error) is TrainingError
    return Exit.DATA if of_spark and _REFUSED_ROWS.search(str(error)) else code
