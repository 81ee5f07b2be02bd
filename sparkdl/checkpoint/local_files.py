"""Local files with what pyarrow leaves out: durability, and caution in reading them.

A file's bytes are safe from a loss of power once the file has been fsynced, a directory's entries
once the directory has been; a rename guarantees neither. So everything is written aside and
synchronized, then renamed, then the directory is synchronized, and only then is what it replaces
deleted.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import uuid
from pathlib import Path
from typing import Any, BinaryIO

from pyarrow import fs

logger = logging.getLogger(__name__)

ASIDE = ".sparkdl-replaced"
"""Suffix for the name of a directory that is about to be replaced."""


class LocalFiles(fs.LocalFileSystem):  # type: ignore[misc]
    """pyarrow's local file system, but reading only regular files and following no links.

    A manifest that somebody else wrote may name anything.
    """

    def get_file_info(self, which: Any) -> Any:
        """Like pyarrow's, except that a symbolic link is neither file nor directory."""
        found = super().get_file_info(which)
        if isinstance(found, fs.FileInfo):
            return _unless_link(found)
        return [_unless_link(info) for info in found]

    def create_dir(self, path: str, *, recursive: bool = True) -> None:
        """Make a directory: durably with its parents if ``recursive``, else only that one."""
        if recursive:
            make_directories(Path(path))
        else:
            os.mkdir(path)

    def open_output_stream(self, path: str, *_: Any, **__: Any) -> BinaryIO:
        """Write a file from its beginning; ``synchronize`` makes it durable."""
        return open(path, "wb")

    def open_input_stream(self, path: str, *_: Any, **__: Any) -> BinaryIO:
        """Read a regular file.

        Raises:
            OSError: there is no such file, or it is not a regular one.
        """
        # Non-blocking, because opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return os.fdopen(descriptor, "rb")

    def move(self, source: str, target: str) -> None:
        """Rename within a file system."""
        os.rename(source, target)

    def delete_file(self, path: str) -> None:
        """Delete a file."""
        os.unlink(path)

    def delete_dir(self, path: str) -> None:
        """Delete a directory and what is in it."""
        shutil.rmtree(path)


def synchronize(path: str | Path) -> None:
    """Make a file's bytes, or a directory's entries, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot synchronize directories.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Make a directory and its parents durably."""
    if path.is_dir():
        return
    make_directories(path.parent)
    path.mkdir(exist_ok=True)
    synchronize(path.parent)


def aside(target: Path) -> Path:
    """Where a directory is kept while another takes its place."""
    return target.with_name(target.name + ASIDE)


def whole_directory(target: Path) -> Path:
    """Where to find a directory that ``put_directory`` wrote.

    Returns:
        ``target``, or the directory that it was to replace if that was interrupted between
        its two renames.
    """
    if target.exists() or not aside(target).exists():
        return target
    logger.warning(
        "a save to %s was interrupted; reading what was there before, from %s",
        target,
        aside(target),
    )
    return aside(target)


def put_directory(directory: Path, target: Path) -> None:
    """Copy a directory to a place durably, all of it or nothing.

    Whatever interrupts it, ``whole_directory`` finds either what was there before or the copy.

    Args:
        directory: what to copy: regular files and directories.
        target: the copy's path; anything already there is replaced.

    Raises:
        OSError: the file system refuses; what was there before is still there.
    """
    target = Path(os.path.realpath(target))
    old, new = aside(target), target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        make_directories(target.parent)
        _copy(directory, new)
        if target.exists():
            # Left by an earlier save that was interrupted before its last step.
            synchronize(target.parent)
            _delete(old)
            os.rename(target, old)
        os.rename(new, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.rename(old, target)
        _delete(new)
        raise
    synchronize(target.parent)
    _delete(old)


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if entry.is_dir():
            _copy(entry, target / entry.name)
        else:
            shutil.copyfile(entry, target / entry.name)
            synchronize(target / entry.name)
    synchronize(target)


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error)


def _unless_link(info: fs.FileInfo) -> fs.FileInfo:
    return fs.FileInfo(info.path, fs.FileType.Unknown) if os.path.islink(info.path) else info
