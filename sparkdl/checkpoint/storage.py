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
import hashlib
import json
import logging
import os
import posixpath
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import fs

from sparkdl.durable.lease import Lease, held
from sparkdl.durable.local_files import Files, LocalFiles
from sparkdl.durable.publishing import BLOCK_BYTES, put_file
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.redaction import without_credentials

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the files' format; a reader refuses a newer one."""
MAX_MANIFEST_BYTES = 256 << 20
"""Enough for the reports of a million windows in an epoch; more is neither written nor read."""

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_NAME = re.compile(r"checkpoint-([0-9]{6,12})")
_END = 10**12
"""Above the numbers of checkpoints."""
_CONTENTS = re.compile(
    r"manifest\.json(\.partial)?|((center|kept-model|rank-[0-9]+)(\.safetensors)?|state(\.pt)?)"
    r"|\.\S+\.partial-[0-9a-f]{32}"
)
"""Names of all that a checkpoint may hold; nothing else is ever deleted."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_STORAGE_ERRORS = (OSError, pa.ArrowException)


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
        except (*_STORAGE_ERRORS, ValueError) as error:
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
            except _STORAGE_ERRORS as error:
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
        except (CheckpointError, *_STORAGE_ERRORS) as error:
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
        except _STORAGE_ERRORS as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        for directory in directories:
            try:
                return _verified(self._files, directory)
            except _Unfinished:
                logger.warning("%s was never finished; trying the one before", directory)
            except (_Damaged, *_STORAGE_ERRORS) as error:
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
        except (CheckpointError, *_STORAGE_ERRORS) as error:
            logger.warning("old checkpoints in %s were not deleted: %s", self.path, error)
            return
        for directory in directories:
            if directory in self._pending:
                continue
            try:
                finished += (is_finished := self._is_finished(directory))
                if finished > self.keep_last or not is_finished:
                    _delete(self._files, directory)
            except _STORAGE_ERRORS as error:
                logger.warning("%s could not be deleted: %s", directory, error)

    def _useless(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"checkpointPath '{self.path}' cannot be used: {without_credentials(str(error))}. "
            "Use a directory on this machine, or a URI that pyarrow.fs or Spark accepts, for "
            "example s3://bucket/directory"
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

    def _is_finished(self, directory: str) -> bool:
        info = self._files.get_file_info(posixpath.join(directory, MANIFEST))
        return bool(info.type == fs.FileType.File)


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
                file = _Checksummed(stream)
                yield file  # type: ignore[misc]
        except _STORAGE_ERRORS as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error
        self._entries[name] = {"bytes": file.bytes, "sha256": file.sha256.hexdigest()}

    def publish(self, description: dict[str, Any]) -> None:
        """Make the checkpoint exist, durably.

        Args:
            description: what the checkpoint is; JSON.

        Raises:
            CheckpointError: the file system refuses, or another process is writing there now.
        """
        entries = dict(self._entries)  # a worker that has left may still have its file open
        manifest = {"format": FORMAT, "files": entries, "description": description}
        text = json.dumps({"sha256": _digest(manifest), "manifest": manifest}, indent=1).encode()
        path = posixpath.join(self.directory, MANIFEST)
        if len(text) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{path} would have {len(text)} bytes, over the limit of {MAX_MANIFEST_BYTES}: it "
                "describes each window of the epoch. Make windows longer"
            )
        try:
            _check(self._lease)
            # Here rather than when each file is closed, because workers wait for that.
            self._synchronize(*entries)
            _check(self._lease)
            put_file(self._files, path, text)
            self._published = True
            if isinstance(self._files, LocalFiles):
                self._files.synchronize(posixpath.dirname(self.directory))
                if not self._files.is_in_place():
                    raise OSError("its directory was moved or replaced meanwhile")
        except _STORAGE_ERRORS as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error
        self._on_end(self.directory)

    def abandon(self) -> None:
        """Delete what was written so far, if anything; a published checkpoint stays."""
        if self._published:
            return
        try:
            if self._files.get_file_info(self.directory).type != fs.FileType.NotFound:
                _delete(self._files, self.directory)
        except _STORAGE_ERRORS as error:
            logger.warning("%s could not be deleted: %s", self.directory, error)
        self._on_end(self.directory)

    def _synchronize(self, *names: str) -> None:
        if isinstance(self._files, LocalFiles):
            for name in names:
                self._files.synchronize(posixpath.join(self.directory, name))


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
        except _STORAGE_ERRORS as error:
            raise CheckpointError(f"{self.directory}/{name} cannot be read: {error}") from error


class _Unfinished(Exception):
    """There is no manifest."""


class _Damaged(Exception):
    """Some byte differs from what was written."""


class _Checksummed:
    """Passes on what is written, and computes its size and checksum."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self.bytes = 0
        self.sha256 = hashlib.sha256()

    def write(self, octets: bytes | memoryview) -> int:
        self._stream.write(octets)
        self.sha256.update(octets)
        self.bytes += len(octets)
        return len(octets)


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
    except (*_STORAGE_ERRORS, ValueError) as error:
        if open_elsewhere is None:
            raise
        logger.info("pyarrow cannot open %s (%s)", *map(without_credentials, (path, str(error))))
        files, root = open_elsewhere(path)
    return files, root.rstrip("/")


def _verified(files: Files, directory: str) -> SavedCheckpoint:
    manifest = _read_manifest(files, posixpath.join(directory, MANIFEST))
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{directory} has format {manifest['format']}, newer than the {FORMAT} that this "
            "version of sparkdl-torch reads. Upgrade it"
        )
    for name, entry in manifest["files"].items():
        count, sha256 = 0, hashlib.sha256()
        with files.open_input_stream(posixpath.join(directory, name)) as stream:
            while count <= entry["bytes"] and (block := stream.read(BLOCK_BYTES)):
                sha256.update(block)
                count += len(block)
        if count != entry["bytes"]:
            found = f"{count} bytes" if count < entry["bytes"] else "more"
            raise _Damaged(f"{name} had {entry['bytes']} bytes when it was written and has {found}")
        if sha256.hexdigest() != entry["sha256"]:
            raise _Damaged(f"{name} has a different checksum from when it was written")
    return SavedCheckpoint(files, directory, manifest)


def _read_manifest(files: Files, path: str) -> dict[str, Any]:
    if files.get_file_info(path).type == fs.FileType.NotFound:
        raise _Unfinished
    with files.open_input_stream(path) as stream:
        octets = stream.read(MAX_MANIFEST_BYTES + 1)
    if len(octets) > MAX_MANIFEST_BYTES:
        raise _Damaged(f"{MANIFEST} has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        outer = json.loads(octets)
        manifest: dict[str, Any] = outer["manifest"]
        intact = outer["sha256"] == _digest(manifest)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Damaged(f"{MANIFEST} is not readable: {error!r}") from error
    if not intact:
        raise _Damaged(f"{MANIFEST} has a different checksum from when it was written")
    if not _is_manifest(manifest):
        raise _Damaged(f"{MANIFEST} does not have the fields of a manifest")
    return manifest


def _is_manifest(manifest: Any) -> bool:
    """Whether everything that is read from it is there and has the right type."""
    match manifest:
        case {"format": int(newest), "files": dict(files), "description": dict()}:
            return newest > FORMAT or all(map(_is_entry, files.items()))
    return False


def _is_entry(item: tuple[str, Any]) -> bool:
    """Whether a file's entry is complete, and its file is beside the manifest."""
    match item:
        case (str(name), {"bytes": int(count), "sha256": str(sha256)}):
            named = _FILE_NAME.fullmatch(name) and not name.startswith(MANIFEST)
            return bool(named and count >= 0 and _SHA256.fullmatch(sha256))
    return False


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


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
