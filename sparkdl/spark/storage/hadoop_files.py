"""Hadoop's file systems in the driver's JVM as a pyarrow one, for what pyarrow cannot reach.

pyarrow needs a native library for ``hdfs:`` and knows nothing of vendors' own schemes; the JVM of a
Spark driver has the classes and credentials of every file system that the cluster reads.
"""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
from pyarrow import fs

from sparkdl.spark.catalyst.cluster import hadoop_files
from sparkdl.spark.storage.files import java_errors


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
