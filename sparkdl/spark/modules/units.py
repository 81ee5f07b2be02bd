"""Which modules are the user's own, and what travels as a unit: a module, or a whole package.

The user's own modules are those that Python finds neither in the standard library nor among the
installed packages: beside a notebook or script, on ``PYTHONPATH``, in an editable checkout
(``pip install -e``). What Spark itself has sent to the driver is already on the executors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sys
import sysconfig
import types
import zipimport
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path

from sparkdl.checkpoint.identity import BY_NAME, INSTALLED

_NEVER = (BY_NAME - sys.stdlib_module_names) | {"py4j", "__main__", "__mp_main__", "builtins"}
_STANDARD = tuple(
    f"{os.path.realpath(sysconfig.get_paths()[name])}{os.sep}" for name in ("stdlib", "platstdlib")
)


@dataclass(frozen=True)
class Unit:
    """A module, or a package with everything in it.

    Attributes:
        name: its name; dotted if it is inside packages that are mere folders.
        file: the absolute path of the module or of the package's ``__init__``.
        is_package: whether it is a package.
    """

    name: str
    file: str
    is_package: bool

    @property
    def base(self) -> Path:
        """The folder in which Python finds it by its name."""
        return Path(self.file).parents[self.name.count(".") + self.is_package]

    @property
    def relative(self) -> str:
        """Its file or folder, relative to ``base``, with slashes."""
        path = self.name.replace(".", "/")
        return path if self.is_package else path + Path(self.file).suffix


class CannotTravelError(Exception):
    """One of the user's own modules has to stay.

    Attributes:
        name: the module's name.
        reason: continues a sentence that begins with its name.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.reason = reason


class Finder:
    """Finds the units that names belong to.

    Args:
        first: folders to search before all others, as Python searches a script's folder.
        sent: folders and file names of what Spark has sent, which need not travel.
    """

    def __init__(self, first: Sequence[str] = (), sent: Sequence[str] = ()) -> None:
        self._first = list(first)
        self._sent = tuple(sent)

    def unit_of(self, name: str) -> Unit | None:
        """The unit of a module, or of a thing in a module; None if it is not the user's own.

        Args:
            name: its dotted name.

        Raises:
            CannotTravelError: it is the user's own, but cannot be sent.
        """
        parts = name.split(".")
        if parts[0] in _NEVER:
            return None
        within: Sequence[str] | None = None
        for depth in range(1, len(parts) + 1):
            found = ".".join(parts[:depth])
            spec = self._spec(found, within)
            if spec is None:
                return None
            if spec.origin is None and spec.submodule_search_locations is not None:
                within = list(spec.submodule_search_locations)  # a folder without __init__.py
                continue
            return self._unit(found, spec)
        return None

    def _spec(self, name: str, within: Sequence[str] | None) -> ModuleSpec | None:
        if within is None and self._first:
            spec = PathFinder.find_spec(name, self._first)
            if spec is not None and spec.origin is not None:
                return spec
        module = sys.modules.get(name)
        if module is not None:
            return spec_of(module)
        try:
            if within is None:
                return importlib.util.find_spec(name)
            return PathFinder.find_spec(name, within)
        except Exception:  # finders may raise anything; what is not found here cannot be needed
            return None

    def _unit(self, name: str, spec: ModuleSpec) -> Unit | None:
        is_package = spec.submodule_search_locations is not None
        origin = spec.origin
        if origin in ("built-in", "frozen") or (origin and _is_installed_file(origin)):
            return None
        if origin is not None:
            origin = os.path.abspath(origin)
        loader = spec.loader
        archive = loader.archive if isinstance(loader, zipimport.zipimporter) else None
        if origin is not None and self._is_sent(archive or origin):
            return None
        if archive is not None:
            raise CannotTravelError(name, f"is in a zip file ({archive})")
        if origin is None or not os.path.isfile(origin):
            raise CannotTravelError(name, "was not loaded from a file")
        unit = Unit(name, origin, is_package)
        if _is_recorded(str(unit.base), name.partition(".")[0]):
            return None
        if name in sys.stdlib_module_names:
            raise CannotTravelError(name, "has the name of a standard library module")
        if origin.endswith(tuple(EXTENSION_SUFFIXES)):
            raise CannotTravelError(name, f"is a compiled extension ({origin})")
        inside = f"{unit.relative}/__init__" if is_package else unit.relative
        if not origin.startswith(os.path.join(unit.base, *inside.split("/"))):
            raise CannotTravelError(name, f"was loaded from {origin}, a file with a different name")
        return unit

    def _is_sent(self, place: str) -> bool:
        folders = tuple(f"{each}{os.sep}" for each in self._sent)
        return place.startswith(folders) or Path(place).name in self._sent


def spec_of(module: types.ModuleType) -> ModuleSpec | None:
    """How a module was found, even if it was loaded by hand from a file."""
    spec: ModuleSpec | None = getattr(module, "__spec__", None)
    if spec is not None:
        return spec
    file = getattr(module, "__file__", None)
    is_package = hasattr(module, "__path__")
    return ModuleSpec(module.__name__, None, origin=file, is_package=is_package)


@functools.lru_cache(maxsize=4096)
def _is_installed_file(origin: str) -> bool:
    if INSTALLED.search(origin):
        return True
    return os.path.realpath(origin).startswith(_STANDARD)


def _is_recorded(base: str, top: str) -> bool:
    """Whether pip installed a package into a folder of the user's choice (``--target``)."""
    try:
        return top in _recorded(base, os.stat(base).st_mtime_ns)
    except OSError:
        return False


@functools.lru_cache(maxsize=64)
def _recorded(base: str, changed: int) -> frozenset[str]:
    lines: list[str] = []
    for record in Path(base).glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError):  # one that cannot be read says nothing of the others
            lines += record.read_text(errors="replace").splitlines()
    return frozenset(re.split(r"[,/.]", line, maxsplit=1)[0] for line in lines)
