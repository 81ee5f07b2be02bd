"""Which worker decomposes which factor, and which preconditions which layer, as in KAISA.

The workers stand in a grid (Pauloski et al. 2021, "KAISA: An Adaptive Second-Order Optimizer
Framework for Deep Neural Networks"). Each layer belongs to a row of it. The workers of that row
divide the decompositions of its layers among themselves, share the results, and each preconditions
the gradients of all these layers, which then go down the columns.

    fraction 1         COMM-OPT   one row: all have all decompositions, no gradient travels
    fraction 1 / P     MEM-OPT    one column: each has those of its layers, all gradients travel
    between            HYBRID     decompositions within rows, gradients within columns
"""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True)
class Shares:
    """Who does what.

    Attributes:
        row_of: by layer.
        decomposers: the rank that decomposes A, and the one that decomposes G, by layer.
    """

    row_of: dict[str, int]
    decomposers: dict[str, tuple[int, int]]


def assign(grid: Grid, sizes: Mapping[str, tuple[int, int]]) -> Shares:
    """Assign layers to rows and their decompositions to workers, the longest first.

    Args:
        grid: the workers.
        sizes: of A and G, by layer; a decomposition's cost is cubic in the size.
    """
    work = {name: a**3 + g**3 for name, (a, g) in sizes.items()}
    of_row = [0] * len(grid.rows)
    row_of: dict[str, int] = {}
    for name in sorted(work, key=lambda name: -work[name]):
        row = of_row.index(min(of_row))
        of_row[row] += work[name]
        row_of[name] = row
    jobs = [(size**3, name, k) for name, pair in sizes.items() for k, size in enumerate(pair)]
    of_rank = [0] * grid.world_size
    ranks: dict[tuple[str, int], int] = {}
    for cost, name, factor in sorted(jobs, key=lambda job: -job[0]):
        rank = min(grid.rows[row_of[name]], key=lambda rank: of_rank[rank])
        of_rank[rank] += cost
        ranks[name, factor] = rank
    return Shares(row_of, {name: (ranks[name, 0], ranks[name, 1]) for name in sizes})
