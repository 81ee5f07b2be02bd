"""Files and directories that are there whole or not at all, whatever interrupts who writes them.

Everything is written aside and synchronized, then renamed, then the directory is synchronized, and
only then is what it replaces deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from sparkdl.durable.local_files import Files, LocalFiles, delete, exists, synchronize
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
