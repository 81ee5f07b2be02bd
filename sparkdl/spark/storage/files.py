"""Directories on any file system that Spark knows: published whole, fetched for reading.

Hadoop's are also there as pyarrow's, which needs a native library for ``hdfs:`` and knows nothing
of vendors' own schemes; the JVM of a Spark driver has the classes and credentials of every file
system that the cluster reads.
"""

from __future__ import annotations

import base64
import io
import itertools
import logging
import posixpath
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlparse, urlsplit

import pyarrow as pa
from pyarrow import fs

from sparkdl.checkpoint.storage import OpenElsewhere
from sparkdl.durable.publishing import ASIDE, put_directory, whole_directory
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.redaction import shown, without_credentials
from sparkdl.spark.catalyst.cluster import hadoop_files
from sparkdl.spark.catalyst.core import Py4JError
from sparkdl.spark.catalyst.jvm import running_context

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
    with java_errors():
        fs, path = hadoop_files(target)
        if not overwrite and (fs.exists(path(target)) or fs.exists(path(old))):
            raise _exists(target)
        try:
            fs.copyFromLocalFile(path(_hadoop_path(directory)), path(new))
            if fs.exists(path(target)):
                fs.delete(path(old), True)
                _rename(fs, path, target, old)
            _rename(fs, path, new, target)
        except BaseException:
            if fs.exists(path(old)) and not fs.exists(path(target)):
                fs.rename(path(old), path(target))
            fs.delete(path(new), True)
            raise
    try:
        with java_errors():
            fs.delete(path(old), True)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", shown(old), error)


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


class _FileHandler(fs.FileSystemHandler):  # type: ignore[misc]
    """What ``pyarrow.fs.PyFileSystem`` calls, as far as checkpoints need it.

    Files are read and written from beginning to end.
    """

    def get_type_name(self) -> str:
        return "sparkdl"

    def normalize_path(self, path: str) -> str:
        return path

    def open_input_file(self, path: str) -> pa.NativeFile:
        with self.open_input_stream(path) as stream:
            return pa.BufferReader(stream.read())

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("checkpoints are not copied, appended to or deleted together")

    copy_file = open_append_stream = delete_dir_contents = delete_root_dir_contents = _refuse


class _ByteStream(io.RawIOBase):
    """A file somewhere else, by what reads from it or writes to it, and what closes it."""

    def __init__(
        self,
        close: Callable[[], object],
        *,
        read: Callable[[], bytes] | None = None,
        write: Callable[[memoryview], object] | None = None,
    ) -> None:
        super().__init__()
        self._close, self._read, self._write = close, read, write
        self._left = b""

    def readable(self) -> bool:
        return self._read is not None

    def writable(self) -> bool:
        return self._write is not None

    def readinto(self, buffer: Any) -> int:
        assert self._read is not None
        self._left = self._left or self._read()
        taken, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def write(self, octets: Any) -> int:
        assert self._write is not None
        view = memoryview(octets).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            self._write(view[start : start + PIECE_BYTES])
        return len(view)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._close()

    def to_read(self) -> pa.NativeFile:
        """The same for pyarrow."""
        return pa.PythonFile(io.BufferedReader(self, PIECE_BYTES), mode="r")

    def to_write(self) -> pa.NativeFile:
        """The same for pyarrow."""
        return pa.PythonFile(self, mode="w")


class _HadoopFiles(_FileHandler):
    """Paths include their scheme.

    Args:
        files: Hadoop's file system.
        path: its class of paths.
    """

    def __init__(self, files: Any, path: Any) -> None:
        self._files = files
        self._path = path

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

    def delete_file(self, path: str) -> None:
        self._require(path, lambda: self._files.delete(self._path(path), False))

    def move(self, src: str, dest: str) -> None:
        with java_errors():
            _rename(self._files, self._path, src, dest)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        with java_errors():
            stream = self._files.open(self._path(path))

        @java_errors()
        def read() -> bytes:
            return bytes(stream.readNBytes(PIECE_BYTES))  # py4j passes copies of arrays

        return _ByteStream(java_errors()(stream.close), read=read).to_read()

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        with java_errors():
            stream = self._files.create(self._path(path), True)

        @java_errors()
        def write(octets: memoryview) -> None:
            stream.write(bytearray(octets))

        @java_errors()
        def close() -> None:
            if stream.hasCapability("hsync"):  # otherwise it is safe once closed
                stream.hsync()
            stream.close()

        return _ByteStream(close, write=write).to_write()

    @staticmethod
    @java_errors()
    def _require(path: str, deed: Callable[[], bool]) -> None:
        if not deed():
            raise OSError(f"the file system refuses to change {shown(path)}")


def _info(path: str, status: Any) -> fs.FileInfo:
    if status is None:
        return fs.FileInfo(path, fs.FileType.NotFound)
    if status.isDirectory():
        return fs.FileInfo(path, fs.FileType.Directory)
    return fs.FileInfo(path, fs.FileType.File, size=int(status.getLen()))


_CHANGES = ("create_dir", "delete_dir", "delete_file", "move")

Ask = Callable[[dict[str, Any]], Any]
"""Sends one request to the driver and returns its answer. Raises OSError if it is refused."""


class DriverFiles:
    """The driver's end of a worker's access to file systems that only the driver can open.

        worker                                      driver
        {"files": {"do": "open", "uri": ...}} ---->
                                              <---- {"done": path} or {"refused": text}
        {"files": {"do": "put", "stream": 1, "octets": base64}}, ... one answer each

    It is for checkpoints of ``sparkdl.run``: few files. Only what is below a URI that the worker
    has opened can be reached, and nothing on the driver's own disks.

    Args:
        open_uri: opens what a worker names.
    """

    def __init__(self, open_uri: OpenElsewhere) -> None:
        self._open_uri = open_uri
        self._opened: dict[str, tuple[fs.FileSystem, str]] = {}
        self._streams: dict[int, pa.NativeFile] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # this may be closed while a request is answered

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a worker asks for; returns the header that answers it.

        Raises:
            LookupError, TypeError, ValueError: it is a request that no worker makes.
        """
        try:
            with self._lock:
                return {"done": self._do(asked["do"], asked)}
        except (OSError, pa.ArrowException) as error:
            return {"refused": str(error)}

    def close(self) -> None:
        """Close what the worker has left open; a half-written file has no name yet."""
        with self._lock:
            for stream in self._streams.values():
                stream.close()
            self._streams.clear()

    def _do(self, deed: str, asked: Mapping[str, Any]) -> Any:
        if deed == "open":
            return self._open(asked["uri"])
        if deed == "next":
            return base64.b64encode(self._streams[asked["stream"]].read(PIECE_BYTES)).decode()
        if deed == "put":
            return self._streams[asked["stream"]].write(base64.b64decode(asked["octets"]))
        if deed == "close":
            return self._streams.pop(asked["stream"]).close()
        files, root = self._opened[asked["uri"]]
        paths = [_below(root, path) for path in asked["paths"]]
        if deed == "info":
            return [_told(info) for info in files.get_file_info(paths)]
        if deed == "list":
            selector = fs.FileSelector(*paths, allow_not_found=asked["allow_not_found"] is True)
            return [_told(info) for info in files.get_file_info(selector)]
        if deed in ("read", "write"):
            opens = files.open_input_stream if deed == "read" else files.open_output_stream
            self._streams[number := next(self._numbers)] = opens(*paths)
            return number
        if deed in _CHANGES:
            return getattr(files, deed)(*paths)
        raise ValueError(f"a worker may not ask for {deed!r}")

    def _open(self, uri: str) -> str:
        if urlsplit(uri).scheme in ("", "file"):
            raise OSError("it is on the driver's own disk")
        self._opened[uri] = self._open_uri(uri)
        return self._opened[uri][1]


def _below(root: str, path: str) -> str:
    if (path + "/").startswith(root.rstrip("/") + "/") and ".." not in path.split("/"):
        return path
    raise ValueError(f"{path!r} is not below {root}")


def open_through(ask: Ask) -> OpenElsewhere:
    """A function that opens a URI on a worker by asking the driver.

    Args:
        ask: sends a request to the driver.
    """

    def opened(uri: str) -> tuple[fs.FileSystem, str]:
        root = ask({"do": "open", "uri": uri})
        return fs.PyFileSystem(_AskedFiles(ask, uri)), root

    return opened


class _AskedFiles(_FileHandler):
    """The worker's end."""

    def __init__(self, ask: Ask, uri: str) -> None:
        self._ask_driver = ask
        self._uri = uri

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [_info_of(told) for told in self._ask("info", *paths)]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        found = self._ask("list", selector.base_dir, allow_not_found=selector.allow_not_found)
        return [_info_of(told) for told in found]

    def create_dir(self, path: str, recursive: bool) -> None:
        self._ask("create_dir", path)

    def delete_dir(self, path: str) -> None:
        self._ask("delete_dir", path)

    def delete_file(self, path: str) -> None:
        self._ask("delete_file", path)

    def move(self, src: str, dest: str) -> None:
        self._ask("move", src, dest)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        of_stream = self._of_stream("read", path)
        return _ByteStream(
            lambda: of_stream("close"), read=lambda: base64.b64decode(of_stream("next"))
        ).to_read()

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        of_stream = self._of_stream("write", path)

        def write(octets: memoryview) -> None:
            of_stream("put", octets=base64.b64encode(octets).decode())

        return _ByteStream(lambda: of_stream("close"), write=write).to_write()

    def _of_stream(self, deed: str, path: str) -> Callable[..., Any]:
        """Opens a file in the driver; asks for what is to be done with it."""
        number = self._ask(deed, path)
        return lambda deed, **more: self._ask_driver({"do": deed, "stream": number, **more})

    def _ask(self, deed: str, *paths: str, **more: Any) -> Any:
        return self._ask_driver({"do": deed, "uri": self._uri, "paths": paths, **more})


def _told(info: fs.FileInfo) -> list[Any]:
    return [info.path, info.type.name, info.size]


def _info_of(told: list[Any]) -> fs.FileInfo:
    path, kind, size = told
    return fs.FileInfo(path, getattr(fs.FileType, kind), size=size)
