"""Local files that are whole or not there, and caution about what others put beside them.

What is to replace something is written aside and synchronized, then renamed, then the directory is
synchronized, and only then is what it replaces deleted.

A file's bytes are safe from a loss of power once the file has been fsynced, a directory's entries
once the directory has been; a rename guarantees neither.

Whoever else may write to a directory can put a link, a pipe or another directory in the place of
what we are about to open. So each path is walked from descriptor to descriptor and no link in it is
followed; what is written is a new file under a name that nobody can guess, which is renamed once it
is whole; and only regular files are read.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import pyarrow as pa
from pyarrow import fs

from sparkdl.redaction import shown

logger = logging.getLogger(__name__)

ASIDE = ".sparkdl-replaced"
"""Suffix for the name of a directory that is about to be replaced."""

BLOCK_BYTES = 4 << 20
"""How much is copied at once."""


def put_file(files: Files, path: str, write: Callable[[BinaryIO], object]) -> None:
    """Write a file durably, all of it or nothing, in the place of any existing one.

    Args:
        files: its file system; elsewhere than on this machine, a file that is closed is durable.
        path: its path.
        write: writes its bytes.

    Raises:
        OSError: the file system refuses, or something else has got its name meanwhile.
    """
    if isinstance(files, LocalFiles):
        with files.open_output_stream(path) as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
            size = os.fstat(stream.fileno()).st_size
        files.synchronize(f"{os.path.dirname(path)}/.")
        # Not by its inode: file systems of object stores give another one with another name.
        if files.get_file_info(path).size != size:
            raise OSError("it was moved or replaced meanwhile")
        return
    with files.open_output_stream(f"{path}.partial") as stream:
        write(stream)
    if exists(files, path):
        files.delete_file(path)  # others do not rename over what is there
    files.move(f"{path}.partial", path)


def replace_directory(files: Files, new: str, target: str) -> None:
    """Rename a directory whose files are safe to ``target``; what was there before is deleted.

    Args:
        files: their file system; elsewhere than on this machine, what is renamed is durable.
        new: the directory.
        target: where it belongs.

    Raises:
        OSError: the file system refuses; what was there before is there or aside.
    """
    old, parent = target + ASIDE, os.path.dirname(target)
    if exists(files, target):
        # Left by an earlier one that was interrupted before its last step.
        synchronize(files, parent)
        delete(files, old)
        files.move(target, old)
    files.move(new, target)
    synchronize(files, parent)
    try:
        delete(files, old)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", shown(old), error)


def whole_directory(target: Path) -> Path:
    """Where to find a directory that ``put_directory`` wrote.

    Returns:
        ``target``, or the directory that it was to replace if that was interrupted between
        its two renames.
    """
    aside = target.with_name(target.name + ASIDE)
    if target.exists() or not aside.exists():
        return target
    logger.warning(
        "a save to %s was interrupted; reading what was there before, from %s", target, aside
    )
    return aside


def put_directory(directory: Path, path: Path) -> None:
    """Copy a directory to a place durably, all of it or nothing.

    Whatever interrupts it, ``whole_directory`` finds either what was there before or the copy.

    Args:
        directory: what to copy: regular files and directories.
        path: the copy's path; anything already there is replaced.

    Raises:
        OSError: the file system refuses; what was there before is still there.
    """
    files, target = LocalFiles(), os.path.realpath(path)
    old, new = target + ASIDE, f"{target}.{secrets.token_hex(16)}"
    try:
        files.create_dir(os.path.dirname(target))
        _copy(directory, files, new)
        replace_directory(files, new, target)
    except BaseException:
        with contextlib.suppress(OSError):
            if not exists(files, target):
                files.move(old, target)
        with contextlib.suppress(OSError):
            delete(files, new)
        raise


def _copy(directory: Path, files: LocalFiles, target: str) -> None:
    files.create_dir(target, recursive=False)
    for entry in directory.iterdir():
        if entry.is_dir():
            _copy(entry, files, f"{target}/{entry.name}")
        else:
            copy = f"{target}/{entry.name}"
            with entry.open("rb") as source, files.open_output_stream(copy) as file:
                shutil.copyfileobj(source, file, BLOCK_BYTES)
            files.synchronize(copy)
    files.synchronize(target)


_WALK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking, because opening a pipe would wait for its other end.
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFUL
_PARTIAL = re.compile(r"\..+\.partial-[0-9a-f]{32}")


class LocalFiles:
    """This machine's files, with those methods of ``pyarrow.fs.FileSystem`` that are used here.

    Paths are absolute and have no links in them; see ``os.path.realpath``.

    """

    def get_file_info(self, which: Any) -> Any:
        """Like pyarrow's, except that a symbolic link is neither file nor directory."""
        if isinstance(which, fs.FileSelector):
            try:
                names = self._names(which.base_dir)
            except FileNotFoundError:
                if not which.allow_not_found:
                    raise
                names = []
            found = (self.get_file_info(f"{which.base_dir}/{name}") for name in names)
            return [info for info in found if info.type != fs.FileType.NotFound]
        path = os.fsencode(which).decode(errors="replace")  # pyarrow's are UTF-8; others nobody's
        if (status := self._status(which)) is None:
            return fs.FileInfo(path, fs.FileType.NotFound)
        if stat.S_ISREG(status.st_mode):
            return fs.FileInfo(path, fs.FileType.File, size=status.st_size)
        is_directory = stat.S_ISDIR(status.st_mode)
        return fs.FileInfo(path, fs.FileType.Directory if is_directory else fs.FileType.Unknown)

    def create_dir(self, path: str, *, recursive: bool = True) -> None:
        """Make a directory: durably with its parents if ``recursive``, else only that one."""
        if recursive:
            if self.get_file_info(path).type == fs.FileType.Directory:
                return
            self.create_dir(os.path.dirname(path))
        with self._reached(path) as (at, name):
            try:
                os.mkdir(name, dir_fd=at)
            except FileExistsError:  # another process was quicker
                if not recursive or self.get_file_info(path).type != fs.FileType.Directory:
                    raise
        if recursive:
            self.synchronize(os.path.dirname(path))

    @contextlib.contextmanager
    def open_output_stream(self, path: str, *_: Any, **__: Any) -> Iterator[BinaryIO]:
        """Write a file, which takes its name once the block has ended well, and is gone otherwise.

        ``synchronize`` makes it durable.
        """
        with self._reached(path) as (at, name):
            partial = f".{name[:40]}.partial-{secrets.token_hex(16)}"
            try:
                with os.fdopen(os.open(partial, _NEW, 0o666, dir_fd=at), "wb") as file:
                    yield file
                os.rename(partial, name, src_dir_fd=at, dst_dir_fd=at)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=at)
                raise

    def open_input_stream(self, path: str, *_: Any, **__: Any) -> BinaryIO:
        """Read a regular file.

        Raises:
            OSError: there is no such file, or it is not a regular one.
        """
        return os.fdopen(self._open(path, os.O_RDONLY), "rb")

    open_input_file = open_input_stream

    def open_private(self, path: str) -> int:
        """A descriptor of a file that nobody but this user can open; made if it is not there.

        Raises:
            OSError: what is there is another user's, or one that others may open.
        """
        return self._open(path, os.O_RDWR | os.O_CREAT, private=True)

    def is_at(self, opened: os.stat_result, path: str) -> bool:
        """Whether what was open is still what is at a path."""
        status = self._status(path)
        return status is not None and os.path.samestat(opened, status)

    def move(self, source: str, target: str) -> None:
        """Rename within a file system."""
        with self._reached(source) as (a, old), self._reached(target) as (b, new):
            os.rename(old, new, src_dir_fd=a, dst_dir_fd=b)

    def delete_file(self, path: str) -> None:
        """Delete a file, or a link."""
        with self._reached(path) as (at, name):
            os.unlink(name, dir_fd=at)

    def delete_dir(self, path: str) -> None:
        """Delete a directory and what is in it."""
        for name in self._names(path):
            delete(self, f"{path}/{name}")
        self.delete_empty_dir(path)

    def delete_empty_dir(self, path: str) -> None:
        """Delete a directory in which nothing is left."""
        with self._reached(path) as (at, name):
            os.rmdir(name, dir_fd=at)

    def delete_partial_files(self, directory: str) -> None:
        """Delete what processes that were killed have left of files that they were writing."""
        for each in self._names(directory):
            if _PARTIAL.fullmatch(each):
                with contextlib.suppress(OSError):  # a directory: it is none of ours
                    self.delete_file(f"{directory}/{each}")

    def synchronize(self, path: str) -> None:
        """Make a file's bytes, or a directory's entries, survive a loss of power."""
        with self._reached(path) as (at, name):
            descriptor = os.open(name, os.O_RDONLY | _CAREFUL, dir_fd=at)
            try:
                os.fsync(descriptor)
            except OSError as error:
                # Some network file systems cannot synchronize directories.
                if error.errno not in (errno.EINVAL, errno.ENOTSUP) or os.path.isfile(descriptor):
                    raise
            finally:
                os.close(descriptor)

    def _status(self, path: str) -> os.stat_result | None:
        missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with missing, self._reached(path) as (at, name):
            return os.stat(name, dir_fd=at, follow_symlinks=False)
        return None

    def _open(self, path: str, flags: int, *, private: bool = False) -> int:
        with self._reached(path) as (at, name):
            descriptor = os.open(name, flags | _CAREFUL, 0o600, dir_fd=at)
        found = os.fstat(descriptor)
        others = found.st_uid != os.geteuid() or found.st_mode & 0o077 or found.st_nlink > 1
        if not stat.S_ISREG(found.st_mode) or (private and others):
            os.close(descriptor)
            what = "file of this user's alone" if private else "regular file"
            raise OSError(errno.EINVAL, f"it is not a {what}", path)
        return descriptor

    def _names(self, directory: str) -> list[str]:
        with self._reached(f"{directory}/.") as (at, name):
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _CAREFUL, dir_fd=at)
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _reached(self, path: str) -> Iterator[tuple[int, str]]:
        """The descriptor of the directory that a path is in, and its name there."""
        *directories, name = path.split("/")
        with contextlib.ExitStack() as opened:
            try:
                at = os.open("/", _WALK)
                opened.callback(os.close, at)
                for each in filter(None, directories):
                    if each == "..":
                        raise OSError(errno.EINVAL, "a path must not lead upwards", path)
                    at = os.open(each, _WALK, dir_fd=at)
                    opened.callback(os.close, at)
                yield at, name or "."
            except OSError as error:
                if not str(error.filename or "/").startswith("/"):  # relative to the directory
                    error.filename = path
                raise


Files: TypeAlias = fs.FileSystem | LocalFiles
"""A file system."""
STORAGE_ERRORS = (OSError, pa.ArrowException)
"""What they raise."""


def exists(files: Files, path: str) -> bool:
    """Whether there is anything at a path."""
    return bool(files.get_file_info(path).type != fs.FileType.NotFound)


def synchronize(files: Files, path: str) -> None:
    """Make a file or directory survive a loss of power; elsewhere, what is closed is durable."""
    if isinstance(files, LocalFiles):
        files.synchronize(path)


def delete(files: Files, path: str) -> None:
    """Delete a file, a link, or a directory and what is in it, if there is any."""
    kind = files.get_file_info(path).type
    if kind == fs.FileType.Directory:
        files.delete_dir(path)
    elif kind != fs.FileType.NotFound:
        files.delete_file(path)
