"""What a worker's rows look like, found while they arrive and told to the driver before step one.

A null, arrays of two lengths or a label out of range are known to the driver, with their counts
over all workers, before anybody trains; the rows are read once for that and for training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from sparkdl.feed.fingerprint import MODULUS
from sparkdl.protocols import ColumnSpec

T = TypeVar("T")

RowLocation = tuple[int, int]
"""Where a row is: (partition, position in it), both counted from 0."""


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """What was found in one column.

    Attributes:
        nulls: rows that are null.
        null_elements: rows whose array holds a null.
        fractions: rows whose number is not whole; counted where integers are wanted.
        broken: rows that cannot be decoded, or have another length than was declared.
        not_finite: rows that hold NaN or infinity.
        out_of_range: rows with a finite number that the tensor's dtype cannot hold.
        shortest: elements of the shortest array; None for numbers.
        longest: elements of the longest array; None for numbers.
        smallest: the smallest number, NaN if there is one; None for arrays of anything but
            integers, whose range is not looked for.
        largest: the largest number, NaN and None as above.
        reason: what is wrong with the first broken row.
        places: by the name of a count its first row, by the name of an extreme a row that has it.
    """

    nulls: int = 0
    null_elements: int = 0
    fractions: int = 0
    broken: int = 0
    not_finite: int = 0
    out_of_range: int = 0
    shortest: int | None = None
    longest: int | None = None
    smallest: float | None = None
    largest: float | None = None
    reason: str | None = field(default=None, compare=False, repr=False)
    places: Mapping[str, RowLocation] = field(default_factory=dict, compare=False, repr=False)

    @property
    def sound(self) -> bool:
        """Whether the column can be one tensor."""
        return self._readable and self.shortest == self.longest

    def can_become(self, spec: ColumnSpec) -> bool:
        """Whether the column can be fed as it is to be, which may be padded."""
        return self.sound or (self._readable and spec.padding is not None)

    @property
    def _readable(self) -> bool:
        return not (self.nulls or self.null_elements or self.broken)

    def __add__(self, other: ColumnStatistics) -> ColumnStatistics:
        extremes: dict[str, Any] = {
            name: _extreme(choose, getattr(self, name), getattr(other, name))
            for name, choose in EXTREMES.items()
        }
        places = {**other.places, **self.places}
        for name, value in extremes.items():
            theirs = getattr(other, name)
            # Compared as text, in which NaN equals itself.
            if name in other.places and str(value) != str(getattr(self, name)):
                assert str(value) == str(theirs)
                places[name] = other.places[name]
        return ColumnStatistics(
            **{name: getattr(self, name) + getattr(other, name) for name in COUNTS},
            **extremes,
            reason=self.reason if self.reason is not None else other.reason,
            places=places,
        )

    def where(self, name: str) -> str:
        """Where the row of a count or an extreme is, in words; empty if nobody looked."""
        if name not in self.places:
            return ""
        return _in_words(self.places[name])


def names_places(message: str) -> bool:
    """Whether a message about rows says where they are."""
    return _IN_WORDS.search(message) is not None


def with_places(message: str, translate: Callable[[RowLocation], RowLocation]) -> str:
    """A message about rows, with each of the places in it translated."""
    return _IN_WORDS.sub(
        lambda found: _in_words(translate((int(found[2]), int(found[1])))), message
    )


def _in_words(place: RowLocation) -> str:
    partition, row = place
    return f"row {row} of partition {partition}"


_IN_WORDS = re.compile(r"\brow (\d+) of partition (\d+)\b")

COUNTS = ("nulls", "null_elements", "fractions", "broken", "not_finite", "out_of_range")
EXTREMES: dict[str, Callable[..., float]] = {
    "shortest": min,
    "longest": max,
    "smallest": min,
    "largest": max,
}


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """What was found in the rows of one worker.

    Attributes:
        rows: how many there are to train on.
        columns: statistics of each column, in the order of the feed's schema.
        held_out: how many more there are to validate with.
        weight: the sum of the weights of those to train on; 0 without weights.
        complete: whether those are all its rows.
        fingerprint: of the rows to train on; see ``fingerprint``.
        held_out_fingerprint: of those to validate with.
        opening: of the first block, if rows are trained on while others arrive.
    """

    rows: int
    columns: tuple[ColumnStatistics, ...]
    held_out: int = 0
    weight: float = 0.0
    complete: bool = True
    fingerprint: int = 0
    held_out_fingerprint: int = 0
    opening: int | None = None


@dataclass(frozen=True, slots=True)
class DataStatistics:
    """What all workers found together.

    Attributes:
        shard_rows: rows of each worker to train on, by rank.
        columns: statistics of each column, in the order of the feed's schema.
        held_out: rows of all workers to validate with.
        weight: the sum of the weights of all rows to train on; 0 without weights.
        pending: the ranks that have more rows, of which nothing is known yet.
        fingerprint: of the rows of all workers to train on; see ``fingerprint``.
        held_out_fingerprint: of those to validate with.
        openings: of the first block of each worker's rows, by rank; none if all rows were read
            before the first was trained on.
    """

    shard_rows: tuple[int, ...]
    columns: tuple[ColumnStatistics, ...]
    held_out: int = 0
    weight: float = 0.0
    pending: tuple[int, ...] = ()
    fingerprint: int = 0
    held_out_fingerprint: int = 0
    openings: tuple[int | None, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether those are all rows."""
        return not self.pending

    @property
    def mean_weight(self) -> float:
        """Of all rows to train on; 1 without weights."""
        return self.weight / self.rows if self.weight else 1.0

    def lasting(self) -> dict[str, Any]:
        """What is the same when the rows are read again, as JSON: all but where something was.

        A shuffle delivers them in any order. Of rows that are not complete, it is how they begin.
        """
        if not self.complete:
            return {"openings": list(self.openings)}
        fields = asdict(self)
        del fields["pending"]
        for column in fields["columns"]:
            del column["places"], column["reason"]
        return fields

    @property
    def rows(self) -> int:
        """Rows of all workers to train on."""
        return sum(self.shard_rows)

    @classmethod
    def of(cls, shards: Sequence[ShardStatistics]) -> DataStatistics:
        """Put the workers' findings together.

        Args:
            shards: one a worker, by rank.
        """
        columns = zip(*(shard.columns for shard in shards), strict=True)
        openings = tuple(shard.opening for shard in shards)
        return cls(
            tuple(shard.rows for shard in shards),
            tuple(sum(statistics, ColumnStatistics()) for statistics in columns),
            sum(shard.held_out for shard in shards),
            sum(shard.weight for shard in shards),
            tuple(rank for rank, shard in enumerate(shards) if not shard.complete),
            sum(shard.fingerprint for shard in shards) % MODULUS,
            sum(shard.held_out_fingerprint for shard in shards) % MODULUS,
            openings if any(each is not None for each in openings) else (),
        )


def _extreme(choose: Callable[[T, T], T], a: T | None, b: T | None) -> T | None:
    """One of two numbers; NaN, which ``min`` and ``max`` see only in first place, if either is."""
    if a is None or b is None:
        return b if a is None else a
    return choose(b, a) if b != b else choose(a, b)
