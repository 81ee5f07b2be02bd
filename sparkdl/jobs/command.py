"""What train, evaluate and predict have in common: session, paths, output, result and exit code."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from pyarrow import fs
from pyspark.ml import PipelineModel
from pyspark.ml.util import DefaultParamsReader
from pyspark.sql import SparkSession

from sparkdl.checkpoint.trust import trusted_modules
from sparkdl.durable.local_files import LocalFiles
from sparkdl.errors import CheckpointError, ConfigError, SparkDLError
from sparkdl.estimator.classifier import TorchClassificationModel, TorchRegressionModel
from sparkdl.estimator.fitted import FittedModel
from sparkdl.estimator.model import TorchModel
from sparkdl.jobs import logs
from sparkdl.jobs.grammar import JobName, Settings, read_settings
from sparkdl.jobs.output import Location, Output, Run
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
from sparkdl.spark.catalyst.cluster import hadoop_files
from sparkdl.spark.catalyst.versions import of_spark_3
from sparkdl.spark.files import java_errors, open_hadoop
from sparkdl.spark.session import create_session
from sparkdl.user_code.tracebacks import TRACEBACK_CHARACTERS, message_of, text_of

RENAMING = ("hdfs", "viewfs")
"""Hadoop's file systems that rename a directory atomically, as its specification requires; object
stores copy file by file, and others are unknown."""


_KINDS: dict[str, type[FittedModel]] = {
    f"{each.__module__}.{each.__qualname__}": each
    for each in (TorchModel, TorchClassificationModel, TorchRegressionModel)
}
"""The models by what their files call them."""


def locate(path: str) -> Location:
    """The location that Spark takes a path for: with a scheme, or on the default file system.

    Args:
        path: a directory.

    Raises:
        ConfigError: Hadoop does not know the scheme, or the path is a whole file system.
    """
    try:
        with java_errors():
            files, paths = hadoop_files(path)
            uri = files.makeQualified(paths(path)).toUri()
            scheme, inside = uri.getScheme(), str(uri.getPath())
        if inside.strip("/") == "":
            raise ConfigError(f"'{path}' is the root of a file system. Give a directory in it")
        if scheme == "file":
            real = os.path.realpath(inside)
            return Location(files=LocalFiles(), path=real, renames=True)
        opened, root = open_hadoop(path)
    except OSError as error:
        shown = without_credentials(f"'{path}' cannot be reached: {error}")
        raise ConfigError(shown) from error
    return Location(files=opened, path=root.rstrip("/"), renames=scheme in RENAMING)


def spark_path(location: Location, path: str) -> str:
    """A path in a location, in a form that does not depend on Spark's default file system."""
    return f"file://{path}" if isinstance(location.files, LocalFiles) else path


def load_model(path: str, trust: Sequence[str], spark: SparkSession) -> Any:
    """Load a model saved by train.py or anything else.

    Args:
        path: where it is.
        trust: modules that the model's own classes come from.
        spark: the session.

    Raises:
        ConfigError: there is none, or it needs modules that are not trusted.
    """
    location = locate(path)
    there = location.files.get_file_info(f"{location.path}/metadata")
    if there.type != fs.FileType.Directory:
        raise ConfigError(
            f"there is no model at {path}: it has no 'metadata' folder. Give the directory that "
            "train.py wrote, or that a model was saved to"
        )
    reader: Any = spark.sparkContext if of_spark_3() else spark
    kind = str(DefaultParamsReader.loadMetadata(path, reader).get("class"))
    with trusted_modules(*trust):
        if kind in ("pyspark.ml.pipeline.PipelineModel", "org.apache.spark.ml.PipelineModel"):
            return PipelineModel.load(path)
        return _KINDS.get(kind, TorchModel).load(path)


def torch_model(model: Any) -> TorchModel:
    """The network's model inside it."""
    if isinstance(model, PipelineModel):
        return next(stage for stage in reversed(model.stages) if isinstance(stage, TorchModel))
    assert isinstance(model, TorchModel)
    return model


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
