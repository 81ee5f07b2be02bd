"""Local files with what pyarrow leaves out: durability, and caution about what others put there.

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
import os
import secrets
import stat
import weakref
from collections.abc import Iterator
from typing import Any, BinaryIO, TypeAlias

import pyarrow as pa
from pyarrow import fs

_WALK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking, because opening a pipe would wait for its other end.
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFUL


class LocalFiles:
    """This machine's files, with those methods of ``pyarrow.fs.FileSystem`` that are used here.

    Paths are absolute and have no links in them; see ``os.path.realpath``.

    Args:
        directory: what is below it is reached by its descriptor, which is kept: whatever is given
            its name later is another directory.

    Raises:
        OSError: there is no such directory.
    """

    def __init__(self, directory: str = "/") -> None:
        self._directory = directory.rstrip("/")
        self._descriptor = os.open("/", _WALK)
        if self._directory:
            root, self._directory = self._descriptor, ""
            try:
                self._descriptor = self._open_directory(directory)
            finally:
                os.close(root)
            self._directory = directory.rstrip("/")
        # Not as the interpreter exits: a lease is given back after functions registered for that.
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def get_file_info(self, which: Any) -> Any:
        """Like pyarrow's, except that a symbolic link is neither file nor directory."""
        if isinstance(which, str):
            return self._info(which)
        if not isinstance(which, fs.FileSelector):
            return [self._info(path) for path in which]
        found = []
        try:
            with self._directory_of(f"{which.base_dir}/.") as (at, _):
                for name in _listed(at):
                    with contextlib.suppress(FileNotFoundError):  # it is gone already
                        found.append(_info_of(f"{which.base_dir}/{name}", _status(at, name)))
        except FileNotFoundError:
            if not which.allow_not_found:
                raise
        return found

    def create_dir(self, path: str, *, recursive: bool = True) -> None:
        """Make a directory: durably with its parents if ``recursive``, else only that one."""
        if recursive and self._info(path).type == fs.FileType.Directory:
            return
        if recursive:
            self.create_dir(os.path.dirname(path))
        with self._directory_of(path) as (at, name):
            try:
                os.mkdir(name, dir_fd=at)
            except FileExistsError:  # another process was quicker
                if not recursive or not stat.S_ISDIR(_status(at, name).st_mode):
                    raise
            if recursive:
                _synchronize(at, ".")

    @contextlib.contextmanager
    def open_output_stream(self, path: str, *_: Any, **__: Any) -> Iterator[BinaryIO]:
        """Write a file, which takes its name once the block has ended well, and is gone otherwise.

        ``synchronize`` makes it durable.
        """
        with self._directory_of(path) as (at, name):
            partial = f"{_partial_prefix(name)}{secrets.token_hex(16)}"
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
        with self._directory_of(path) as (at, name):
            descriptor = os.open(name, os.O_RDONLY | _CAREFUL, dir_fd=at)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return os.fdopen(descriptor, "rb")

    def open_private(self, path: str) -> int:
        """A descriptor of a file that nobody but this user can open; made if it is not there.

        Raises:
            OSError: what is there is another user's, or one that others may open.
        """
        with self._directory_of(path) as (at, name):
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | _CAREFUL, 0o600, dir_fd=at)
        found = os.fstat(descriptor)
        is_private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if not (stat.S_ISREG(found.st_mode) and is_private and found.st_nlink <= 1):
            os.close(descriptor)
            raise OSError(errno.EPERM, "it is not a file of this user's alone", path)
        return descriptor

    def is_at(self, descriptor: int, path: str) -> bool:
        """Whether an open file is still the one at a path."""
        try:
            with self._directory_of(path) as (at, name):
                return os.path.samestat(os.fstat(descriptor), _status(at, name))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def is_in_place(self) -> bool:
        """Whether the directory whose descriptor is kept still has its name."""
        return self.is_at(self._descriptor, self._directory or "/")

    def move(self, source: str, target: str) -> None:
        """Rename within a file system."""
        with self._directory_of(source) as (a, old), self._directory_of(target) as (b, new):
            os.rename(old, new, src_dir_fd=a, dst_dir_fd=b)

    def delete_file(self, path: str) -> None:
        """Delete a file, or a link."""
        with self._directory_of(path) as (at, name):
            os.unlink(name, dir_fd=at)

    def delete_dir(self, path: str) -> None:
        """Delete a directory and what is in it."""
        # As shutil.rmtree, which takes a directory's descriptor only from Python 3.11 on.
        with self._directory_of(path) as (at, name):
            walk = os.fwalk(name, topdown=False, onerror=_raised, dir_fd=at)
            for _, directories, others, below in walk:
                for each in (*others, *directories):
                    if stat.S_ISDIR(_status(below, each).st_mode):
                        os.rmdir(each, dir_fd=below)
                    else:  # or a link to a directory
                        os.unlink(each, dir_fd=below)
            os.rmdir(name, dir_fd=at)

    def delete_empty_dir(self, path: str) -> None:
        """Delete a directory in which nothing is left."""
        with self._directory_of(path) as (at, name):
            os.rmdir(name, dir_fd=at)

    def delete_partial_files(self, path: str) -> None:
        """Delete what processes that were killed have left of a file that they were writing."""
        with self._directory_of(path) as (at, name):
            for each in _listed(at):
                if each.startswith(_partial_prefix(name)):
                    with contextlib.suppress(OSError):  # a directory: it is none of ours
                        os.unlink(each, dir_fd=at)

    def synchronize(self, path: str) -> None:
        """Make a file's bytes, or a directory's entries, survive a loss of power."""
        with self._directory_of(path) as (at, name):
            _synchronize(at, name)

    def _info(self, path: str) -> fs.FileInfo:
        try:
            with self._directory_of(path) as (at, name):
                status = _status(at, name)
        except (FileNotFoundError, NotADirectoryError):
            return fs.FileInfo(path, fs.FileType.NotFound)
        return _info_of(path, status)

    @contextlib.contextmanager
    def _directory_of(self, path: str) -> Iterator[tuple[int, str]]:
        """The descriptor of the directory that a path is in, and its name there."""
        directory, name = os.path.split(path)
        descriptor = self._open_directory(directory)
        try:
            yield descriptor, name or "."
        except OSError as error:
            if not str(error.filename or "/").startswith("/"):  # it is relative to the directory
                error.filename = path
            raise
        finally:
            os.close(descriptor)

    def _open_directory(self, path: str) -> int:
        is_below = f"{path}/".startswith(f"{self._directory}/")
        names = path[len(self._directory) :] if is_below else path
        at = os.dup(self._descriptor) if is_below else os.open("/", _WALK)
        for name in filter(None, names.split("/")):
            try:
                if name == "..":
                    raise OSError(errno.EINVAL, "it leads out of its directory", path)
                below = os.open(name, _WALK, dir_fd=at)
            except OSError as error:
                error.filename = path
                raise
            finally:
                os.close(at)
            at = below
        return at


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


def _raised(error: OSError) -> None:
    raise error


def _partial_prefix(name: str) -> str:
    return f".{name[:40]}.partial-"


def _status(at: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=at, follow_symlinks=False)


def _info_of(path: str, status: os.stat_result) -> fs.FileInfo:
    path = os.fsencode(path).decode(errors="replace")  # pyarrow's are UTF-8; others are nobody's
    if stat.S_ISDIR(status.st_mode):
        return fs.FileInfo(path, fs.FileType.Directory)
    if not stat.S_ISREG(status.st_mode):
        return fs.FileInfo(path, fs.FileType.Unknown)
    return fs.FileInfo(path, fs.FileType.File, size=status.st_size)


def _listed(at: int) -> list[str]:
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | _CAREFUL, dir_fd=at)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _synchronize(at: int, name: str) -> None:
    descriptor = os.open(name, os.O_RDONLY | _CAREFUL, dir_fd=at)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot synchronize directories.
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not is_directory:
            raise
    finally:
        os.close(descriptor)
