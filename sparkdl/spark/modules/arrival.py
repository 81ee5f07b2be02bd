"""The user's own modules on an executor: importable for one task, leaving no trace afterwards.

Spark reuses its Python processes, also for other programs. So a task takes out what was imported
before under the same names, and puts it back when it ends; the next task imports what may have been
edited since. If all files are where they are on the driver, in local mode or on a shared file
system, they are imported from there, with whatever lies beside them. Otherwise they are unpacked,
once per executor, into a folder that only this user may enter.
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import FileFinder, ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from sparkdl.errors import SetupError
from sparkdl.spark.closures.sending import SentBytes
from sparkdl.spark.rows.scratch import row_directory
from sparkdl.user_code.needed_modules import left_behind

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EPERM, errno.EACCES)
"""How the system says that something is already in the place of a new folder."""


class Shipment(NamedTuple):
    """The user's own modules, as a task receives them.

    A task that only starts other processes imports this, and must not import torch for it.

    Attributes:
        digest: the digest of all their files.
        units: the dotted names of modules and packages, each with where the driver looks for it.
        archive: the zip file with them; None if there are none.
        left_out: what had to stay, and why.
    """

    digest: str
    units: tuple[tuple[str, str], ...]
    archive: SentBytes | None
    left_out: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Arrived:
    """Where the user's own modules are on this host.

    Attributes:
        places: each module's dotted name, with the folder that it is in.
        search: folders for ``sys.path``, for processes that a worker starts.
        left_out: what did not come, and why.
    """

    places: tuple[tuple[str, str], ...]
    search: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]


def arrive(shipment: Shipment | None) -> Arrived:
    """Make the files of a shipment's modules available on this host.

    Raises:
        SetupError: its archive holds what does not belong there, or cannot be unpacked safely.
    """
    if shipment is None:
        return Arrived((), (), ())
    if shipment.archive is None:
        return Arrived((), (), shipment.left_out)
    with zipfile.ZipFile(io.BytesIO(shipment.archive.value)) as archive:
        bases = dict(shipment.units)
        if not _are_in_place(archive, bases):
            folder = str(_unpacked(archive, shipment.digest))
            bases = dict.fromkeys(bases, folder)
    places = tuple((name, str(Path(base, *name.split(".")[:-1]))) for name, base in bases.items())
    return Arrived(places, tuple(sorted(set(bases.values()))), shipment.left_out)


@contextmanager
def importable(arrived: Arrived, kept: dict[str, types.ModuleType] | None = None) -> Iterator[None]:
    """Make modules importable for the duration of a ``with`` block.

    Args:
        arrived: the modules.
        kept: those that an earlier block imported; replaced at the end by those then imported.
            None to import all again.
    """
    if not arrived.places:
        with left_behind(dict(arrived.left_out)):
            yield
        return
    names = [name for name, _ in arrived.places]
    hidden = _take_out(names)
    _put_in(kept or {})
    folders = {
        ".".join(name.split(".")[:depth])
        for name in names
        for depth in range(1, name.count(".") + 1)
    }
    unknown = [name for name in folders if name not in sys.modules]
    finder = _Finder(dict(arrived.places))
    added = [each for each in arrived.search if each not in sys.path]
    sys.meta_path.insert(0, finder)
    sys.path += added
    _look_again()
    try:
        with left_behind(dict(arrived.left_out)):
            yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code has removed it
            sys.meta_path.remove(finder)
        for each in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(each)
        imported = _take_out(names)
        if kept is not None:
            kept.clear()
            kept.update(imported)
        _put_in(hidden)
        for name in sorted(unknown, key=len, reverse=True):
            # Folders that are not packages, unless other modules in them are imported.
            if not any(each.startswith(f"{name}.") for each in sys.modules):
                _take_out([name])


class _Finder:
    """Finds the modules of a shipment, before Python looks anywhere else; a meta path finder."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Called by Python for each import of a module that is not in ``sys.modules``."""
        place = self._places.get(name)
        return None if place is None else PathFinder.find_spec(name, [place])


def _look_again() -> None:
    """Have Python find what has been added to folders since it last looked there.

    ``importlib.invalidate_caches`` would also reread the directory of PySpark's zip file, once for
    each package in it: 0.15 s of processor time in every task.
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None:  # there was no such folder
            sys.path_importer_cache.pop(path, None)
        elif isinstance(finder, FileFinder):
            finder.invalidate_caches()


def _take_out(names: Sequence[str]) -> dict[str, types.ModuleType]:
    """Have Python forget modules and their submodules; returns those that it had imported."""
    prefixes = tuple(f"{name}." for name in names)
    known = [each for each in sys.modules if each in names or each.startswith(prefixes)]
    taken = {name: sys.modules.pop(name) for name in known}
    for name, module in taken.items():
        parent, _, last = name.rpartition(".")
        if vars(sys.modules.get(parent, object)).get(last) is module:
            delattr(sys.modules[parent], last)
    return taken


def _put_in(modules: dict[str, types.ModuleType]) -> None:
    sys.modules.update(modules)
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent and parent not in modules and parent in sys.modules:
            setattr(sys.modules[parent], last, module)


def _are_in_place(archive: zipfile.ZipFile, bases: dict[str, str]) -> bool:
    """Whether this host has all files, with the same contents, where the driver has them."""
    by_path = {name.replace(".", "/"): Path(base) for name, base in bases.items()}
    try:
        return all(
            (by_path[_unit_of(path, by_path)] / path).read_bytes() == archive.read(path)
            for path in archive.namelist()
        )
    except OSError:  # one is not there, or may not be read
        return False


def _unit_of(path: str, units: Iterable[str]) -> str:
    """Which of the units, as paths, a file belongs to."""
    for unit in units:
        if (path == f"{unit}.py" or path.startswith(f"{unit}/")) and ".." not in path.split("/"):
            return unit
    raise SetupError(f"the modules received contain a file {path!r}")


def _unpacked(archive: zipfile.ZipFile, digest: str) -> Path:
    """The folder with a shipment's files, which the processes of an executor share."""
    parent = row_directory(None)
    folder = parent / f"sparkdl-modules-{digest}"
    if _is_ours(folder):
        return folder
    made = Path(tempfile.mkdtemp(prefix="sparkdl-modules-", dir=parent))  # for this user alone
    try:
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
