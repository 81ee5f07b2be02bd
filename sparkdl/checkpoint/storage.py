"""Where checkpoints live, on any file system pyarrow knows, and how they are published atomically.

    <path>/checkpoint-000041/center.safetensors
                             rank-00000.safetensors, rank-00001.safetensors, ...
                             manifest.json   every file's size and checksum, and a description
    <path>/checkpoint-000042/...             no manifest: was never finished

A checkpoint exists once its manifest does. The manifest is written last, under another name, and
then renamed: every file system can rename, or put, one small file atomically, which is not true of
a directory. On local file systems a checkpoint is safe from a loss of power before ``write``
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

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

Contents = Mapping[str, Callable[[BinaryIO], object]]
"""What writes each file of a checkpoint, by the file's name."""
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
            self._next = max(self._numbered(), default=0) + 1
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
                self._next = max(self._numbered(), default=0) + 1
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
            Its directory.

        Raises:
            CheckpointError: the file system refuses (the disk may be full), or another process is
                writing there now.
        """
        files, lease = self._files, self._lease
        _check(lease)
        with _told(f"no checkpoint can be created in {self.path}"):
            files.create_dir(self._root, recursive=True)
            directory = self._new_directory()
        path = posixpath.join(directory, MANIFEST)
        try:
            with _told(f"{path} could not be written"):
                # Whatever is given its name later is another directory.
                place = files.below(directory) if isinstance(files, LocalFiles) else files
                entries = {name: _put(place, directory, name, contents[name]) for name in contents}
                text = manifest_text(path, entries, description)
                _check(lease)
                put_file(place, path, text)
        except BaseException:
            with _warned(f"{directory} could not be deleted"):
                _delete(files, directory)
            raise
        finally:
            self._pending.discard(directory)
        with _told(f"{path} could not be written"):
            synchronize(files, self._root)
            if isinstance(place, LocalFiles) and not place.is_in_place():
                raise OSError("its directory was moved or replaced meanwhile")
        return directory

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
        with _told(f"{self.path} cannot be read"):
            directories = self._numbered().values()
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

        Those that this store is writing stay.
        """
        finished = 0
        try:
            _check(self._lease)
            directories = self._numbered().values()
        except (CheckpointError, *STORAGE_ERRORS) as error:
            logger.warning("old checkpoints in %s were not deleted: %s", self.path, error)
            return
        for directory in directories:
            with _warned(f"{directory} could not be deleted"):
                if directory not in self._pending:
                    is_finished = exists(self._files, posixpath.join(directory, MANIFEST))
                    finished += is_finished
                    if finished > self.keep_last or not is_finished:
                        _delete(self._files, directory)

    def _useless(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"checkpointPath '{self.path}' cannot be used: {without_credentials(str(error))}. "
            "Use a directory, or a URI such as s3://bucket/directory"
        )

    def _numbered(self) -> dict[int, str]:
        """The directories that are named like a checkpoint, by number, newest first."""
        found = self._files.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        directories = [info for info in found if info.type == fs.FileType.Directory]
        matches = ((_NAME.fullmatch(info.base_name), info.path) for info in directories)
        numbered = ((int(match[1]), path) for match, path in matches if match)
        return dict(sorted(numbered, reverse=True))


class SavedCheckpoint:
    """A complete checkpoint.

    Attributes:
        directory: where it is, for messages.
        description: what the checkpoint is, as given to ``write``.
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
        path = posixpath.join(self.directory, name)
        with _told(f"{path} cannot be read"), self._files.open_input_stream(path) as stream:
            yield stream


@contextlib.contextmanager
def _told(failure: str) -> Iterator[None]:
    """Turn a file system's errors into ours, which begin with what failed."""
    try:
        yield
    except STORAGE_ERRORS as error:
        raise CheckpointError(f"{failure}: {error}") from error


@contextlib.contextmanager
def _warned(failure: str) -> Iterator[None]:
    """Go on after a file system's errors, with a warning that begins with what failed."""
    try:
        yield
    except STORAGE_ERRORS as error:
        logger.warning("%s: %s", failure, error)


def _put(
    files: Files, directory: str, name: str, write: Callable[[BinaryIO], object]
) -> dict[str, Any]:
    """Write one file of a checkpoint; returns what the manifest says of it."""
    path = posixpath.join(directory, name)
    with _told(f"{path} could not be written"):
        with files.open_output_stream(path) as stream:
            file = Checksummed(stream)
            write(cast(BinaryIO, file))
        synchronize(files, path)
    return file.entry


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
    is_local = isinstance(files, LocalFiles)
    for info in sorted(found, key=lambda info: info.base_name != MANIFEST):
        if is_local or info.base_name == MANIFEST:
            files.delete_file(info.path)
    if isinstance(files, LocalFiles):
        files.delete_empty_dir(directory)
    else:
        files.delete_dir(directory)
