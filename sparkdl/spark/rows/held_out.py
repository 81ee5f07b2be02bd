"""Rows to validate with, chosen by their content."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F

from sparkdl.spark.rows.columns import InputColumn


@dataclass(frozen=True, slots=True)
class HeldOutFraction(InputColumn):
    """A column of booleans that no DataFrame has: true for a fraction of its rows.

    A row's side depends on its content and a seed, and on nothing else: it is the same whatever
    the rows' partitions and order, for every number of workers and in every later fit. Rows of the
    same content are on the same side.

    Attributes:
        content: the columns that tell one row from another.
        fraction: the fraction of rows held out, 0 < fraction < 1.
        seed: determines the choice.
    """

    content: tuple[InputColumn, ...] = ()
    fraction: float = 0.0
    seed: int = 0

    def expression(self) -> Column:
        """Whether the row's hash, one of 2^64 numbers, is among the lowest."""
        # Differs from the hash by which rows are ordered, where the seed comes first.
        hashed = F.xxhash64(
            F.lit("held out"), F.lit(self.seed), *[column.expression() for column in self.content]
        )
        return hashed < F.lit(round((self.fraction - 0.5) * (1 << 64)))


def held_out_fraction(
    content: tuple[InputColumn, ...], fraction: float, seed: int
) -> HeldOutFraction:
    """The column that holds a fraction of the rows out.

    Args:
        content: the columns that tell one row from another.
        fraction: the fraction of rows to hold out, 0 < fraction < 1.
        seed: determines the choice.
    """
    return HeldOutFraction(
        name=f"validationFraction={fraction:g}",
        type_name="boolean",
        integral=True,
        content=content,
        fraction=fraction,
        seed=seed,
    )
