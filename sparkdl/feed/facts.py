"""What a worker's rows look like, found while they arrive and told to the driver before step one.

A null, arrays of two lengths or a label out of range are known to the driver, with their counts
over all workers, before anybody trains; the rows are read once for that and for training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.errors import DataError
from sparkdl.protocols import ColumnSpec

T = TypeVar("T")

NO_ROWS = "the DataFrame is empty: there is nothing to train on"


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """What was found in one column.

    Attributes:
        nulls: rows that are null.
        null_elements: rows whose array holds a null.
        fractions: rows whose number is not whole; counted where integers are wanted.
        shortest: elements of the shortest array; None for numbers.
        longest: elements of the longest array; None for numbers.
        smallest: the smallest number, NaN if there is one; None for arrays of anything but
            integers, which are not looked into.
        largest: the largest number, NaN and None as above.
    """

    nulls: int = 0
    null_elements: int = 0
    fractions: int = 0
    shortest: int | None = None
    longest: int | None = None
    smallest: float | None = None
    largest: float | None = None

    @property
    def sound(self) -> bool:
        """Whether the column can be one tensor."""
        return not self.nulls and not self.null_elements and self.shortest == self.longest

    def __add__(self, other: ColumnFacts) -> ColumnFacts:
        return ColumnFacts(
            nulls=self.nulls + other.nulls,
            null_elements=self.null_elements + other.null_elements,
            fractions=self.fractions + other.fractions,
            shortest=_extreme(min, self.shortest, other.shortest),
            longest=_extreme(max, self.longest, other.longest),
            smallest=_extreme(min, self.smallest, other.smallest),
            largest=_extreme(max, self.largest, other.largest),
        )


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What was found in the rows of one worker.

    Attributes:
        rows: how many there are.
        columns: facts of each column, in the order of the feed's schema.
    """

    rows: int
    columns: tuple[ColumnFacts, ...]


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What all workers found together.

    Attributes:
        shard_rows: rows of each worker, by rank.
        columns: facts of each column, in the order of the feed's schema.
    """

    shard_rows: tuple[int, ...]
    columns: tuple[ColumnFacts, ...]

    @property
    def rows(self) -> int:
        """Rows of all workers."""
        return sum(self.shard_rows)

    @classmethod
    def of(cls, shards: Sequence[ShardFacts]) -> DataFacts:
        """Put the workers' findings together.

        Args:
            shards: one a worker, by rank.
        """
        columns = zip(*(shard.columns for shard in shards), strict=True)
        return cls(
            tuple(shard.rows for shard in shards),
            tuple(sum(facts, ColumnFacts()) for facts in columns),
        )


def look_at(values: pa.Array, spec: ColumnSpec) -> ColumnFacts:
    """Look at one column of one record batch.

    Args:
        values: numbers, or lists of numbers.
        spec: what the column becomes.
    """
    nulls = values.null_count
    if not len(values) - nulls:
        return ColumnFacts(nulls=nulls)
    if not spec.is_array:
        numbers = _numpy(values)
        fractions = 0
        if numbers.dtype.kind == "f" and not spec.dtype.is_floating_point:
            fractions = int(np.count_nonzero(numbers != np.floor(numbers)))
        smallest, largest = _range(numbers)
        return ColumnFacts(nulls=nulls, fractions=fractions, smallest=smallest, largest=largest)
    values = values.drop_null() if nulls else values  # a null may have elements of its own
    lengths = _numpy(values.value_lengths())
    elements = values.flatten()
    null_elements = 0
    if elements.null_count:
        parents = pc.list_parent_indices(values).filter(elements.is_null())
        null_elements = len(pc.unique(parents))
    look_inside = pa.types.is_integer(elements.type) and len(elements) > elements.null_count
    smallest, largest = _range(_numpy(elements)) if look_inside else (None, None)
    return ColumnFacts(
        nulls=nulls,
        null_elements=null_elements,
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        smallest=smallest,
        largest=largest,
    )


def check_facts(facts: DataFacts, columns: Iterable[ColumnSpec]) -> None:
    """Refuse data that cannot be trained on.

    Args:
        facts: what the workers found.
        columns: the columns that were looked at.

    Raises:
        DataError: no rows, fewer rows than workers, nulls, or arrays of unequal length.
    """
    if facts.rows == 0:
        raise DataError(NO_ROWS)
    for found, spec in zip(facts.columns, columns, strict=True):
        _check_column(found, spec.name, facts.rows)
    workers = len(facts.shard_rows)
    if facts.rows < workers:
        raise DataError(
            f"the DataFrame has {facts.rows} rows, fewer than the {workers} workers. "
            f"Set numWorkers to at most {facts.rows}"
        )


def _check_column(found: ColumnFacts, name: str, rows: int) -> None:
    if found.nulls:
        raise DataError(
            f"column '{name}' has {found.nulls} null values in {rows} rows. Drop or "
            "fill them first: df.na.drop(subset=[...]) / df.na.fill({...})"
        )
    if found.null_elements:
        raise DataError(
            f"column '{name}' has null elements inside its arrays in {found.null_elements} "
            f"of {rows} rows. Fill them first, for example with "
            "F.transform(col, lambda x: F.coalesce(x, F.lit(0)))"
        )
    if found.shortest != found.longest:
        raise DataError(
            f"column '{name}' holds arrays of {found.shortest} to {found.longest} elements; "
            "every row must have the same number. Pad or cut them first, or find the odd rows "
            f"with df.groupBy(F.size('{name}')).count()"
        )
    if found.longest == 0:
        raise DataError(f"column '{name}' holds only empty arrays: there is nothing to feed")


def _numpy(values: pa.Array) -> np.ndarray:
    """The values that are not null, a view where Arrow's memory allows."""
    present = values.drop_null() if values.null_count else values
    numbers: np.ndarray = present.to_numpy(zero_copy_only=False)
    return numbers.view(np.uint8) if numbers.dtype == np.bool_ else numbers


def _range(numbers: np.ndarray) -> tuple[float | None, float | None]:
    return numbers.min().item(), numbers.max().item()


def _extreme(choose: Callable[[T, T], T], a: T | None, b: T | None) -> T | None:
    """One of two numbers; NaN, which ``min`` and ``max`` see only in first place, if either is."""
    if a is None or b is None:
        return b if a is None else a
    return choose(b, a) if b != b else choose(a, b)
