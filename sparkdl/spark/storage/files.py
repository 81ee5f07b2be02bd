"""Directories on any file system that Spark knows: published whole, fetched for reading."""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from py4j.protocol import Py4JError
from pyspark import SparkContext

from sparkdl.durable.publishing import ASIDE, put_directory, whole_directory
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.redaction import without_credentials
from sparkdl.spark.catalyst.cluster import hadoop_files

logger = logging.getLogger(__name__)


def publish(directory: Path, path: str, *, overwrite: bool) -> None:
    """Put a finished local directory at ``path``, all of it or nothing.

    On this machine's own file systems it survives a loss of power once this returns, and what it
    replaces is deleted only then. Elsewhere it is as safe as Hadoop's file system keeps files that
    were closed and renamed; where renaming means copying (object stores), an interruption while
    something is replaced may leave a part of it.

    Args:
        directory: holds the files.
        path: a path as Spark takes it: with a scheme, or on the default file system.
        overwrite: whether to replace what is there.

    Raises:
        ConfigError: something is there already, or the file system needs a session.
        CheckpointError: the file system refuses; the disk may be full.
    """
    target = _qualify(path)
    local = _local_path(target)
    try:
        if local is None:
            _publish_to_hadoop(directory, target.rstrip("/"), overwrite)
            return
        if whole_directory(local).exists() and not overwrite:
            raise _exists(path)
        put_directory(directory, local)
    except OSError as error:
        raise CheckpointError(
            f"{without_credentials(f'{path} could not be written: {error}')}. What was there "
            "before is unchanged"
        ) from error


@contextmanager
def fetch(path: str) -> Iterator[Path]:
    """A local directory with the files of ``path``; a copy lasts for the ``with`` block."""
    target = _qualify(path)
    local = _local_path(target)
    if local is not None:
        yield whole_directory(local)
        return
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as scratch:
        fs, paths = hadoop_files(target)
        if not fs.exists(paths(target)):
            target = target.rstrip("/") + ASIDE
            if not fs.exists(paths(target)):
                raise ConfigError(f"there is nothing at {without_credentials(path)}")
            logger.warning(
                "a save to %s was interrupted; reading what was there before",
                without_credentials(path),
            )
        copied = Path(scratch) / "fetched"
        fs.copyToLocalFile(False, paths(target), paths(copied.as_uri()), True)
        yield copied


def _publish_to_hadoop(directory: Path, target: str, overwrite: bool) -> None:
    """Like ``put_directory``, with Hadoop's operations."""
    fs, path = hadoop_files(target)
    here, old, new = path(target), path(target + ASIDE), path(f"{target}.{uuid.uuid4().hex[:8]}")
    if not overwrite and (fs.exists(here) or fs.exists(old)):
        raise _exists(target)
    with java_errors():
        try:
            fs.copyFromLocalFile(path(directory.as_uri()), new)
            if fs.exists(here):
                fs.delete(old, True)
                _rename(fs, here, old)
            _rename(fs, new, here)
        except BaseException:
            if fs.exists(old) and not fs.exists(here):
                fs.rename(old, here)
            fs.delete(new, True)
            raise
    try:
        fs.delete(old, True)
    except Py4JError as error:
        logger.warning("%s could not be deleted: %s", old.toString(), error)


def _rename(fs: Any, source: Any, target: Any) -> None:
    if not fs.rename(source, target):
        raise OSError(f"{source.toString()} could not be renamed to {target.toString()}")


def _exists(path: str) -> ConfigError:
    return ConfigError(
        f"{without_credentials(path)} already exists. Save with .write().overwrite().save(path)"
    )


def _qualify(path: str) -> str:
    """The path with its scheme: on Spark's default file system if there is a session."""
    if SparkContext._active_spark_context is None:  # a Python thread has no active session
        if urlparse(path).scheme not in ("", "file"):
            raise ConfigError(f"{path} is not a local path; create a Spark session first")
        return path
    fs, paths = hadoop_files(path)
    return str(fs.makeQualified(paths(path)).toString())


def _local_path(target: str) -> Path | None:
    """Where a path is on this machine; None if it is elsewhere.

    Hadoop's paths are not URIs: ``#``, ``?`` and ``%20`` after the scheme are just characters.
    """
    if target.startswith("file://"):
        return Path("/" + target.removeprefix("file://").partition("/")[2])
    if target.startswith("file:"):
        return Path(target.removeprefix("file:"))
    return None if urlparse(target).scheme else Path(target)


@contextmanager
def java_errors() -> Iterator[None]:
    """Turn Java exceptions into OSError."""
    try:
        yield
    except Py4JError as error:
        java = getattr(error, "java_exception", None)
        raise OSError(str(error) if java is None else str(java)) from error
