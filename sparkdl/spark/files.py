"""Directories on whatever file system Spark knows: published whole, fetched to read."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from pyspark.sql import SparkSession

from sparkdl.errors import ConfigError


def publish(directory: Path, path: str, *, overwrite: bool) -> None:
    """Put a finished local directory where ``path`` says, all of it or nothing.

    Args:
        directory: the files.
        path: a path as Spark takes them: with a scheme, or on the default file system.
        overwrite: whether to replace what is there.

    Raises:
        ConfigError: something is there already, or the file system needs a session.
    """
    target = _qualify(path)
    local = _local_path(target)
    beside = f"{target.rstrip('/')}.{uuid.uuid4().hex[:8]}"
    if local is not None:
        _publish_locally(directory, local, Path(_local_path(beside) or beside), overwrite)
        return
    fs, paths = hadoop_files(target)
    if fs.exists(paths(target)) and not overwrite:
        raise _exists(path)
    fs.copyFromLocalFile(paths(directory.as_uri()), paths(beside))
    fs.delete(paths(target), True)
    if not fs.rename(paths(beside), paths(target)):
        raise ConfigError(f"{beside} was written but could not be renamed to {target}")


@contextmanager
def fetch(path: str) -> Iterator[Path]:
    """A local directory with the files of ``path``; a copy that lasts for the ``with`` block."""
    target = _qualify(path)
    local = _local_path(target)
    if local is not None:
        yield local
        return
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as scratch:
        fs, paths = hadoop_files(target)
        if not fs.exists(paths(target)):
            raise ConfigError(f"there is nothing at {path}")
        copied = Path(scratch) / "fetched"
        fs.copyToLocalFile(False, paths(target), paths(copied.as_uri()), True)
        yield copied


def _publish_locally(directory: Path, target: Path, beside: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise _exists(str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(directory, beside)
    if target.is_dir():
        shutil.rmtree(target)
    elif target.exists():
        target.unlink()
    beside.rename(target)


def _exists(path: str) -> ConfigError:
    return ConfigError(f"{path} exists already. Save with .write().overwrite().save(path)")


def _qualify(path: str) -> str:
    """The path with its scheme: on Spark's default file system if there is a session."""
    session = SparkSession.getActiveSession()
    if session is None:
        if urlparse(path).scheme not in ("", "file"):
            raise ConfigError(f"{path} is not a local path; create a Spark session first")
        return path
    fs, paths = hadoop_files(path)
    return str(fs.makeQualified(paths(path)).toString())


def _local_path(target: str) -> Path | None:
    parsed = urlparse(target)
    return Path(unquote(parsed.path)) if parsed.scheme in ("", "file") else None


def hadoop_files(path: str) -> tuple[Any, Any]:
    """Hadoop's file system of a path, and its class of paths; both are the driver's JVM's."""
    context = SparkSession.builder.getOrCreate().sparkContext
    paths = context._jvm.org.apache.hadoop.fs.Path  # type: ignore[union-attr]
    return paths(path).getFileSystem(context._jsc.hadoopConfiguration()), paths
