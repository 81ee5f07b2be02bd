"""Sends the user's own modules to the executors, once for as long as they stay the same.

They travel as files, in a Spark broadcast: it goes once to each executor, even to one that restarts
or comes later, and Spark protects it as it protects its tasks. ``addPyFile`` would leave a file in
the session for good, and could not replace it with another version. ``arrival`` makes them
importable for one task.

Why not by value, as cloudpickle can: a function that arrives by value has no source lines in its
traceback and none for ``inspect`` and TorchScript; what its module imports at call time, its
siblings and its data files do not come along; a module that holds a lock or an open file cannot be
pickled at all; and a class is a different one in every pickle. What arrives as files is what the
driver has imported, under the same names: in results, in saved models, and in processes that a
worker starts. Only changes made in the driver's memory, by assigning to module variables, are lost.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import logging
import os
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path, PurePosixPath
from typing import Any

from pyspark.sql import SparkSession

from sparkdl.checkpoint.identity import BY_NAME
from sparkdl.errors import ConfigError
from sparkdl.spark.arrival import Shipment
from sparkdl.spark.catalyst.jvm import SparkFiles, is_of_connect, setting
from sparkdl.spark.sending import SentBytes, broadcast_scope, send
from sparkdl.user_code.needed_modules import HOW_OTHERS_TRAVEL, INSTALLED, imported_names

logger = logging.getLogger(__name__)

MOST_FILES = 5_000
"""The most files and folders in one package; whatever has more is not a package but a disk."""
MOST_BYTES = 32 * 2**20
"""The most bytes in one package."""
LARGEST_DATA_FILE = 4 * 2**20
"""The most bytes in a file that is no module. Larger ones, such as weights, belong in a store."""

_COMPILED = (*EXTENSION_SUFFIXES, ".so", ".pyd", ".dylib", ".dll")
_NEVER = (BY_NAME - sys.stdlib_module_names) | {"py4j", "__main__", "__mp_main__", "builtins"}
_STANDARD = tuple(
    f"{os.path.realpath(sysconfig.get_paths()[name])}{os.sep}" for name in ("stdlib", "platstdlib")
)
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
        files: contents by path, relative to where Python is to look, with slashes.
        left_out: the reasons why modules have to stay, by name.
        too_large: data files that stay.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    too_large: list[str] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules and packages."""
        tops = (path.partition("/")[0].removesuffix(".py") for path in self.files)
        return tuple(dict.fromkeys(tops))

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


class UnshippableModuleError(Exception):
    """One of the user's own modules has to stay; continues a sentence that begins with its name."""


def ship(
    names: Iterable[str],
    spark: SparkSession,
    first: Sequence[str] = (),
) -> Shipment | None:
    """Send what some names need, unless the executors have it.

    Args:
        names: dotted names, as ``ReferencePickler`` notes them.
        spark: the session.
        first: folders to search before all others, as Python searches a script's folder.

    Returns:
        What a task needs to get them; None if nothing of the user's own is needed.

    Raises:
        ConfigError: a module's text has changed since it was imported.
    """
    with _lock:
        bundle = collect(names, first, _sent(spark))
        if not bundle.files and not bundle.left_out:
            return None
        _warn(bundle)
        return Shipment(
            digest=bundle.digest,
            names=bundle.names,
            archive=_send(bundle, spark) if bundle.files else None,
            left_out=tuple(bundle.left_out.items()),
        )


def collect(names: Iterable[str], first: Sequence[str] = (), sent: Sequence[str] = ()) -> Bundle:
    """Find the modules and packages that some names belong to, and what those import in turn.

    Args:
        names: dotted names of modules or of things defined in modules.
        first: folders to search before all others.
        sent: folders and file names of what Spark has sent, which need not travel.

    Raises:
        ConfigError: a module's text has changed since it was imported.
    """
    bundle = Bundle()
    waiting, known = list(names), set[str]()
    for dotted in waiting:
        name = dotted.partition(".")[0]
        if name in known:
            continue
        known.add(name)
        try:
            waiting += sorted(_read(name, _places_of(name, first, sent), bundle))
        except UnshippableModuleError as error:
            bundle.left_out[name] = str(error)
    return bundle


def _places_of(name: str, first: Sequence[str], sent: Sequence[str]) -> list[Path]:
    """The file of a module of the user's own, or the folders of a package; none if it is not.

    Raises:
        UnshippableModuleError: it is the user's own, but cannot be sent.
    """
    spec = None if name in _NEVER else _spec_of(name, first)
    if spec is None:
        return []
    # Some packages, such as transformers, give paths as Path, which Python takes too.
    found = map(os.fspath, spec.submodule_search_locations or [spec.origin or ""])
    places = [Path(os.path.abspath(each)) for each in found if os.sep in each]
    # Of a folder without __init__ that installed packages share, executors have the others' part.
    places = [p for p in places if not (_is_installed(str(p)) or _is_sent(p, sent))]
    for place in places:
        if not place.exists() or place.name not in (name, f"{name}.py"):
            raise UnshippableModuleError(
                f"was loaded from {place}, which is neither a file {name}.py nor a folder {name}"
            )
    if places and name in sys.stdlib_module_names:
        raise UnshippableModuleError("has the name of a standard library module")
    return places


def _spec_of(name: str, first: Sequence[str]) -> ModuleSpec | None:
    """How a module is found, or was, without importing it."""
    spec = PathFinder.find_spec(name, list(first)) if first else None
    if spec is not None and spec.origin is not None:
        return spec
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    with contextlib.suppress(Exception):  # what finders do not find here cannot be needed
        return importlib.util.find_spec(name)
    return None


@functools.lru_cache(maxsize=4096)
def _is_installed(place: str) -> bool:
    return bool(INSTALLED.search(f"{place}/")) or os.path.realpath(place).startswith(_STANDARD)


def _is_sent(place: Path, sent: Sequence[str]) -> bool:
    return any(each in place.parts or place.is_relative_to(each) for each in sent)


def _read(name: str, places: list[Path], bundle: Bundle) -> set[str]:
    """Add a module or package to a bundle; returns the names of the modules that it imports.

    Raises:
        UnshippableModuleError: it has compiled parts, or is too large.
        ConfigError: a module's text has changed since it was imported.
    """
    paths = {
        file.relative_to(place.parent).as_posix(): file
        for place in reversed(places)  # of two files of one name, Python takes the first
        for file in _files_of(place)
    }
    files: dict[str, bytes] = {}
    for path, file in paths.items():
        if path.endswith(".py"):
            dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            files[path] = _text(dotted, file)
    room = MOST_BYTES - sum(map(len, files.values()))
    if room < 0:
        raise UnshippableModuleError(
            f"has more than {MOST_BYTES // 2**20} MiB of Python in {places[0]}"
        )
    # To compile megabytes takes a minute, so only what will be sent is.
    imports = set[str]().union(*map(_imports, files.values()))
    data = sorted((file.stat().st_size, path) for path, file in paths.items() if path not in files)
    for size, path in data:
        if size > min(room, LARGEST_DATA_FILE):
            bundle.too_large.append(path)
            continue
        files[path] = paths[path].read_bytes()
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
    spec = _spec_of(name, ()) if name in sys.modules else None
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
def _imports(text: bytes) -> frozenset[str]:
    """The packages and modules that a text imports, but for those beside it in its package."""
    try:
        code = compile(text, "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # a template, or written for another version of Python
        return frozenset()
    return frozenset(imported_names(code))


def _files_of(place: Path) -> Iterator[Path]:
    """The files of a module or package.

    Raises:
        UnshippableModuleError: a part is compiled, or there are too many.
    """
    if place.is_file():
        yield place
        return
    number = 0
    for folder, folders, files in os.walk(place):
        folders[:] = sorted(each for each in folders if not _is_hidden(each))
        for file in sorted(files):
            path = Path(folder, file)
            if _is_hidden(file) or not path.is_file():
                continue
            number += 1
            if number > MOST_FILES:
                raise UnshippableModuleError(f"has more than {MOST_FILES:,} files in {place}")
            if file.endswith(_COMPILED):
                relative = path.relative_to(place.parent).as_posix()
                raise UnshippableModuleError(f"has a compiled part ({relative})")
            if not file.endswith((".pyc", ".pyo")):
                yield path


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
            ", ".join(bundle.names),
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
