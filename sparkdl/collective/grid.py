"""Workers in rows and columns, for those that divide work within rows and add up over columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """The workers, each a rank, in rows and columns.

    Attributes:
        world_size: how many there are.
        width: how many are in a row, a divisor of ``world_size``.
    """

    world_size: int
    width: int

    @classmethod
    def of(cls, world_size: int, fraction: float) -> Grid:
        """The grid whose rows have about this fraction of all workers.

        Args:
            world_size: workers.
            fraction: in (0, 1]; the width is the divisor of the number of workers that comes
                closest, the larger of two.
        """
        widths = [width for width in range(world_size, 0, -1) if world_size % width == 0]
        return cls(world_size, min(widths, key=lambda width: abs(width - fraction * world_size)))

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The ranks of each row."""
        starts = range(0, self.world_size, self.width)
        return [tuple(range(start, start + self.width)) for start in starts]

    @property
    def columns(self) -> list[tuple[int, ...]]:
        """The ranks of each column."""
        starts = range(self.width)
        return [tuple(range(start, self.world_size, self.width)) for start in starts]
