"""What is sent: what the two ends have to agree on, and nothing that an executor has to wait for.

A task that only starts other processes reads this, and must not import torch for it.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, NamedTuple

from pyspark import Broadcast


class Shipped(NamedTuple):
    """A module or package on its way.

    Attributes:
        name: dotted.
        relative: its file or folder, as seen from where Python looks for it.
        base: where Python looks for it on the driver; None for what is in an archive.
    """

    name: str
    relative: str
    base: str | None


class Shipment(NamedTuple):
    """Modules of the user's own, as a task receives them.

    Attributes:
        digest: of all their files.
        units: the modules and packages.
        archive: the zip file with them; None if there are none.
        left_out: what had to stay, with the reasons.
    """

    digest: str
    units: tuple[Shipped, ...]
    archive: Broadcast[bytes] | None
    left_out: tuple[tuple[str, str], ...]

    def plain(self) -> tuple[Any, ...]:
        """The same of plain values, for a Python that may lack this package."""
        return (self.digest, tuple(map(tuple, self.units)), self.archive, self.left_out)

    @classmethod
    def of(cls, plain: tuple[Any, ...] | None) -> Shipment | None:
        """The shipment of plain values; None of None."""
        if plain is None:
            return None
        digest, units, archive, left_out = plain
        return cls(digest, tuple(Shipped(*unit) for unit in units), archive, left_out)


def is_plain(path: str) -> bool:
    """Whether a path leads to below where it begins, on every system."""
    pure = PurePosixPath(path)
    return (
        bool(path)
        and not pure.is_absolute()
        and ".." not in pure.parts
        and str(pure) == path
        and path.isprintable()
        and not set(path) & set('\\:*?"<>|')
    )
