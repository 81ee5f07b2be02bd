"""What is found in one column of a worker's rows, while they are read, and where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sparkdl.encodings.encoding import numpy_of
from sparkdl.feed.conversion import all_within, beyond, fractions, holds_all
from sparkdl.feed.decode import Decoded
from sparkdl.feed.packed import POSITION_BITS
from sparkdl.protocols import ColumnSpec

T = TypeVar("T")

COUNTS = ("nulls", "null_elements", "fractions", "broken", "not_finite", "out_of_range", "skipped")
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
        skipped: rows that are left out, because their value cannot be used; not counted otherwise.
        shortest: elements of the shortest array; None for numbers.
        longest: elements of the longest array; None for numbers.
        smallest: the smallest number, NaN if there is one; None for arrays of anything but
            integers, whose range is not looked for.
        largest: the largest number, NaN and None as above.
        least: the smallest number above 0, looked for among weights only; None if there is none.
        reason: what is wrong with the first broken row.
        skip_reason: what is wrong with the first of those that are left out.
        places: by the name of a count its first row, by the name of an extreme a row that has it.
    """

    nulls: int = 0
    null_elements: int = 0
    fractions: int = 0
    broken: int = 0
    not_finite: int = 0
    out_of_range: int = 0
    skipped: int = 0
    shortest: int | None = None
    longest: int | None = None
    smallest: float | None = None
    largest: float | None = None
    least: float | None = None
    reason: str | None = field(default=None, compare=False, repr=False)
    skip_reason: str | None = field(default=None, compare=False, repr=False)
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
        # Which worker has read which partition may differ from run to run.
        places |= {
            name: min(places[name], other.places[name]) for name in COUNTS if name in other.places
        }
        for name, value in extremes.items():
            theirs = getattr(other, name)
            # Compared as text, in which NaN equals itself.
            if name in other.places and str(value) != str(getattr(self, name)):
                assert str(value) == str(theirs)
                places[name] = other.places[name]
        return ColumnStatistics(
            **{name: getattr(self, name) + getattr(other, name) for name in COUNTS},
            **extremes,
            reason=self._first(other, "broken", "reason"),
            skip_reason=self._first(other, "skipped", "skip_reason"),
            places=places,
        )

    def _first(self, other: ColumnStatistics, count: str, reason: str) -> str | None:
        """What is wrong with the first row of a count, of these rows and others."""
        mine: str | None = getattr(self, reason)
        theirs: str | None = getattr(other, reason)
        known = count in self.places and count in other.places
        if mine is None or (known and other.places[count] < self.places[count]):
            return theirs
        return mine

    def where(self, name: str) -> str:
        """Where the row of a count or an extreme is, in words; empty if nobody looked."""
        return in_words(self.places[name]) if name in self.places else ""


def _extreme(choose: Callable[[T, T], T], a: T | None, b: T | None) -> T | None:
    """One of two numbers; NaN if either is, which ``min`` and ``max`` see only in first place."""
    if a is None or b is None:
        return b if a is None else a
    return choose(b, a) if b != b else choose(a, b)  # noqa: PLR0124 - is it NaN?


RowLocation = tuple[int, int]
"""Where a row is: (partition, position in it), both counted from 0."""


def places_from(partition: int, first: int, rows: int) -> np.ndarray:
    """The places of rows that follow one another, as ``PLACE_COLUMN`` has them."""
    start = (partition << POSITION_BITS) + first
    return np.arange(start, start + rows)


def located(place: int) -> RowLocation:
    """Where a row is, by its value in ``PLACE_COLUMN``."""
    return divmod(place, 1 << POSITION_BITS)


def in_words(place: RowLocation) -> str:
    """Where a row is, as messages say it."""
    partition, row = place
    return f"row {row} of partition {partition}"


def scan(
    column: pa.Array | Decoded,
    spec: ColumnSpec,
    places: np.ndarray | None = None,
    *,
    is_weight: bool = False,
) -> ColumnStatistics:
    """Look at one column of one record batch.

    Args:
        column: its values.
        spec: what it becomes.
        places: of all rows of the record batch, as in ``PLACE_COLUMN``; None if they are the first
            of partition 0.
        is_weight: whether to look for the smallest number above 0.
    """
    decoded = column if isinstance(column, Decoded) else Decoded(column)
    values, rows = decoded.values, decoded.rows
    found = _Finder(places, rows)
    if decoded.broken is not None:
        found.count("broken", decoded.broken.rows, among_all=True)
    if values.null_count:
        missing = numpy_of(values.is_null()).astype(bool)
        found.count("nulls", np.flatnonzero(missing))
        found.rows = np.flatnonzero(~missing) if rows is None else rows[~missing]
        values = values.drop_null()  # a null may have elements of its own
    if len(values) and spec.is_array:
        _scan_arrays(values, spec, found)
    elif len(values):
        _scan_numbers(numbers := numpy_of(values), spec, found)
        above = np.flatnonzero(numbers > 0) if is_weight else np.empty(0, np.int64)
        if len(above):
            row = int(above[numbers[above].argmin()])
            found.extreme("least", numbers[row].item(), row)
    reason = decoded.broken.reason if decoded.broken is not None else found.reason
    return ColumnStatistics(**found.statistics, reason=reason, places=found.places)


def _all_fit(numbers: np.ndarray, dtype: torch.dtype) -> bool:
    """Whether fractions, looked at without their extremes, are surely finite and in range."""
    if not holds_all(dtype, numbers.dtype):
        return all_within(numbers.min(), numbers.max(), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        # One pass: the sum is finite only if every number is, but for overflow.
        return bool(np.isfinite(numbers.sum()))


class _Finder:
    """Collects the statistics of one record batch, and where they were found."""

    def __init__(self, places: np.ndarray | None, rows: np.ndarray | None) -> None:
        self.rows = rows
        """Where the rows that are looked at are in the record batch; None if all are there."""
        self._places = places
        self.statistics: dict[str, Any] = {}
        self.places: dict[str, RowLocation] = {}
        self.reason: str | None = None

    def count(self, name: str, found: np.ndarray, *, among_all: bool = False) -> None:
        if len(found):
            self.statistics[name] = self.statistics.get(name, 0) + len(found)
            place = self._place(int(found[0]), among_all=among_all)
            self.places.setdefault(name, place)

    def extreme(self, name: str, value: int | float, row: int) -> None:
        self.statistics[name] = value
        self.places[name] = self._place(row)

    def _place(self, row: int, *, among_all: bool = False) -> RowLocation:
        row = row if among_all or self.rows is None else int(self.rows[row])
        return (0, row) if self._places is None else located(int(self._places[row]))


def _scan_numbers(
    numbers: np.ndarray, spec: ColumnSpec, found: _Finder, parents: _Parents | None = None
) -> None:
    """Look at a column's numbers, or at those in its arrays; of floats there not the extremes."""
    if parents is None or numbers.dtype.kind in "iub":
        # numpy's argmin and argmax take NaN for the smallest and for the largest.
        places = {"smallest": int(numbers.argmin()), "largest": int(numbers.argmax())}
        for name, place in places.items():
            row = place if parents is None else parents.row(place)
            found.extreme(name, numbers[place].item(), row)
        low, high = (found.statistics[name] for name in places)
        sound = all_within(low, high, spec.dtype) and bool(np.isfinite([low, high]).all())
    else:
        sound = spec.dtype.is_floating_point and _all_fit(numbers, spec.dtype)
    wrongs = {} if sound else {"not_finite": ~np.isfinite(numbers)}
    if not sound:
        wrongs["out_of_range"] = beyond(numbers, spec.dtype)
    if numbers.dtype.kind == "f" and not spec.dtype.is_floating_point:
        wrongs["fractions"] = fractions(numbers)
    for name, wrong in wrongs.items():
        if wrong.any():
            rows = np.flatnonzero(wrong) if parents is None else np.unique(parents.rows()[wrong])
            found.count(name, rows)


def _scan_arrays(values: pa.Array, spec: ColumnSpec, found: _Finder) -> None:
    lengths = numpy_of(values.value_lengths())
    # What was decoded has the declared length.
    as_arrived = spec.encoding.is_decoded(values.type) and spec.elements is not None
    if as_arrived and (lengths != spec.elements).any():
        wrong = np.flatnonzero(lengths != spec.elements)
        found.reason = (
            f"has {lengths[wrong[0]]} elements, but the declared shape is {spec.row_shape}"
        )
        found.count("broken", wrong)
    for name, row in (("shortest", lengths.argmin()), ("longest", lengths.argmax())):
        found.extreme(name, int(lengths[row]), int(row))
    elements = values.flatten()
    if elements.null_count:
        parents = numpy_of(pc.list_parent_indices(values).filter(elements.is_null()))
        found.count("null_elements", np.unique(parents))
    if len(elements) > elements.null_count and spec.encoding.numeric:
        _scan_numbers(numpy_of(elements), spec, found, _Parents(values, elements))


class _Parents:
    """The rows that the elements of arrays belong to, null elements left out."""

    def __init__(self, values: pa.Array, elements: pa.Array) -> None:
        self._values = values
        self._elements = elements

    def rows(self) -> np.ndarray:
        parents = pc.list_parent_indices(self._values)
        if self._elements.null_count:
            parents = parents.filter(self._elements.is_valid())
        return numpy_of(parents)

    def row(self, element: int) -> int:
        if not self._elements.null_count:
            ends = np.cumsum(numpy_of(self._values.value_lengths()))
            return int(np.searchsorted(ends, element, side="right"))
        return int(self.rows()[element])
