"""The files of a unit, with the text of each module as the driver has imported it.

Python runs the text that a module had when it was imported, whatever its file has said since. So a
module's text is kept from when it is first sent until the module is imported again: a file that is
edited, or replaced by a deployment, while the driver runs changes nothing under way.
"""

from __future__ import annotations

import logging
import os
import sys
import types
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, SourceFileLoader
from pathlib import Path, PurePosixPath

from sparkdl.errors import ConfigError
from sparkdl.spark.modules.units import CannotTravelError, Unit, spec_of
from sparkdl.user_code.references import imported_names, nested_code

logger = logging.getLogger(__name__)

MOST_FILES = 5_000
"""The most files and folders in one package; whatever has more is not a package but a disk."""
MOST_BYTES = 32 * 2**20
"""The most bytes in one package."""
LARGEST_DATA_FILE = 4 * 2**20
"""The most bytes in a file that is no module. Larger ones, such as weights, belong in a store."""

_COMPILED = (*EXTENSION_SUFFIXES, ".so", ".pyd", ".dylib", ".dll")


@dataclass(frozen=True)
class UnitFiles:
    """The parts of a unit that are sent.

    Attributes:
        files: contents by path, relative to the unit's base, with slashes.
        imports: dotted names that its modules import.
        too_large: data files that stay, for messages.
    """

    files: dict[str, bytes]
    imports: frozenset[str]
    too_large: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Text:
    """A module's text when it was first read."""

    spec: ModuleSpec | None
    source: bytes
    code: types.CodeType | None
    imports: frozenset[str]


class Texts:
    """Reads units; remembers the text of modules until they are imported again."""

    def __init__(self) -> None:
        self._held: dict[str, _Text] = {}  # by file

    def read(self, unit: Unit, *, refuse_edited: bool) -> UnitFiles:
        """Read a unit.

        Args:
            unit: what to read.
            refuse_edited: whether to raise instead of warning if a module's imported text is known
                but its file has changed since.

        Raises:
            CannotTravelError: it has compiled parts, or is too large.
            ConfigError: a module's text has changed since it was imported.
        """
        paths = list(_paths_of(unit))
        modules = [each for each in paths if each.endswith(".py")]
        files: dict[str, bytes] = {}
        imports: set[str] = set()
        for path in modules:
            text = self._text(unit, path, refuse_edited)
            files[path] = text.source
            imports |= text.imports
        room = MOST_BYTES - sum(map(len, files.values()))
        if room < 0:
            raise CannotTravelError(
                unit.name,
                f"has more than {MOST_BYTES // 2**20} MiB of Python in {unit.base}",
            )
        too_large = []
        data = sorted((_size(unit, path), path) for path in paths if path not in files)
        for size, path in data:
            if size > min(room, LARGEST_DATA_FILE):
                too_large.append(path)
                continue
            files[path] = _bytes(unit, path)
            room -= size
        return UnitFiles(files, frozenset(imports), tuple(sorted(too_large)))

    def _text(self, unit: Unit, path: str, refuse_edited: bool) -> _Text:
        name, file = _module_name(path), f"{unit.base}{os.sep}{path}"
        spec = _spec_of_file(name, file)
        known = self._held.get(file)
        source = _bytes(unit, path)
        if (
            known is not None
            and known.spec is spec
            and (spec is not None or known.source == source)
        ):
            if known.source != source and _differ(known.code, _code_of(unit, name, path, source)):
                if refuse_edited:
                    raise ConfigError(_edited(file, name, "text"))
                logger.warning(
                    "%s has changed since %s was imported: workers run the version that this "
                    "process runs. importlib.reload(%s) loads the new one",
                    file,
                    name,
                    name,
                )
            return known
        code = _code_of(unit, name, path, source)
        if code is None:
            names: frozenset[str] = frozenset()
        else:
            package = name if path.endswith("/__init__.py") else name.rpartition(".")[0]
            names = frozenset(imported_names(code, package))
            if spec is not None and type(spec.loader) is SourceFileLoader:
                _require_unedited(sys.modules[name], code, file)
        text = self._held[file] = _Text(spec, source, code, names)
        return text


def _spec_of_file(name: str, file: str) -> ModuleSpec | None:
    """The spec of a module that this process has imported from a file; None if it has not."""
    module = sys.modules.get(name)
    spec = None if module is None else spec_of(module)
    if spec is None or spec.origin is None or os.path.abspath(spec.origin) != file:
        return None
    return spec


def _code_of(unit: Unit, name: str, path: str, source: bytes) -> types.CodeType | None:
    """A module's code, from Python's own cache if it is there; None if the text is not Python."""
    file = f"{unit.base}{os.sep}{path}"
    try:
        if unit.archive is None:
            return SourceFileLoader(name, file).get_code(name)
        return compile(source, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # a template, or written for another version of Python
        return None


def _require_unedited(module: types.ModuleType, code: types.CodeType, file: str) -> None:
    """Check that a module's functions are those of its file.

    Raises:
        ConfigError: one is not, so that workers would run a different text from the driver's.
    """
    of_file = {_essence(each) for each in nested_code(code)}
    for function in _functions(module, file):
        if _essence(function.__code__) not in of_file:
            raise ConfigError(_edited(file, module.__name__, function.__qualname__))


def _edited(file: str, name: str, what: str) -> str:
    return (
        f"{file} has changed since {name} was imported: this process runs the old {what}, and "
        f"workers would run the new one. Load it with importlib.reload({name}), %autoreload in "
        "a notebook, or a fresh session"
    )


def _differ(old: types.CodeType | None, new: types.CodeType | None) -> bool:
    return old is None or new is None or _essence(old) != _essence(new)


def _functions(module: types.ModuleType, file: str) -> Iterator[types.FunctionType]:
    """The functions that a module's file defines, including those in its classes."""
    for value in list(vars(module).values()):
        members = [value]
        if isinstance(value, type) and value.__module__ == module.__name__:
            members = list(vars(value).values())
        for member in members:
            bare = getattr(member, "__func__", member)
            if isinstance(bare, types.FunctionType) and bare.__code__.co_filename == file:
                yield bare


def _essence(code: types.CodeType) -> tuple[object, ...]:
    """What code does, regardless of its position in the file."""
    constants = tuple(
        _essence(each) if isinstance(each, types.CodeType) else (type(each), repr(each))
        for each in code.co_consts
    )
    return code.co_qualname, code.co_code, code.co_names, code.co_varnames, constants


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _paths_of(unit: Unit) -> Iterator[str]:
    """The files of a unit, relative to its base.

    Raises:
        CannotTravelError: a part is compiled, or there are too many.
    """
    if not unit.is_package:
        yield unit.relative
        return
    listed = _in_archive(unit) if unit.archive is not None else _in_folder(unit)
    for number, path in enumerate(listed):
        if number >= MOST_FILES:
            raise CannotTravelError(
                unit.name, f"has more than {MOST_FILES:,} files in {Path(unit.file).parent}"
            )
        name = PurePosixPath(path).name
        if name.endswith(_COMPILED):
            raise CannotTravelError(unit.name, f"has a compiled part ({path})")
        if not name.endswith((".pyc", ".pyo")):
            yield path


def _in_folder(unit: Unit) -> Iterator[str]:
    for folder, folders, files in os.walk(Path(unit.base, unit.relative)):
        folders[:] = sorted(each for each in folders if not _is_hidden(each))
        for file in sorted(files):
            path = Path(folder, file)
            if not _is_hidden(file) and path.is_file():
                yield path.relative_to(unit.base).as_posix()


def _in_archive(unit: Unit) -> Iterator[str]:
    assert unit.archive is not None
    inside = _inside(unit)
    with zipfile.ZipFile(unit.archive) as archive:
        for entry in sorted(archive.namelist()):
            path = entry.removeprefix(inside)
            parts = path.split("/")
            wanted = entry.startswith(inside) and path.startswith(f"{unit.relative}/")
            if wanted and parts[-1] and not any(map(_is_hidden, parts)):
                yield path


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _inside(unit: Unit) -> str:
    """The folder within the archive that is the unit's base."""
    folder = os.path.relpath(unit.base, unit.archive)
    return "" if folder == "." else f"{Path(folder).as_posix()}/"


def _size(unit: Unit, path: str) -> int:
    if unit.archive is None:
        return Path(unit.base, path).stat().st_size
    with zipfile.ZipFile(unit.archive) as archive:
        return archive.getinfo(_inside(unit) + path).file_size


def _bytes(unit: Unit, path: str) -> bytes:
    if unit.archive is None:
        return Path(unit.base, path).read_bytes()
    with zipfile.ZipFile(unit.archive) as archive:
        return archive.read(_inside(unit) + path)
