"""Sends the user's own modules to the executors, once for as long as they stay the same.

They travel as a Spark broadcast: it goes once to each executor, even to one that restarts or comes
later, and Spark protects it as it protects its tasks. ``addPyFile`` would leave a file in the
session for good, and could not replace it with another version.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import logging
import os
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path, PurePosixPath
from typing import Any

from pyspark.sql import SparkSession

from sparkdl.errors import ConfigError
from sparkdl.spark.catalyst.core import SparkFiles
from sparkdl.spark.catalyst.jvm import is_of_connect, setting
from sparkdl.spark.closures.sending import SentBytes, broadcast_scope, send
from sparkdl.spark.modules.arrival import Shipment
from sparkdl.spark.modules.units import CannotTravelError, Finder, Unit, spec_of
from sparkdl.user_code.needed_modules import HOW_OTHERS_TRAVEL, imported_names

logger = logging.getLogger(__name__)

MOST_FILES = 5_000
"""The most files and folders in one package; whatever has more is not a package but a disk."""
MOST_BYTES = 32 * 2**20
"""The most bytes in one package."""
LARGEST_DATA_FILE = 4 * 2**20
"""The most bytes in a file that is no module. Larger ones, such as weights, belong in a store."""

_COMPILED = (*EXTENSION_SUFFIXES, ".so", ".pyd", ".dylib", ".dll")
_ANY_DAY = (1980, 1, 1, 0, 0, 0)
"""A fixed date, so that the same files make the same bytes."""

_lock = threading.Lock()
_warned: set[str] = set()
_imported: dict[str, tuple[ModuleSpec, bytes]] = {}
"""By file, the text of modules that this process had imported when they were first sent."""
_sent_last: tuple[Any, str, SentBytes] | None = None
"""Where, the digest of the modules, and how they were sent."""


@dataclass(frozen=True)
class Bundle:
    """What is to travel.

    Attributes:
        units: the units, by name.
        files: contents by path, relative to where Python is to look, with slashes.
        left_out: the reasons why modules have to stay, by name.
        too_large: data files that stay.
    """

    units: dict[str, Unit] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    too_large: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """A digest of the names and contents of all files."""
        found = hashlib.sha256()
        for path, content in sorted(self.files.items()):
            for part in (path.encode(), content):
                found.update(len(part).to_bytes(8, "little") + part)
        return found.hexdigest()

    def archive(self) -> bytes:
        """A zip file of all files."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, content in sorted(self.files.items()):
                entry = zipfile.ZipInfo(path, _ANY_DAY)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, content)
        return packed.getvalue()


def ship(
    names: Iterable[str],
    spark: SparkSession,
    first: Sequence[str] = (),
) -> Shipment | None:
    """Send what some names need, unless the executors have it.

    Args:
        names: dotted names, as ``references`` notes them.
        spark: the session.
        first: folders to search before all others, as Python searches a script's folder.

    Returns:
        What a task needs to get them; None if nothing of the user's own is needed.

    Raises:
        ConfigError: a module's text has changed since it was imported.
    """
    with _lock:
        bundle = collect(names, Finder(first, _sent(spark)))
        if not bundle.units and not bundle.left_out:
            return None
        _warn(bundle)
        return Shipment(
            digest=bundle.digest,
            units=tuple((unit.name, str(unit.base)) for unit in bundle.units.values()),
            archive=_send(bundle, spark) if bundle.units else None,
            left_out=tuple(bundle.left_out.items()),
        )


def collect(names: Iterable[str], finder: Finder) -> Bundle:
    """Find the units that some names belong to, and what those import in turn.

    Args:
        names: dotted names of modules or of things defined in modules.
        finder: finds the units.

    Raises:
        ConfigError: a module's text has changed since it was imported.
    """
    bundle = Bundle()
    waiting = list(names)
    known = set(waiting)
    for name in waiting:
        if name.partition(".")[0] in bundle.left_out:
            continue
        try:
            unit = finder.unit_of(name)
            if unit is None or unit.name in bundle.units:
                continue
            imports = _read(unit, bundle)
        except CannotTravelError as error:
            bundle.left_out[error.name] = error.reason
            continue
        bundle.units[unit.name] = unit
        waiting += sorted(imports - known)
        known |= imports
    return bundle


def _read(unit: Unit, bundle: Bundle) -> set[str]:
    """Add a unit's files to a bundle; returns the dotted names that its modules import.

    Raises:
        CannotTravelError: it has compiled parts, or is too large.
        ConfigError: a module's text has changed since it was imported.
    """
    paths = list(_paths_of(unit))
    imports: set[str] = set()
    files: dict[str, bytes] = {}
    for path in filter(lambda path: path.endswith(".py"), paths):
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        files[path] = _text(name, unit.base / path)
        is_package = path.endswith("/__init__.py")
        imports |= _imports(files[path], name if is_package else name.rpartition(".")[0])
    room = MOST_BYTES - sum(map(len, files.values()))
    if room < 0:
        raise CannotTravelError(
            unit.name, f"has more than {MOST_BYTES // 2**20} MiB of Python in {unit.base}"
        )
    data = sorted(((unit.base / path).stat().st_size, path) for path in paths if path not in files)
    for size, path in data:
        if size > min(room, LARGEST_DATA_FILE):
            bundle.too_large.append(path)
            continue
        files[path] = (unit.base / path).read_bytes()
        room -= size
    bundle.files.update(files)
    return imports


def _text(name: str, file: Path) -> bytes:
    """A module's text as this process has imported it, if it has.

    Python runs the text that a module had when it was imported, whatever its file has said since.

    Raises:
        ConfigError: workers would run a different text from the driver's.
    """
    text = file.read_bytes()
    module = sys.modules.get(name)
    spec = None if module is None else spec_of(module)
    if spec is None or spec.origin is None or os.path.abspath(spec.origin) != str(file):
        return text
    known = _imported.get(str(file))
    if known is not None and known[0] is spec:
        if known[1] != text:
            logger.warning(
                "%s has changed since %s was imported: workers run the version that this "
                "process runs. importlib.reload(%s) loads the new one",
                file,
                name,
                name,
            )
        return known[1]
    if _is_newer_than_bytecode(spec, file):
        raise ConfigError(
            f"{file} has changed since {name} was imported: this process runs the old text, and "
            f"workers would run the new one. Load it with importlib.reload({name}), %autoreload in "
            "a notebook, or a fresh session"
        )
    _imported[str(file)] = spec, text
    return text


def _is_newer_than_bytecode(spec: ModuleSpec, file: Path) -> bool:
    """Whether a file has been written since Python last compiled it, as the bytecode tells.

    False where Python writes no bytecode.
    """
    if sys.dont_write_bytecode or spec.cached is None:
        return False
    try:
        header = Path(spec.cached).read_bytes()[:16]
        found = file.stat()
    except OSError:
        return False
    if not os.access(spec.cached, os.W_OK) or header[:4] != importlib.util.MAGIC_NUMBER:
        return False
    stamp = int(found.st_mtime).to_bytes(8, "little")[:4]
    size = (found.st_size & 0xFFFFFFFF).to_bytes(4, "little")
    return header[4:8] == bytes(4) and header[8:] != stamp + size


@functools.lru_cache(maxsize=4096)
def _imports(text: bytes, package: str) -> frozenset[str]:
    try:
        code = compile(text, "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # a template, or written for another version of Python
        return frozenset()
    return frozenset(imported_names(code, package))


def _paths_of(unit: Unit) -> Iterator[str]:
    """The files of a unit, relative to its base.

    Raises:
        CannotTravelError: a part is compiled, or there are too many.
    """
    if not unit.is_package:
        yield unit.relative
        return
    number = 0
    for folder, folders, files in os.walk(unit.base / unit.relative):
        folders[:] = sorted(each for each in folders if not _is_hidden(each))
        for file in sorted(files):
            path = Path(folder, file)
            if _is_hidden(file) or not path.is_file():
                continue
            number += 1
            if number > MOST_FILES:
                raise CannotTravelError(
                    unit.name, f"has more than {MOST_FILES:,} files in {Path(unit.file).parent}"
                )
            relative = path.relative_to(unit.base).as_posix()
            if file.endswith(_COMPILED):
                raise CannotTravelError(unit.name, f"has a compiled part ({relative})")
            if not file.endswith((".pyc", ".pyo")):
                yield relative


def _is_hidden(name: str) -> bool:
    """Whether a name says that it is not part of a package; a zip file cannot hold surrogates."""
    return name.startswith(".") or name == "__pycache__" or not name.isprintable()


def _send(bundle: Bundle, spark: SparkSession) -> SentBytes:
    global _sent_last
    digest, home = bundle.digest, broadcast_scope(spark)
    if _sent_last is None or _sent_last[0] is not home or _sent_last[1] != digest:
        archive = bundle.archive()
        logger.info(
            "sending %s to the executors: %d files, %d bytes",
            ", ".join(bundle.units),
            len(bundle.files),
            len(archive),
        )
        _sent_last = home, digest, send(spark, archive)
    return _sent_last[2]


def _sent(spark: SparkSession) -> list[str]:
    """Where the driver keeps what Spark itself sends to the executors."""
    if is_of_connect(spark):
        return []
    archives = setting(spark, "spark.submit.pyFiles") or ""
    names = [PurePosixPath(each).name for each in archives.split(",") if each]
    return [SparkFiles.getRootDirectory(), *names]


def _warn(bundle: Bundle) -> None:
    """Say once what stays."""
    texts = [
        f"the module {name} {reason}, so it is not sent to the executors. {HOW_OTHERS_TRAVEL}"
        for name, reason in bundle.left_out.items()
    ]
    if bundle.too_large:
        shown = ", ".join(bundle.too_large[:5])
        texts.append(
            f"{len(bundle.too_large)} data files in your packages are too large to send to the "
            f"executors: {shown}. Read them from a path that all hosts have, or add them with "
            "spark.sparkContext.addFile"
        )
    for text in texts:
        if text not in _warned:
            _warned.add(text)
            logger.warning("%s", text)
