"""Directories on any file system that Spark knows: published whole, fetched for reading.

Hadoop's are also there as pyarrow's, which needs a native library for ``hdfs:`` and knows nothing
of vendors' own schemes; the JVM of a Spark driver has the classes and credentials of every file
system that the cluster reads.
"""

from __future__ import annotations

import io
import logging
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pyarrow as pa
from py4j.protocol import Py4JError
from pyarrow import fs
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


def open_hadoop(uri: str) -> tuple[fs.FileSystem, str]:
    """A pyarrow file system that asks Hadoop, and the path in it.

    Args:
        uri: a directory with its scheme, as Spark takes it.

    Raises:
        OSError: Hadoop does not know the scheme, or cannot reach the store.
    """
    with java_errors():
        files, paths = hadoop_files(uri)
        qualified = files.makeQualified(paths(uri)).toString()
    return fs.PyFileSystem(_HadoopFiles(files, paths)), str(qualified)


class _HadoopFiles(fs.FileSystemHandler):  # type: ignore[misc]
    """What ``pyarrow.fs.PyFileSystem`` calls; paths include their scheme.

    Args:
        files: Hadoop's file system.
        path: its class of paths.
    """

    def __init__(self, files: Any, path: Any) -> None:
        self._files = files
        self._path = path

    def get_type_name(self) -> str:
        return "hadoop"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        with java_errors():
            found = []
            for path in paths:
                there = self._files.exists(self._path(path))
                status = self._files.getFileStatus(self._path(path)) if there else None
                found.append(_info(path, status))
            return found

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        with java_errors():
            if not self._files.exists(self._path(selector.base_dir)):
                if selector.allow_not_found:
                    return []
                raise FileNotFoundError(selector.base_dir)
            found = self._files.listStatus(self._path(selector.base_dir))
            return [_info(status.getPath().toString(), status) for status in found]

    def create_dir(self, path: str, recursive: bool) -> None:
        self._require(path, lambda: self._files.mkdirs(self._path(path)))

    def delete_dir(self, path: str) -> None:
        self._require(path, lambda: self._files.delete(self._path(path), True))

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        for info in self.get_file_info_selector(fs.FileSelector(path, missing_dir_ok)):
            self.delete_dir(info.path)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError("refusing to delete a whole file system")

    def delete_file(self, path: str) -> None:
        self._require(path, lambda: self._files.delete(self._path(path), False))

    def move(self, src: str, dest: str) -> None:
        self._require(dest, lambda: self._files.rename(self._path(src), self._path(dest)))

    def copy_file(self, src: str, dest: str) -> None:
        with self.open_input_stream(src) as source, self.open_output_stream(dest, None) as target:
            while block := source.read(1 << 20):
                target.write(block)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        with java_errors():
            return pa.PythonFile(_Reader(self._files.open(self._path(path))), mode="r")

    def open_input_file(self, path: str) -> pa.NativeFile:
        with self.open_input_stream(path) as stream:
            return pa.BufferReader(stream.read())

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        with java_errors():
            return pa.PythonFile(_Writer(self._files.create(self._path(path), True)), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise NotImplementedError("checkpoints are never appended to")

    @staticmethod
    def _require(path: str, deed: Any) -> None:
        with java_errors():
            if not deed():
                raise OSError(f"the file system refuses to change {path}")


class _Reader(io.RawIOBase):
    """A Hadoop stream, to be read from its beginning."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        with java_errors():
            # The bytes are a return value, because py4j passes copies of arrays.
            many = self._stream.readAllBytes() if size < 0 else self._stream.readNBytes(size)
            return bytes(many)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with java_errors():
                self._stream.close()


class _Writer(io.RawIOBase):
    """A Hadoop stream, to be written from its beginning."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, octets: Any) -> int:
        with java_errors():
            self._stream.write(bytearray(octets))
        return len(octets)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with java_errors():
                if self._stream.hasCapability("hsync"):  # otherwise it is safe once closed
                    self._stream.hsync()
                self._stream.close()


def _info(path: str, status: Any) -> fs.FileInfo:
    if status is None:
        return fs.FileInfo(path, fs.FileType.NotFound)
    if status.isDirectory():
        return fs.FileInfo(path, fs.FileType.Directory)
    return fs.FileInfo(path, fs.FileType.File, size=int(status.getLen()))
