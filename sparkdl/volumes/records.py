"""What an output is the output of, and which of its chunks are done; both are beside its blocks.

    .sparkdl/job.json          the model, the input, the sizes: whatever decides what is written
    .sparkdl/input             the input's files, as they were when all that is marked was read
    .sparkdl/chunks/<number>   a chunk is done; written once its blocks are durable
    .sparkdl/in-use.*          a call is running; see ``leases``

tensorstore writes an object whole or not at all; whatever else stands there counts as nothing.

One call at a time writes an output: it holds a lease beside the array's blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from pyarrow import fs

from sparkdl.durable.lease import Lease, held
from sparkdl.durable.local_files import Files, LocalFiles
from sparkdl.errors import ConfigError, DataError, InUseError
from sparkdl.redaction import shown
from sparkdl.volumes.store import (
    DATA_S,
    FOLDER,
    Place,
    answered,
    root_of,
    said,
    specification,
    tensorstore,
)


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


Job = Mapping[str, Any]
"""JSON: what decides the output, by the argument or thing that it comes from."""

METADATA = (".zarray", ".zgroup", "zarr.json", "attributes.json", "info")
"""What says that there is an array, or a group of arrays."""


@dataclass(frozen=True)
class Marker:
    """What is noted of a chunk that is done.

    Attributes:
        patches: that went through the network for it.
        read: the digest of what was read for it.
    """

    patches: int
    read: str


class Records:
    """The records of one output.

    Args:
        place: the output, which need not exist.
    """

    def __init__(self, place: Place) -> None:
        self._place, self._root = place, root_of(place)
        self._folder = self._root / FOLDER
        self._metadata = (*METADATA, specification(place).get("metadata_key", METADATA[0]))

    def claim(self, job: Job) -> Job:
        """Find out whether the output may be of a job; nothing is written.

        Args:
            job: with a ``chunk`` of None if any will do.

        Returns:
            The job, with the chunk that it was begun with, if it was.

        Raises:
            ConfigError: the output is of another job, or of something else.
            DataError: the store cannot be read or written.
        """
        with said("read", self._place):
            found = answered(self._folder.read("job.json"))
        there = self._array()
        if there is None:
            if found.state != "value":
                self._require_no_others()
            return job
        if found.state != "value":
            raise ConfigError(
                f"{shown(self._place)} is there already ({there}), and transform_volume has "
                "not made it. Choose another place for the output, or delete it first"
            )
        known = _parsed(found.value)
        if not _is_job(known, len(job["patch"])):
            raise DataError(
                f"{shown(self._place)} has a damaged record, {FOLDER}job.json. Delete the output, "
                f"with {FOLDER}, to begin again"
            )
        given = {**job, "chunk": job["chunk"] or known["chunk"]}
        differing = [
            f"{name} was {known.get(name)}, is {given.get(name)}"
            for name in sorted({*known, *given})
            if known.get(name) != given.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{shown(self._place)} was begun with something else: {'; '.join(differing)}. "
                "Give the same to finish it, or choose another place, or delete it first"
            )
        return known

    def note(self, job: Job) -> None:
        """Write what the output is to be of, and forget what is marked of an array that is gone."""
        if self._array() is None:
            self.forget()
        self._write("job.json", json.dumps(job, indent=1, sort_keys=True))

    def forget(self) -> None:
        """Forget which chunks are done."""
        with said("written", self._place):
            markers = tensorstore().KvStore.KeyRange("chunks/", "chunks0")
            answered(self._folder.delete_range(markers), DATA_S)

    def has_seen(self, files: str | None) -> bool:
        """Whether all that is marked was read from these files of the input."""
        with said("read", self._place):
            found = answered(self._folder.read("input"))
        return files is not None and bytes(found.value) == files.encode()

    def saw(self, files: str | None) -> None:
        """Note that all that is marked was read from these files of the input."""
        self._write("input", files or "")

    def done(self, job: Job) -> dict[int, Marker]:
        """What is noted of each chunk that is done, by its number."""
        digest, found = digest_of(job), {}
        with said("read", self._place):
            names = answered(self._folder.list(), DATA_S)
            marked = [name for name in map(bytes.decode, names) if name.startswith("chunks/")]
            reads = [self._folder.read(name) for name in marked]
            for name, read in zip(marked, reads, strict=True):
                marker = _marker(answered(read).value, digest, name)
                if marker is not None:
                    found[int(name.removeprefix("chunks/"))] = marker
        return found

    def mark(self, number: int, marker: Marker, digest: str) -> None:
        """Note that a chunk is done, and durable.

        Args:
            number: of the chunk.
            marker: what to note.
            digest: of the job.
        """
        name = f"chunks/{number}"
        self._write(name, json.dumps([digest, name, marker.patches, marker.read]))

    def unmark(self, number: int) -> None:
        """Forget that a chunk is done."""
        self._write(f"chunks/{number}", "")

    def _write(self, name: str, text: str) -> None:
        with said("written", self._place):
            answered(self._folder.write(name, text.encode()))

    def _require_no_others(self) -> None:
        """Check that nothing of others lies where nothing of ours does.

        Hidden files may: file managers leave them behind.

        Raises:
            ConfigError: something does.
        """
        with said("read", self._place):
            names = map(bytes.decode, answered(self._root.list(), DATA_S))
            other = min((name for name in names if not name.startswith(".")), default=None)
        if other is not None:
            raise ConfigError(
                f"{shown(self._place)} holds other things, such as {other}, among which an array "
                "would be hard to tell apart and to delete. Choose a place for the output where "
                "nothing is yet"
            )

    def _array(self) -> str | None:
        """What says that there is an array, if there is one."""
        with said("read", self._place):
            for name in self._metadata:
                if answered(self._root.read(name)).state == "value":
                    return str(name)
        return None


def digest_of(job: Job) -> str:
    """A digest of a job, with its chunk."""
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


def _parsed(text: bytes) -> Any:
    """What JSON tells; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_job(known: Any, axes: int) -> TypeGuard[Job]:
    match known:
        case {"chunk": [*sizes]}:
            return len(sizes) == axes and all(isinstance(n, int) and n > 0 for n in sizes)
    return False


def _marker(text: bytes, digest: str, name: str) -> Marker | None:
    """What a marker tells; None if it is not whole, or of another job."""
    match _parsed(text):
        case [job, chunk, int() as patches, str() as read] if (job, chunk) == (digest, name):
            return Marker(patches, read)
    return None
