"""The user's own modules on an executor: importable for one task, leaving no trace afterwards.

Spark reuses its Python processes, also for other programs. So a task takes out what was imported
before under the same names, and puts it back when it ends; the next task imports what may have been
edited since. The files are unpacked, once per executor, into a folder that only this user may
enter.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from sparkdl.errors import SetupError
from sparkdl.spark.rows.scratch import row_directory
from sparkdl.spark.sending import SentBytes
from sparkdl.user_code.needed_modules import INSTALLED, skipped_modules

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EPERM, errno.EACCES)
"""How the system says that something is already in the place of a new folder."""


class Shipment(NamedTuple):
    """The user's own modules, as a task receives them.

    A task that only starts other processes imports this, and must not import torch for it.

    Attributes:
        digest: the digest of all their files.
        names: of the modules and packages.
        archive: the zip file with them; None if there are none.
        left_out: what had to stay, and why.
    """

    digest: str
    names: tuple[str, ...]
    archive: SentBytes | None
    left_out: tuple[tuple[str, str], ...]


class Arrived(NamedTuple):
    """Where the user's own modules are on this host.

    Attributes:
        names: of the modules and packages.
        folder: which they are in; empty if there are none.
        left_out: what did not come, and why.
    """

    names: tuple[str, ...]
    folder: str
    left_out: tuple[tuple[str, str], ...]

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Called by Python, before it looks elsewhere, for what is not in ``sys.modules``."""
        if name not in self.names:
            return None
        spec = PathFinder.find_spec(name, [self.folder])
        if spec is not None and spec.submodule_search_locations is not None:
            # A folder without __init__ is joined by what is installed below the same name, and not
            # by what else has it on sys.path.
            installed = [each for each in sys.path if INSTALLED.search(f"{each}/")]
            other = PathFinder.find_spec(name, installed) if spec.origin is None else None
            beside = None if other is None else other.submodule_search_locations
            spec.submodule_search_locations = [*spec.submodule_search_locations, *(beside or ())]
        return spec


def arrive(shipment: Shipment | None) -> Arrived:
    """Make the files of a shipment's modules available on this host.

    Raises:
        SetupError: its archive cannot be unpacked safely.
    """
    if shipment is None:
        return Arrived((), "", ())
    folder = "" if shipment.archive is None else str(_unpacked(shipment.archive, shipment.digest))
    return Arrived(shipment.names, folder, shipment.left_out)


@contextmanager
def importable(arrived: Arrived, kept: dict[str, types.ModuleType] | None = None) -> Iterator[None]:
    """Make modules importable for the duration of a ``with`` block.

    Args:
        arrived: the modules.
        kept: those that an earlier block imported; replaced at the end by those then imported.
            None to import all again.
    """
    with skipped_modules(dict(arrived.left_out)):
        if not arrived.names:
            yield
            return
        hidden = _take_out(arrived.names)
        sys.modules.update(kept or {})
        sys.meta_path.insert(0, arrived)
        sys.path.append(arrived.folder)  # for processes that a worker starts
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # the user's code has removed it
                sys.meta_path.remove(arrived)
            with contextlib.suppress(ValueError):
                sys.path.remove(arrived.folder)
            imported = _take_out(arrived.names)
            if kept is not None:
                kept.clear()
                kept.update(imported)
            sys.modules.update(hidden)


def _take_out(names: Sequence[str]) -> dict[str, types.ModuleType]:
    """Have Python forget modules and their submodules; returns those that it had imported."""
    known = [each for each in sys.modules if each.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in known}


def _unpacked(sent: SentBytes, digest: str) -> Path:
    """The folder with a shipment's files, which the processes of an executor share."""
    parent = row_directory(None)
    folder = parent / f"sparkdl-modules-{digest}"
    if _is_ours(folder):
        return folder
    made = Path(tempfile.mkdtemp(prefix="sparkdl-modules-", dir=parent))  # for this user alone
    try:
        with zipfile.ZipFile(io.BytesIO(sent.value)) as archive:
            archive.extractall(made)  # below it, whatever the names
        try:
            os.rename(made, folder)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            # Another process was quicker to unpack it.
            if not _is_ours(folder):
                raise SetupError(
                    f"{folder} belongs to another user or is open to others, so modules cannot "
                    "be unpacked there. Remove it, or give Spark its own local directories"
                ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _is_ours(folder: Path) -> bool:
    """Whether there is a folder that only this user can write to."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    )
