"""Where checkpoints live, on any file system pyarrow knows, and how they are published atomically.

    <path>/checkpoint-000041.safetensors
    <path>/.checkpoint-000042.safetensors.partial-<random>   is being written, on a local disk

A checkpoint is one safetensors file, written from beginning to end. Its metadata is the ``format``
of the file and the ``description`` of the checkpoint, as JSON. Its last tensor is ``sha256``, the
SHA-256 of all bytes before it: so it is known as soon as it is written, and a file that was torn,
appended to or changed anywhere is not taken for a checkpoint.

On local file systems it is written aside, synchronized and renamed, and it is safe from a loss of
power before ``write`` returns, and so before an older one is deleted. Elsewhere it is one put, and
what a writer that was killed has left is damaged. A reader takes the newest checkpoint whose every
byte is as it was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import posixpath
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from pyarrow import fs

from sparkdl.checkpoint.container import (
    DamagedError,
    Piece,
    blocks_of,
    read_header,
    write_pieces,
)
from sparkdl.durable.lease import Lease, held
from sparkdl.durable.local_files import STORAGE_ERRORS, Files, LocalFiles, exists, put_file
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.redaction import without_credentials

logger = logging.getLogger(__name__)

FORMAT = 2
"""Version of the files' format; a reader refuses a newer one."""
SHA256 = "sha256"
"""The last tensor: the hash of all bytes before it."""
_SHA256_BYTES = 32
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_NAME = re.compile(r"(\.)?checkpoint-([0-9]{6,12})\.safetensors(?(1)\.partial-[0-9a-f]{32})")
_FIRST_FORMAT = re.compile(r"()checkpoint-([0-9]{6,12})")
"""Directories of several files."""
_END = 10**12
"""Above the numbers of checkpoints."""

Contents = Mapping[str, Piece]
"""What a checkpoint holds, by name."""
OpenElsewhere = Callable[[str], tuple[fs.FileSystem, str]]
"""Opens a URI that pyarrow cannot; returns a file system and the path in it. Raises OSError if it
cannot either."""


class CheckpointStore:
    """The checkpoints of one training job.

    Args:
        path: a directory: a path on this machine, or a URI that pyarrow.fs takes (``file:``,
            ``s3:``, ``gs:``, ``hdfs:``, ``abfss:``).
        keep_last: how many checkpoints to keep, >= 1.
        open_elsewhere: tried for a URI whose file system pyarrow cannot open.

    Raises:
        ConfigError: the directory cannot be reached or made.
    """

    def __init__(
        self, path: str, *, keep_last: int, open_elsewhere: OpenElsewhere | None = None
    ) -> None:
        self.path = without_credentials(path)
        self.keep_last = keep_last
        self._lock = threading.Lock()
        self._last = 0
        self._lease: Lease | None = None
        try:
            self._files, self._root = _resolve(path, open_elsewhere)
            self._files.create_dir(self._root, recursive=True)
        except (*STORAGE_ERRORS, ValueError) as error:
            raise self._useless(error) from error

    @contextlib.contextmanager
    def held(self, application: str | None = None) -> Iterator[None]:
        """Be the only writer of checkpoints there, inside a ``with`` block.

        Args:
            application: what this process belongs to, shown to whoever is refused meanwhile.

        Raises:
            ConfigError: another process is writing there; the message says which, where and since
                when.
        """
        with contextlib.ExitStack() as stack:
            try:
                self._lease = stack.enter_context(held(self._files, self._root, application))
            except STORAGE_ERRORS as error:
                raise self._useless(error) from error
            try:
                yield
            finally:
                self._lease = None

    def write(self, contents: Contents, description: dict[str, Any]) -> str:
        """Publish a checkpoint, newer than all existing ones: all of it or nothing.

        Args:
            contents: what is in it.
            description: what it is; JSON.

        Returns:
            Its path.

        Raises:
            CheckpointError: the file system refuses (the disk may be full), or another process is
                writing there now.
        """
        files, lease = self._files, self._lease
        _check(lease)
        with _told(f"no checkpoint can be created in {self.path}"):
            files.create_dir(self._root, recursive=True)
            path = self._new_path()
        metadata = {"format": f"{FORMAT}", "description": json.dumps(description)}

        def write(stream: BinaryIO) -> None:
            file = _Hashed(stream)
            digest = Piece("U8", [_SHA256_BYTES], lambda _: iter([file.sha256.digest()]))
            write_pieces(cast(BinaryIO, file), {**contents, SHA256: digest}, metadata)
            _check(lease)

        with _told(f"{path} could not be written"):
            if isinstance(files, LocalFiles):
                put_file(files, path, write)
                return path
            try:
                with files.open_output_stream(path) as stream:
                    write(stream)
            except BaseException:  # some put what they have
                with contextlib.suppress(*STORAGE_ERRORS):
                    files.delete_file(path)
                raise
        return path

    def _new_path(self) -> str:
        with self._lock:
            self._last = 1 + max([self._last, *(number for number, _ in self._numbered())])
            if self._last >= _END:
                raise CheckpointError(f"there are no numbers from {_END} on. Delete the last")
            return posixpath.join(self._root, f"checkpoint-{self._last:06d}.safetensors")

    def newest(self) -> SavedCheckpoint | None:
        """The newest checkpoint that is complete and undamaged; warns of newer ones that are not.

        Raises:
            CheckpointError: the directory cannot be read, or another version wrote what is there.
        """
        with _told(f"{self.path} cannot be read"):
            paths, earlier = self._published(), self._numbered(_FIRST_FORMAT)
        for path in paths:
            try:
                return SavedCheckpoint(self._files, path)
            except (DamagedError, *STORAGE_ERRORS) as error:
                logger.warning("%s is damaged (%s); trying the one before", path, error)
        for _, info in earlier:
            if exists(self._files, posixpath.join(info.path, "manifest.json")):
                raise CheckpointError(
                    f"{info.path} is a checkpoint of an earlier version of sparkdl-torch, which "
                    "this one does not read. Let that version finish the training, use another "
                    "directory, or delete it to start over"
                )
        return None

    def prune(self) -> None:
        """Delete all but the last ``keep_last`` checkpoints."""
        try:
            _check(self._lease)
            paths = self._published()
        except (CheckpointError, *STORAGE_ERRORS) as error:
            logger.warning("old checkpoints in %s were not deleted: %s", self.path, error)
            return
        for path in paths[self.keep_last :]:
            try:
                self._files.delete_file(path)
            except STORAGE_ERRORS as error:
                logger.warning("%s could not be deleted: %s", path, error)

    def _useless(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"checkpointPath '{self.path}' cannot be used: {without_credentials(str(error))}. "
            "Use a directory, or a URI such as s3://bucket/directory"
        )

    def _published(self) -> list[str]:
        """The files that are named like a checkpoint, newest first."""
        files = [info for _, info in self._numbered() if info.type == fs.FileType.File]
        return [info.path for info in files if not info.base_name.startswith(".")]

    def _numbered(self, name: re.Pattern[str] = _NAME) -> list[tuple[int, fs.FileInfo]]:
        """What is there under such a name, and its number; the highest first."""
        found = self._files.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        matches = ((name.fullmatch(info.base_name), info) for info in found)
        numbered = [(int(match[2]), info) for match, info in matches if match]
        return sorted(numbered, key=lambda each: each[0], reverse=True)


class SavedCheckpoint:
    """A complete checkpoint; every byte is read and compared when this is made.

    Args:
        files: its file system.
        path: where it is.

    Attributes:
        path: where it is, for messages.
        description: what the checkpoint is, as given to ``write``.
        contents: what it holds, by name; read when it is used.

    Raises:
        DamagedError: it is not what was written.
        CheckpointError: a newer version wrote it.
        OSError: the file system refuses.
    """

    def __init__(self, files: Files, path: str) -> None:
        self.path = path
        self._files = files
        with files.open_input_stream(path) as stream:
            file = cast(BinaryIO, hashed := _Hashed(stream))
            self.contents, metadata = read_header(file, lambda *place: partial(self._read, *place))
            last = list(self.contents)[-1:]
            if last != [SHA256] or self.contents[SHA256].size != _SHA256_BYTES:
                raise DamagedError("it does not end with its checksum")
            size = sum(piece.size for piece in self.contents.values())
            for _ in blocks_of(file, size - _SHA256_BYTES):
                pass
            if stream.read(_SHA256_BYTES + 1) != hashed.sha256.digest():
                raise DamagedError("it has a different checksum from when it was written")
        try:
            written = int(metadata["format"])
            self.description: dict[str, Any] = dict(json.loads(metadata.get("description", "{}")))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedError(f"its metadata is not readable: {error!r}") from error
        if written > FORMAT:
            raise CheckpointError(
                f"{path} has format {written}, newer than the {FORMAT} that this version of "
                "sparkdl-torch reads. Upgrade it"
            )

    def _read(self, start: int, left: int, size: int) -> Iterator[bytes]:
        with _told(f"{self.path} cannot be read"), self._files.open_input_file(self.path) as file:
            file.seek(start)
            yield from blocks_of(file, left, size)


class _Hashed:
    """Passes on what is read or written, and computes its checksum."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.sha256 = stream, hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Read from the stream."""
        block = self._stream.read(size)
        self.sha256.update(block)
        return block

    def write(self, octets: bytes | memoryview) -> None:
        """Write to the stream."""
        self._stream.write(octets)
        self.sha256.update(octets)


@contextlib.contextmanager
def _told(failure: str) -> Iterator[None]:
    """Turn a file system's errors into ours, which begin with what failed."""
    try:
        yield
    except (DamagedError, *STORAGE_ERRORS) as error:
        raise CheckpointError(f"{failure}: {error}") from error


def _check(lease: Lease | None) -> None:
    if lease is not None:
        lease.check()


def _resolve(path: str, open_elsewhere: OpenElsewhere | None) -> tuple[Files, str]:
    if not _URI.match(path):
        return LocalFiles(), os.path.realpath(Path(path).expanduser())
    try:
        # Hadoop's names for the same store.
        files, root = fs.FileSystem.from_uri(re.sub(r"^s3[an]://", "s3://", path))
        if isinstance(files, fs.LocalFileSystem):
            return LocalFiles(), os.path.realpath(root)
    except (*STORAGE_ERRORS, ValueError) as error:
        if open_elsewhere is None:
            raise
        logger.info("pyarrow cannot open %s (%s)", *map(without_credentials, (path, str(error))))
        files, root = open_elsewhere(path)
    return files, root.rstrip("/")
