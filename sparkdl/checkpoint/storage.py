"""Where checkpoints live, on any file system pyarrow knows, and how they are published atomically.

    <path>/checkpoint-000041/center.safetensors
                             rank-00000.safetensors, rank-00001.safetensors, ...
                             manifest.json   every file's size and checksum, and a description
    <path>/checkpoint-000042/...             no manifest: was never finished

A checkpoint exists once its manifest does. The manifest is written last, under another name, and
then renamed: every file system can rename, or put, one small file atomically, which is not true of
a directory. On local file systems a checkpoint is safe from a loss of power before ``publish``
returns, and so before an older one is deleted; others keep what was written to a stream once it is
closed. A reader takes the newest checkpoint whose every byte is as its manifest says.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pyarrow import fs

from sparkdl.durable.lease import Lease, held
from sparkdl.durable.local_files import STORAGE_ERRORS, Files, LocalFiles, exists, synchronize
from sparkdl.durable.manifest import (
    MANIFEST,
    Checksummed,
    DamagedError,
    UnfinishedError,
    manifest_text,
    verified_manifest,
)
from sparkdl.durable.publishing import put_file
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.redaction import without_credentials

logger = logging.getLogger(__name__)

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_NAME = re.compile(r"checkpoint-([0-9]{6,12})")
_END = 10**12
"""Above the numbers of checkpoints."""
_CONTENTS = re.compile(
    r"manifest\.json(\.partial)?|((center|kept-model|rank-[0-9]+)(\.safetensors)?|state(\.pt)?)"
    r"|\.\S+\.partial-[0-9a-f]{32}"
)
"""Names of all that a checkpoint may hold; nothing else is ever deleted."""

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
        self._pending: set[str] = set()
        self._lease: Lease | None = None
        try:
            self._files, self._root = _resolve(path, open_elsewhere)
            self._files.create_dir(self._root, recursive=True)
            self._next = self._newest_number() + 1
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
                self._next = self._newest_number() + 1
            except STORAGE_ERRORS as error:
                raise self._useless(error) from error
            try:
                yield
            finally:
                self._lease = None

    def begin(self) -> PendingCheckpoint:
        """Start writing a checkpoint, newer than all existing ones.

        Raises:
            CheckpointError: its directory cannot be made, or another process is writing there now.
        """
        lease = self._lease
        directory = self._root
        try:
            _check(lease)
            self._files.create_dir(self._root, recursive=True)
            directory = self._new_directory()
            files = LocalFiles(directory) if isinstance(self._files, LocalFiles) else self._files
        except (CheckpointError, *STORAGE_ERRORS) as error:
            self._pending.discard(directory)
            raise CheckpointError(f"{directory} cannot be created: {error}") from error
        return PendingCheckpoint(files, directory, lease, self._pending.discard)

    def _new_directory(self) -> str:
        while True:
            with self._lock:
                if self._next >= _END:
                    raise CheckpointError(f"there are no numbers from {_END} on. Delete the last")
                directory = posixpath.join(self._root, f"checkpoint-{self._next:06d}")
                self._next += 1
                self._pending.add(directory)
            try:
                self._files.create_dir(directory, recursive=False)
                return directory
            except BaseException as error:
                self._pending.discard(directory)
                if not isinstance(error, FileExistsError):  # then it is no checkpoint
                    raise

    def newest(self) -> SavedCheckpoint | None:
        """The newest checkpoint that is complete and undamaged; warns of newer ones that are not.

        Raises:
            CheckpointError: the directory cannot be read, or a newer version wrote it.
        """
        try:
            directories = self._directories()
        except STORAGE_ERRORS as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        for directory in directories:
            try:
                manifest = verified_manifest(self._files, directory)
                return SavedCheckpoint(self._files, directory, manifest)
            except UnfinishedError:
                logger.warning("%s was never finished; trying the one before", directory)
            except (DamagedError, *STORAGE_ERRORS) as error:
                logger.warning("%s is damaged (%s); trying the one before", directory, error)
        return None

    def prune(self) -> None:
        """Delete all but the last ``keep_last`` checkpoints, and those that nobody will finish.

        Checkpoints that this store has begun and neither published nor abandoned stay.
        """
        finished = 0
        try:
            _check(self._lease)
            directories = self._directories()
        except (CheckpointError, *STORAGE_ERRORS) as error:
            logger.warning("old checkpoints in %s were not deleted: %s", self.path, error)
            return
        for directory in directories:
            if directory in self._pending:
                continue
            try:
                is_finished = exists(self._files, posixpath.join(directory, MANIFEST))
                finished += is_finished
                if finished > self.keep_last or not is_finished:
                    _delete(self._files, directory)
            except STORAGE_ERRORS as error:
                logger.warning("%s could not be deleted: %s", directory, error)

    def _useless(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"checkpointPath '{self.path}' cannot be used: {without_credentials(str(error))}. "
            "Use a directory, or a URI such as s3://bucket/directory"
        )

    def _newest_number(self) -> int:
        return max(self._numbered(), default=0)

    def _directories(self) -> list[str]:
        """The directories of checkpoints, newest first."""
        found = self._numbered()
        return [found[number] for number in sorted(found, reverse=True)]

    def _numbered(self) -> dict[int, str]:
        """The directories that are named like a checkpoint, by number."""
        found = self._files.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        directories = [info for info in found if info.type == fs.FileType.Directory]
        matches = ((_NAME.fullmatch(info.base_name), info.path) for info in directories)
        return {int(match[1]): path for match, path in matches if match}


class PendingCheckpoint:
    """A checkpoint that is being written; nobody reads it before ``publish``.

    Args:
        files: the file system.
        directory: where its files go, empty.
        lease: the lease that it is written under, if there is one.
        on_end: called with the directory once nothing more is written there.
    """

    def __init__(
        self,
        files: Files,
        directory: str,
        lease: Lease | None,
        on_end: Callable[[str], None],
    ) -> None:
        self.directory = directory
        self._files = files
        self._lease = lease
        self._on_end = on_end
        self._published = False
        self._entries: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Write one file; several may be written at once, from different threads.

        Args:
            name: the file's name in the checkpoint.

        Yields:
            The file, to be written from beginning to end.

        Raises:
            CheckpointError: the file system refuses; the disk may be full.
        """
        path = posixpath.join(self.directory, name)
        if not _CONTENTS.fullmatch(name):
            raise ValueError(f"{name!r} is not in the list of a checkpoint's files")
        try:
            with self._files.open_output_stream(path) as stream:
                file = Checksummed(stream)
                yield file  # type: ignore[misc]
        except STORAGE_ERRORS as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error
        self._entries[name] = file.entry

    def publish(self, description: dict[str, Any]) -> None:
        """Make the checkpoint exist, durably.

        Args:
            description: what the checkpoint is; JSON.

        Raises:
            CheckpointError: the file system refuses, or another process is writing there now.
        """
        entries = dict(self._entries)  # a worker that has left may still have its file open
        path = posixpath.join(self.directory, MANIFEST)
        text = manifest_text(path, entries, description)
        try:
            _check(self._lease)
            # Here rather than when each file is closed, because workers wait for that.
            for name in entries:
                synchronize(self._files, posixpath.join(self.directory, name))
            _check(self._lease)
            put_file(self._files, path, text)
            self._published = True
            synchronize(self._files, posixpath.dirname(self.directory))
            if isinstance(self._files, LocalFiles) and not self._files.is_in_place():
                raise OSError("its directory was moved or replaced meanwhile")
        except STORAGE_ERRORS as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error
        self._on_end(self.directory)

    def abandon(self) -> None:
        """Delete what was written so far, if anything; a published checkpoint stays."""
        if self._published:
            return
        try:
            if exists(self._files, self.directory):
                _delete(self._files, self.directory)
        except STORAGE_ERRORS as error:
            logger.warning("%s could not be deleted: %s", self.directory, error)
        self._on_end(self.directory)


class SavedCheckpoint:
    """A complete checkpoint.

    Attributes:
        directory: where it is, for messages.
        description: what the checkpoint is, as given to ``publish``.
    """

    def __init__(self, files: Files, directory: str, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.description: dict[str, Any] = manifest["description"]
        self._files = files
        self._entries: dict[str, dict[str, Any]] = manifest["files"]

    def has(self, name: str) -> bool:
        """Whether it has a file of that name."""
        return name in self._entries

    def size(self, name: str) -> int:
        """Size of a file in bytes.

        Raises:
            CheckpointError: it has no such file.
        """
        if name not in self._entries:
            raise CheckpointError(f"{self.directory} has no {name}")
        return int(self._entries[name]["bytes"])

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Read one file.

        Raises:
            CheckpointError: there is no such file, or it cannot be read.
        """
        self.size(name)
        try:
            with self._files.open_input_stream(posixpath.join(self.directory, name)) as stream:
                yield stream
        except STORAGE_ERRORS as error:
            raise CheckpointError(f"{self.directory}/{name} cannot be read: {error}") from error


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


def _delete(files: Files, directory: str) -> None:
    """Delete a checkpoint, its manifest first, after which it no longer counts as one.

    Raises:
        OSError: the file system refuses, or something is in there that no checkpoint has: whoever
            may write to the directory above can have renamed any other to this.
    """
    found = files.get_file_info(fs.FileSelector(directory))
    foreign = [info for info in found if not _CONTENTS.fullmatch(info.base_name)]
    foreign += [info for info in found if info.type == fs.FileType.Directory]
    if foreign:
        raise OSError(f"it holds {foreign[0].base_name!r}, which no checkpoint does")
    for info in found:
        if info.base_name == MANIFEST:
            files.delete_file(info.path)
    if not isinstance(files, LocalFiles):
        files.delete_dir(directory)
        return
    for info in found:
        if info.base_name != MANIFEST:
            files.delete_file(info.path)
    files.delete_empty_dir(directory)
