"""What train, evaluate and predict have in common: session, output, result and exit code."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from pyspark.sql import SparkSession

from sparkdl.errors import CheckpointError, SparkDLError
from sparkdl.jobs import logs
from sparkdl.jobs.configuration.grammar import JobName, Settings, read_settings
from sparkdl.jobs.locations import locate, spark_path
from sparkdl.jobs.output import Output, Run
from sparkdl.jobs.result import (
    Exit,
    circumstances,
    clear_result,
    exit_of,
    failure,
    finite,
    write_result,
)
from sparkdl.redaction import without_credentials
from sparkdl.spark.session.session import create_session
from sparkdl.user_code.tracebacks import TRACEBACK_CHARACTERS, message_of, text_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobContext:
    """What a job's own part is given.

    Attributes:
        settings: what was asked for.
        spark: the session.
        target: where it writes its output, as a path for Spark; nothing is there yet.
        checkpoints: a directory for checkpoints of this run; None if it has no id.
    """

    settings: Settings
    spark: SparkSession
    target: str
    checkpoints: str | None


class JobOutput(NamedTuple):
    """What a job's own part has done: what goes into the result, and what a person is told."""

    result: dict[str, Any]
    summary: str


def run_command(
    job: JobName, work: Callable[[JobContext], JobOutput], arguments: list[str] | None
) -> int:
    """Run a job from its command line to its exit code.

    Args:
        job: the job to run.
        work: the job's own part.
        arguments: the command line; None for this process's own.

    Returns:
        The exit code; see ``Exit``.
    """
    began, said = datetime.now(timezone.utc), dict[str, Any]()
    try:
        settings = read_settings(job, arguments, said)
    except SparkDLError as error:
        code, why = exit_of(error), without_credentials(str(error))
        print(f"{job}.py: error: {why}\n{job}.py --help lists every key", file=sys.stderr)
        path = said.get("result_file")
        if path and isinstance(path, str):  # lest an earlier attempt's be taken for this one's
            told = failure(job, None, code, error, without_credentials)
            try:
                write_result(path, told | circumstances(began, None))
            except CheckpointError as unwritten:
                print(f"{job}.py: {unwritten}", file=sys.stderr)
        return int(code)
    context = {"job": job} | ({"run_id": settings.run_id} if settings.run_id else {})
    logs.configure(settings.log_format, settings.log_level, context)
    application: list[str] = []
    try:
        if settings.result_file is not None:
            clear_result(settings.result_file)
        result, words = _run(settings, work, began, application)
        code = Exit.DONE
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        code = exit_of(error)
        told = failure(job, settings.run_id, code, error, settings.shown)
        result = {**told, **circumstances(began, next(iter(application), None))}
        words = ""
        _tell(job, code, error, settings)
    if settings.result_file is not None:
        try:
            write_result(settings.result_file, result)
        except CheckpointError as error:
            code = code or exit_of(error)
            _tell(job, code, error, settings)
    if settings.log_format == "json":
        _print(json.dumps(finite(result)))
    elif words:
        _print(words)
    return int(code)


def _print(words: str) -> None:
    """Write to standard output; nobody reading it changes nothing about what was done."""
    try:
        print(words, flush=True)
    except (OSError, ValueError) as error:
        logger.warning("standard output cannot be written to (%s); it was to get: %s", error, words)
        # Python's exit code would be 120 if it could not write this then either.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _run(
    settings: Settings,
    work: Callable[[JobContext], JobOutput],
    began: datetime,
    application: list[str],
) -> tuple[dict[str, Any], str]:
    with _session(settings) as spark:
        application.append(str(spark.sparkContext.applicationId))
        location, shown = locate(settings.output), without_credentials(settings.output)
        run = Run(job=settings.job, run_id=settings.run_id, configuration_sha256=settings.digest)
        output = Output(location, run)
        with output.claimed(application[0]) as done:
            if done is not None:
                return done, f"{shown} is already complete for run_id '{settings.run_id}'."
            target = spark_path(location, output.staged)
            made = work(JobContext(settings, spark, target, output.checkpoints))
            common = {"status": "complete", "exit_code": 0, "output": shown}
            common |= circumstances(began, application[0])
            result = output.commit(finite(common | made.result))
    return result, without_credentials(f"{made.summary}; {result['seconds']:.0f} s in all.")


@contextmanager
def _session(settings: Settings) -> Iterator[SparkSession]:
    session = dict(settings.session)
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        session["master"] = None  # spark-submit started this process and has chosen the master
    there = SparkSession.getActiveSession() is not None  # a notebook platform's, not ours to stop
    spark = create_session(**session)
    try:
        spark.sparkContext.setLogLevel("ERROR")
        yield spark
    finally:
        if not there:
            _stop(spark)


def _stop(spark: SparkSession) -> None:
    """Stop a session; one that cannot be stopped changes nothing about what was done."""
    try:
        spark.stop()
    except Exception as error:  # a JVM that has just died raises py4j's, or a socket's
        logger.warning("Spark could not be stopped: %s", message_of(error))


def _tell(job: str, code: Exit, error: BaseException, settings: Settings) -> None:
    trace = settings.shown("".join(traceback.format_exception(error)))
    if code is Exit.UNEXPECTED:
        logger.error("%s.py failed\n%s", job, trace)
    elif code is not Exit.TERMINATED:  # of which the fit has told
        logger.error("%s.py: %s", job, settings.shown(text_of(error, TRACEBACK_CHARACTERS)))
        logger.debug("where it was raised\n%s", trace)
