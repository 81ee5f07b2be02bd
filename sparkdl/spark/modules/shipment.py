"""What is sent: what both ends have to agree on, and nothing that is slow to import.

A task that only starts other processes imports this, and must not import torch for it.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, NamedTuple

from pyspark import Broadcast


class Shipped(NamedTuple):
    """A module or package on its way.

    Attributes:
        name: its dotted name.
        relative: its file or folder, relative to where Python looks for it.
        base: where Python looks for it on the driver; None if it is in an archive.
    """

    name: str
    relative: str
    base: str | None


class Shipment(NamedTuple):
    """The user's own modules, as a task receives them.

    Attributes:
        digest: the digest of all their files.
        units: the modules and packages.
        archive: the zip file with them; None if there are none.
        left_out: what had to stay, and why.
    """

    digest: str
    units: tuple[Shipped, ...]
    archive: Broadcast[bytes] | None
    left_out: tuple[tuple[str, str], ...]

    def plain(self) -> tuple[Any, ...]:
        """The same as plain values, for a Python that may lack this package."""
        return (self.digest, tuple(map(tuple, self.units)), self.archive, self.left_out)

    @classmethod
    def of(cls, plain: tuple[Any, ...] | None) -> Shipment | None:
        """The shipment made from plain values; None from None."""
        if plain is None:
            return None
        digest, units, archive, left_out = plain
        return cls(digest, tuple(Shipped(*unit) for unit in units), archive, left_out)


def is_plain(path: str) -> bool:
    """Whether a path stays below where it starts, on every operating system."""
    pure = PurePosixPath(path)
    return (
        bool(path)
        and not pure.is_absolute()
        and ".." not in pure.parts
        and str(pure) == path
        and path.isprintable()
        and not set(path) & set('\\:*?"<>|')
    )
