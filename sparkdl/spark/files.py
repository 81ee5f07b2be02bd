"""Directories on any file system that Spark knows: published whole, fetched for reading.

Hadoop's are also there as pyarrow's, which needs a native library for ``hdfs:`` and knows nothing
of vendors' own schemes; the JVM of a Spark driver has the classes and credentials of every file
system that the cluster reads.
"""

from __future__ import annotations

import io
import logging
import posixpath
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlparse

import pyarrow as pa
from pyarrow import fs

from sparkdl.durable.local_files import (
    ASIDE,
    delete,
    exists,
    put_directory,
    replace_directory,
    whole_directory,
)
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.redaction import shown, without_credentials
from sparkdl.spark.catalyst.cluster import hadoop_files
from sparkdl.spark.catalyst.jvm import Py4JError, running_context

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""The most bytes read or written at once."""


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
        copied = Path(scratch) / "fetched"
        try:
            with java_errors():
                _fetch_from_hadoop(target, copied)
        except OSError as error:
            raise CheckpointError(f"{shown(path)} could not be read: {error}") from error
        yield copied


def _fetch_from_hadoop(target: str, copied: Path) -> None:
    fs, path = hadoop_files(target)
    if not fs.exists(path(target)):
        told, target = shown(target), target.rstrip("/") + ASIDE
        if not fs.exists(path(target)):
            raise ConfigError(f"there is nothing at {told}")
        logger.warning("a save to %s was interrupted; reading what was there before", told)
    fs.copyToLocalFile(False, path(target), path(_hadoop_path(copied)), True)


def _publish_to_hadoop(directory: Path, target: str, overwrite: bool) -> None:
    """Like ``put_directory``, with Hadoop's operations."""
    old, new = target + ASIDE, f"{target}.{uuid.uuid4().hex[:8]}"
    files, _ = open_hadoop(target)
    if not overwrite and (exists(files, target) or exists(files, old)):
        raise _exists(target)
    try:
        with java_errors():
            hadoop, path = hadoop_files(target)
            hadoop.copyFromLocalFile(path(_hadoop_path(directory)), path(new))
        replace_directory(files, new, target)
    except BaseException:
        if exists(files, old) and not exists(files, target):
            files.move(old, target)
        delete(files, new)
        raise


def _rename(fs: Any, path: Any, source: str, target: str) -> None:
    """Rename a file or directory, but never into a directory that has come there meanwhile.

    Raises:
        OSError: it was not renamed.
    """
    name = posixpath.basename(source)
    own = fs.exists(path(f"{source}/{name}"))
    if not fs.rename(path(source), path(target)):
        raise OSError(f"{shown(source)} could not be renamed to {shown(target)}")
    inside = path(f"{target}/{name}")
    if not own and fs.exists(inside):  # which Hadoop does then, and answers that all is well
        fs.rename(inside, path(source))
        raise OSError(f"somebody else has written {shown(target)} meanwhile")


def _hadoop_path(local: Path) -> str:
    """A path of this machine as Hadoop reads it, which takes a URI's ``%20`` literally."""
    return f"file://{local.absolute()}"


def _exists(path: str) -> ConfigError:
    return ConfigError(f"{shown(path)} already exists. Save with .write().overwrite().save(path)")


def _qualify(path: str) -> str:
    """The path with its scheme: on Spark's default file system if there is a session."""
    if running_context() is None:  # a Python thread has no active session
        if urlparse(path).scheme not in ("", "file"):
            raise ConfigError(
                f"{shown(path)} is not a local path, and Hadoop is only there in the driver of a "
                "Spark session: create one first, or use a path of this machine"
            )
        return path
    try:
        with java_errors():
            fs, paths = hadoop_files(path)
            return str(fs.makeQualified(paths(path)).toString())
    except OSError as error:
        raise ConfigError(f"{shown(path)} cannot be reached: {error}") from error


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
        text = without_credentials(str(error) if java is None else str(java))
        raise OSError(text) from error


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


class _JavaStream(io.RawIOBase):
    """A stream of Hadoop's."""

    def readable(self) -> bool:
        return True  # whatever it was opened for

    writable = seekable = readable

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream
        self._left, self._next = b"", 0

    @java_errors()
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET:
            self._stream.seek(offset)
            self._left, self._next = b"", offset
        return self._next  # from elsewhere nobody asks for more than this

    @java_errors()
    def readinto(self, buffer: Any) -> int:
        # py4j passes copies of arrays.
        self._left = self._left or bytes(self._stream.readNBytes(PIECE_BYTES))
        taken, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(taken)] = taken
        self._next += len(taken)
        return len(taken)

    @java_errors()
    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            self._stream.write(bytearray(view[start : start + PIECE_BYTES]))
        return len(view)

    @java_errors()
    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._stream.hasCapability("hsync"):  # otherwise it is safe once closed
                self._stream.hsync()
            self._stream.close()


class _HadoopFiles(fs.FileSystemHandler):  # type: ignore[misc]
    """What ``pyarrow.fs.PyFileSystem`` calls, as far as checkpoints need it.

    Files are written from beginning to end. Paths include their scheme.

    Args:
        files: Hadoop's file system.
        path: its class of paths.
    """

    def __init__(self, files: Any, path: Any) -> None:
        self._files = files
        self._path = path

    def get_type_name(self) -> str:
        return "sparkdl"

    def normalize_path(self, path: str) -> str:
        return path

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("checkpoints are not copied, appended to or deleted together")

    copy_file = open_append_stream = delete_dir_contents = delete_root_dir_contents = _refuse

    @java_errors()
    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        places = [self._path(path) for path in paths]
        there = [self._files.getFileStatus(p) if self._files.exists(p) else None for p in places]
        return list(map(_info, paths, there))

    @java_errors()
    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        folder = self._path(selector.base_dir)
        if selector.allow_not_found and not self._files.exists(folder):
            return []
        found = self._files.listStatus(folder)
        return [_info(status.getPath().toString(), status) for status in found]

    def create_dir(self, path: str, recursive: bool) -> None:
        self._require(path, lambda: self._files.mkdirs(self._path(path)))

    def delete_dir(self, path: str) -> None:
        self._require(path, lambda: self._files.delete(self._path(path), True))

    def delete_file(self, path: str) -> None:
        self._require(path, lambda: self._files.delete(self._path(path), False))

    @java_errors()
    def move(self, src: str, dest: str) -> None:
        _rename(self._files, self._path, src, dest)

    @java_errors()
    def open_input_file(self, path: str) -> pa.NativeFile:
        stream = _JavaStream(self._files.open(self._path(path)))
        return pa.PythonFile(io.BufferedReader(stream, PIECE_BYTES), mode="r")

    open_input_stream = open_input_file

    @java_errors()
    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        return pa.PythonFile(_JavaStream(self._files.create(self._path(path), True)), mode="w")

    @staticmethod
    @java_errors()
    def _require(path: str, operation: Callable[[], bool]) -> None:
        if not operation():
            raise OSError(f"the file system refuses to change {shown(path)}")


def _info(path: str, status: Any) -> fs.FileInfo:
    if status is None:
        return fs.FileInfo(path, fs.FileType.NotFound)
    if status.isDirectory():
        return fs.FileInfo(path, fs.FileType.Directory)
    return fs.FileInfo(path, fs.FileType.File, size=int(status.getLen()))
