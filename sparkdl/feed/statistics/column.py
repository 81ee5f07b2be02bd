"""What is found in one column of a worker's rows, and where, in words that can be found again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sparkdl.protocols import ColumnSpec

T = TypeVar("T")

COUNTS = ("nulls", "null_elements", "fractions", "broken", "not_finite", "out_of_range")
EXTREMES: dict[str, Callable[..., float]] = {
    "shortest": min,
    "longest": max,
    "smallest": min,
    "largest": max,
    "least": min,
}


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
        least: the smallest number above 0, looked for among weights only; None if there is none.
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
    least: float | None = None
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
        return in_words(self.places[name])


def _extreme(choose: Callable[[T, T], T], a: T | None, b: T | None) -> T | None:
    """One of two numbers; NaN if either is, which ``min`` and ``max`` see only in first place."""
    if a is None or b is None:
        return b if a is None else a
    return choose(b, a) if b != b else choose(a, b)  # noqa: PLR0124 - is it NaN?


RowLocation = tuple[int, int]
"""Where a row is: (partition, position in it), both counted from 0."""
_IN_WORDS = re.compile(r"\brow (\d+) of partition (\d+)\b")


def names_places(message: str) -> bool:
    """Whether a message about rows says where they are."""
    return _IN_WORDS.search(message) is not None


def with_places(message: str, translate: Callable[[RowLocation], RowLocation]) -> str:
    """A message about rows, with each of the places in it translated."""
    return _IN_WORDS.sub(lambda found: in_words(translate((int(found[2]), int(found[1])))), message)


def in_words(place: RowLocation) -> str:
    """Where a row is, as messages say it."""
    partition, row = place
    return f"row {row} of partition {partition}"
