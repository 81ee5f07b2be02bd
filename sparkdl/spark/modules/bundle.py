"""All of the user's own modules that some names need, found by following imports."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass

from sparkdl.spark.modules.shipment import is_plain
from sparkdl.spark.modules.texts import Texts, UnitFiles
from sparkdl.spark.modules.units import CannotTravelError, Finder, Unit

_ANY_DAY = (1980, 1, 1, 0, 0, 0)
"""A fixed date, so that the same files make the same bytes."""


@dataclass(frozen=True)
class Bundle:
    """What is to travel.

    Attributes:
        units: the units, by name.
        files: contents by path, relative to where Python is to look, with slashes.
        left_out: the reasons why modules have to stay, by name.
        too_large: data files that stay.
    """

    units: dict[str, Unit]
    files: dict[str, bytes]
    left_out: dict[str, str]
    too_large: tuple[str, ...]

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


def collect(
    names: Iterable[str], finder: Finder, texts: Texts, *, refuse_edited: bool = False
) -> Bundle:
    """Find the units that some names belong to, and what those import in turn.

    Args:
        names: dotted names of modules or of things defined in modules.
        finder: finds the units.
        texts: reads them.
        refuse_edited: as for ``Texts.read``.

    Raises:
        ConfigError: a module's text has changed since it was imported.
    """
    units: dict[str, Unit] = {}
    files: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    too_large: list[str] = []
    waiting = list(names)
    known = set(waiting)
    for name in waiting:
        if name.partition(".")[0] in left_out:
            continue
        try:
            unit = finder.unit_of(name)
            if unit is None or unit.name in units:
                continue
            read = _checked(unit, texts.read(unit, refuse_edited=refuse_edited))
        except CannotTravelError as error:
            left_out[error.name] = error.reason
            continue
        units[unit.name] = unit
        files |= read.files
        too_large += read.too_large
        waiting += sorted(read.imports - known)
        known |= read.imports
    return Bundle(units, files, left_out, tuple(too_large))


def _checked(unit: Unit, read: UnitFiles) -> UnitFiles:
    odd = [path for path in read.files if not is_plain(path)]
    if not odd:
        return read
    if any(path.endswith(".py") for path in odd):
        raise CannotTravelError(unit.name, f"has a file with an unusual name ({odd[0]!r})")
    kept = {path: content for path, content in read.files.items() if path not in odd}
    return UnitFiles(kept, read.imports, (*read.too_large, *map(repr, odd)))
