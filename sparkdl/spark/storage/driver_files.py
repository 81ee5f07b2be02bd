"""A worker's access to file systems that only the driver can open: Hadoop's, in its JVM.

    worker                                      driver
    {"files": {"do": "open", "uri": ...}} ---->
                                          <---- {"done": path} or {"refused": text}
    {"files": {"do": "put", "stream": 1, "octets": base64}}, ... one answer each

It is for checkpoints of ``sparkdl.run``: few files, read and written from beginning to end. Only
what is below a URI that the worker has opened can be reached, and nothing on the driver's own
disks.
"""

from __future__ import annotations

import base64
import io
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from sparkdl.checkpoint.storage import OpenElsewhere

PIECE_BYTES = 4 << 20
"""The most bytes read or written in one request."""
_CHANGES = ("create_dir", "delete_dir", "delete_file", "move")

Ask = Callable[[dict[str, Any]], Any]
"""Sends one request to the driver and returns its answer. Raises OSError if it is refused."""


class DriverFiles:
    """The driver's end, for one worker.

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


class _AskedFiles(fs.FileSystemHandler):  # type: ignore[misc]
    """What ``pyarrow.fs.PyFileSystem`` calls on the worker."""

    def __init__(self, ask: Ask, uri: str) -> None:
        self._ask_driver = ask
        self._uri = uri

    def get_type_name(self) -> str:
        return "driver"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [_info(told) for told in self._ask("info", *paths)]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        found = self._ask("list", selector.base_dir, allow_not_found=selector.allow_not_found)
        return [_info(told) for told in found]

    def create_dir(self, path: str, recursive: bool) -> None:
        self._ask("create_dir", path)

    def delete_dir(self, path: str) -> None:
        self._ask("delete_dir", path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        raise NotImplementedError("checkpoints are deleted one by one")

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError("refusing to delete a whole file system")

    def delete_file(self, path: str) -> None:
        self._ask("delete_file", path)

    def move(self, src: str, dest: str) -> None:
        self._ask("move", src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        raise NotImplementedError("checkpoints are never copied")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        reader = _Reader(self._ask_driver, self._ask("read", path))
        return pa.PythonFile(io.BufferedReader(reader, PIECE_BYTES), mode="r")

    def open_input_file(self, path: str) -> pa.NativeFile:
        with self.open_input_stream(path) as stream:
            return pa.BufferReader(stream.read())

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        return pa.PythonFile(_Writer(self._ask_driver, self._ask("write", path)), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise NotImplementedError("checkpoints are never appended to")

    def _ask(self, deed: str, *paths: str, **more: Any) -> Any:
        return self._ask_driver({"do": deed, "uri": self._uri, "paths": paths, **more})


class _Stream(io.RawIOBase):
    """A file that the driver holds open."""

    def __init__(self, ask: Ask, number: int) -> None:
        super().__init__()
        self._ask = ask
        self._number = number

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._ask({"do": "close", "stream": self._number})


class _Reader(_Stream):
    """A file to be read from its beginning."""

    _left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = base64.b64decode(self._ask({"do": "next", "stream": self._number}))
        taken, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


class _Writer(_Stream):
    """A file to be written from its beginning."""

    def writable(self) -> bool:
        return True

    def write(self, octets: Any) -> int:
        view = memoryview(octets).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            piece = base64.b64encode(view[start : start + PIECE_BYTES]).decode()
            self._ask({"do": "put", "stream": self._number, "octets": piece})
        return len(view)


def _told(info: fs.FileInfo) -> list[Any]:
    return [info.path, info.type.name, info.size]


def _info(told: list[Any]) -> fs.FileInfo:
    path, kind, size = told
    return fs.FileInfo(path, getattr(fs.FileType, kind), size=size)
