"""One call at a time writes an output: it holds a lease beside the array's blocks."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
from collections.abc import Iterator
from typing import Any, cast

from pyarrow import fs

from sparkdl.durable.lease import Lease, held
from sparkdl.durable.local_files import Files, LocalFiles
from sparkdl.errors import InUseError
from sparkdl.redaction import shown
from sparkdl.volumes.places import FOLDER, Place, answered, root_of, said, tensorstore


@contextlib.contextmanager
def alone(place: Place, application: str) -> Iterator[Lease]:
    """Hold an output's lease inside a ``with`` block.

    Args:
        place: the output.
        application: what this process belongs to, shown to whoever is refused.

    Raises:
        DataError: the store cannot be read or written.
        InUseError: another call writes there now.
    """
    folder = root_of(place) / FOLDER
    spec, root = folder.spec().to_json(), FOLDER
    files = cast(Files, _StoreFiles(folder))
    with contextlib.ExitStack() as stack:
        with said("written", place):
            if spec["driver"] == "file":
                root, files = os.path.realpath(spec["path"]), LocalFiles()
                files.create_dir(root, recursive=True)
            try:
                lease = stack.enter_context(held(files, root, application))
            except InUseError as error:
                raise InUseError(
                    f"{shown(place)} is being written by {error.holder}. Wait for it to end, or "
                    "choose another place for the output",
                    error.holder,
                ) from None
        yield lease


class _StoreFiles:
    """A folder of tensorstore's with those methods of a file system that a lease uses."""

    def __init__(self, folder: Any) -> None:
        self._folder = folder

    def get_file_info(self, path: str) -> fs.FileInfo:
        kind = fs.FileType.NotFound if self._read(path) is None else fs.FileType.File
        return fs.FileInfo(path, kind)

    def open_input_stream(self, path: str) -> io.BytesIO:
        found = self._read(path)
        if found is None:
            raise FileNotFoundError(path)
        return io.BytesIO(found)

    @contextlib.contextmanager
    def open_output_stream(self, path: str) -> Iterator[io.BytesIO]:
        stream = io.BytesIO()
        yield stream
        with _as_storage_error():
            answered(self._folder.write(posixpath.basename(path), stream.getvalue()))

    def delete_file(self, path: str) -> None:
        with _as_storage_error():
            name = posixpath.basename(path)
            only = tensorstore().KvStore.KeyRange(name, name + "\0")
            answered(self._folder.delete_range(only))

    def _read(self, path: str) -> bytes | None:
        with _as_storage_error():
            found = answered(self._folder.read(posixpath.basename(path)))
        return bytes(found.value) if found.state == "value" else None


@contextlib.contextmanager
def _as_storage_error() -> Iterator[None]:
    try:
        yield
    except (ValueError, NotImplementedError) as error:  # what tensorstore raises for most
        raise OSError(str(error)) from error
