"""Rows to validate with, chosen by what is in them."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F

from sparkdl.spark.rows.columns import InputColumn


@dataclass(frozen=True, slots=True)
class HeldOutFraction(InputColumn):
    """A column of booleans that no DataFrame has: true for a fraction of its rows.

    A row's side follows from its content and a seed, and from nothing else: it is the same in
    whatever partitions and order the rows come, for every number of workers and in every later fit.
    Rows of the same content are on the same side.

    Attributes:
        content: the columns by which a row is told from others.
        fraction: of the rows, 0 < fraction < 1.
        seed: of the choice.
    """

    content: tuple[InputColumn, ...] = ()
    fraction: float = 0.0
    seed: int = 0

    def expression(self) -> Column:
        """Whether the row's hash, any of 2^64 numbers, is among the lowest."""
        # Of another kind than the hash by which rows are ordered, whose seed comes first.
        hashed = F.xxhash64(
            F.lit("held out"), F.lit(self.seed), *[column.expression() for column in self.content]
        )
        return hashed < F.lit(round((self.fraction - 0.5) * (1 << 64)))


def held_out_fraction(
    content: tuple[InputColumn, ...], fraction: float, seed: int
) -> HeldOutFraction:
    """The column that holds a fraction of the rows out.

    Args:
        content: the columns by which a row is told from others.
        fraction: of the rows, 0 < fraction < 1.
        seed: of the choice.
    """
    return HeldOutFraction(
        name=f"validationFraction={fraction:g}",
        type_name="boolean",
        integral=True,
        content=content,
        fraction=fraction,
        seed=seed,
    )
