"""What a worker's rows look like, found while they arrive and told to the driver before step one.

A null, arrays of two lengths or a label out of range are known to the driver, with their counts
over all workers, before anybody trains; the rows are read once for that and for training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sparkdl.errors import DataError, TrainingError
from sparkdl.feed.decode import Decoded
from sparkdl.feed.fingerprint import MODULUS
from sparkdl.feed.lists import numpy_of
from sparkdl.feed.ranges import all_within, beyond, holds_all, limits
from sparkdl.protocols import ColumnSpec

T = TypeVar("T")

Place = tuple[int, int]
"""Where a row is: (partition, position in it), both counted from 0."""

NO_ROWS = "the DataFrame is empty: there is nothing to train on"


@dataclass(frozen=True, slots=True)
class ColumnFacts:
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
    places: Mapping[str, Place] = field(default_factory=dict, compare=False, repr=False)

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

    def __add__(self, other: ColumnFacts) -> ColumnFacts:
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
        return ColumnFacts(
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


def with_places(message: str, translate: Callable[[Place], Place]) -> str:
    """A message about rows, with each of the places in it translated."""
    return _IN_WORDS.sub(
        lambda found: _in_words(translate((int(found[2]), int(found[1])))), message
    )


def _in_words(place: Place) -> str:
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
class ShardFacts:
    """What was found in the rows of one worker.

    Attributes:
        rows: how many there are to train on.
        columns: facts of each column, in the order of the feed's schema.
        held_out: how many more there are to validate with.
        weight: the sum of the weights of those to train on; 0 without weights.
        complete: whether those are all its rows.
        fingerprint: of the rows to train on; see ``fingerprint``.
        held_out_fingerprint: of those to validate with.
        opening: of the first block, if rows are trained on while others arrive.
    """

    rows: int
    columns: tuple[ColumnFacts, ...]
    held_out: int = 0
    weight: float = 0.0
    complete: bool = True
    fingerprint: int = 0
    held_out_fingerprint: int = 0
    opening: int | None = None


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What all workers found together.

    Attributes:
        shard_rows: rows of each worker to train on, by rank.
        columns: facts of each column, in the order of the feed's schema.
        held_out: rows of all workers to validate with.
        weight: the sum of the weights of all rows to train on; 0 without weights.
        pending: the ranks that have more rows, of which nothing is known yet.
        fingerprint: of the rows of all workers to train on; see ``fingerprint``.
        held_out_fingerprint: of those to validate with.
        openings: of the first block of each worker's rows, by rank; none if all rows were read
            before the first was trained on.
    """

    shard_rows: tuple[int, ...]
    columns: tuple[ColumnFacts, ...]
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
    def of(cls, shards: Sequence[ShardFacts]) -> DataFacts:
        """Put the workers' findings together.

        Args:
            shards: one a worker, by rank.
        """
        columns = zip(*(shard.columns for shard in shards), strict=True)
        openings = tuple(shard.opening for shard in shards)
        return cls(
            tuple(shard.rows for shard in shards),
            tuple(sum(facts, ColumnFacts()) for facts in columns),
            sum(shard.held_out for shard in shards),
            sum(shard.weight for shard in shards),
            tuple(rank for rank, shard in enumerate(shards) if not shard.complete),
            sum(shard.fingerprint for shard in shards) % MODULUS,
            sum(shard.held_out_fingerprint for shard in shards) % MODULUS,
            openings if any(each is not None for each in openings) else (),
        )


def look_at(column: pa.Array | Decoded, spec: ColumnSpec, at: Place = (0, 0)) -> ColumnFacts:
    """Look at one column of one record batch.

    Args:
        column: numbers or lists of numbers; perhaps with rows that could not be decoded.
        spec: what the column becomes.
        at: the place of the record batch's first row.
    """
    decoded = column if isinstance(column, Decoded) else Decoded(column)
    values, rows = decoded.values, decoded.rows
    found = _Finder(at, rows)
    if decoded.broken is not None:
        found.count("broken", decoded.broken.rows, among_all=True)
    if values.null_count:
        missing = numpy_of(values.is_null()).astype(bool)
        found.count("nulls", np.flatnonzero(missing))
        found.rows = np.flatnonzero(~missing) if rows is None else rows[~missing]
        values = values.drop_null()  # a null may have elements of its own
    if len(values):
        _look_at_arrays(values, spec, found) if spec.is_array else _look_at_numbers(
            numpy_of(values), spec, found
        )
    reason = decoded.broken.reason if decoded.broken is not None else found.reason
    return ColumnFacts(**found.facts, reason=reason, places=found.places)


def says_nothing_new(column: Decoded, spec: ColumnSpec, known: ColumnFacts) -> bool:
    """Whether a look at one column of one record batch would surely change nothing that is known.

    Takes a fraction of the time of the look, and is true of most record batches but the first few.

    Args:
        column: numbers or lists of numbers.
        spec: what the column becomes.
        known: of the record batches before.
    """
    values = column.values
    if column.broken is not None or values.null_count or not len(values):
        return False
    if not known.can_become(spec):
        return False
    if spec.is_array:
        lengths = numpy_of(values.value_lengths())
        if known.shortest is None or known.longest is None:
            return False
        if lengths.min() < known.shortest or lengths.max() > known.longest:
            return False
        values = values.flatten()
        if values.null_count:
            return False
        if spec.encoding not in ("numbers", "vector", "matrix"):
            return True
    numbers = numpy_of(values)
    if not len(numbers):
        return False
    if known.smallest is None or known.largest is None:
        return spec.is_array and numbers.dtype.kind == "f" and _all_fit(numbers, spec.dtype)
    if numbers.dtype.kind == "f" and not spec.dtype.is_floating_point:
        return False  # there may be fractions
    # Comparisons with NaN are false; of an extreme that is out of range there may be more.
    return bool(
        all_within(known.smallest, known.largest, spec.dtype)
        and math.isfinite(known.smallest)
        and math.isfinite(known.largest)
        and known.smallest <= numbers.min()
        and numbers.max() <= known.largest
    )


def _all_fit(numbers: np.ndarray, dtype: torch.dtype) -> bool:
    """Whether fractions, looked at without their extremes, are surely finite and in range."""
    if not holds_all(dtype, numbers.dtype):
        return all_within(numbers.min(), numbers.max(), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        # One pass: the sum is finite only if every number is, but for overflow.
        return bool(np.isfinite(numbers.sum()))


class _Finder:
    """Collects the facts of one record batch, and where they were found."""

    def __init__(self, at: Place, rows: np.ndarray | None) -> None:
        self.rows = rows
        """Where the rows that are looked at are in the record batch; None if all are there."""
        self._at = at
        self.facts: dict[str, Any] = {}
        self.places: dict[str, Place] = {}
        self.reason: str | None = None

    def count(self, name: str, found: np.ndarray, *, among_all: bool = False) -> None:
        if len(found):
            self.facts[name] = self.facts.get(name, 0) + len(found)
            place = self._place(int(found[0]), among_all=among_all)
            self.places.setdefault(name, place)

    def extreme(self, name: str, value: int | float, row: int) -> None:
        self.facts[name] = value
        self.places[name] = self._place(row)

    def _place(self, row: int, *, among_all: bool = False) -> Place:
        partition, offset = self._at
        return partition, offset + (row if among_all or self.rows is None else int(self.rows[row]))


def _look_at_numbers(numbers: np.ndarray, spec: ColumnSpec, found: _Finder) -> None:
    # numpy's argmin and argmax take NaN for the smallest and for the largest.
    for name, row in (("smallest", numbers.argmin()), ("largest", numbers.argmax())):
        found.extreme(name, numbers[row].item(), int(row))
    if not all_within(found.facts["smallest"], found.facts["largest"], spec.dtype):
        found.count("out_of_range", np.flatnonzero(beyond(numbers, spec.dtype)))
    if numbers.dtype.kind != "f":
        return
    if not np.isfinite(found.facts["smallest"]) or not np.isfinite(found.facts["largest"]):
        found.count("not_finite", np.flatnonzero(~np.isfinite(numbers)))
    if not spec.dtype.is_floating_point:
        found.count("fractions", np.flatnonzero(numbers != np.floor(numbers)))


def _look_at_arrays(values: pa.Array, spec: ColumnSpec, found: _Finder) -> None:
    lengths = numpy_of(values.value_lengths())
    declared = spec.encoding == "numbers" and spec.elements is not None
    if declared and (lengths != spec.elements).any():
        wrong = np.flatnonzero(lengths != spec.elements)
        found.reason = f"has {lengths[wrong[0]]} elements, the declared {spec.row_shape}"
        found.count("broken", wrong)
    for name, row in (("shortest", lengths.argmin()), ("longest", lengths.argmax())):
        found.extreme(name, int(lengths[row]), int(row))
    elements = values.flatten()
    if elements.null_count:
        parents = numpy_of(pc.list_parent_indices(values).filter(elements.is_null()))
        found.count("null_elements", np.unique(parents))
    if len(elements) > elements.null_count and spec.encoding in ("numbers", "vector", "matrix"):
        _look_at_elements(numpy_of(elements), _Parents(values, elements), spec, found)


def _look_at_elements(
    numbers: np.ndarray, parents_of: _Parents, spec: ColumnSpec, found: _Finder
) -> None:
    if numbers.dtype.kind in "iub":
        for name, place in (("smallest", numbers.argmin()), ("largest", numbers.argmax())):
            found.extreme(name, numbers[place].item(), parents_of.row(int(place)))
        suspicious = not all_within(found.facts["smallest"], found.facts["largest"], spec.dtype)
    else:
        suspicious = not _all_fit(numbers, spec.dtype)
    if suspicious:
        for name, wrong in (
            ("not_finite", ~np.isfinite(numbers)),
            ("out_of_range", beyond(numbers, spec.dtype)),
        ):
            if wrong.any():
                found.count(name, np.unique(parents_of.rows()[wrong]))


class _Parents:
    """To which row the elements of arrays belong, the null ones left out."""

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


def check_facts(facts: DataFacts, columns: Sequence[ColumnSpec]) -> None:
    """Refuse data that cannot be trained on.

    Args:
        facts: what the workers found.
        columns: the columns that were looked at.

    Raises:
        DataError: nulls, or arrays of unequal length; of rows that are complete also none, or fewer
            than workers.
        TrainingError: the workers have looked at another number of columns.
    """
    if facts.rows == 0 and facts.complete:
        raise DataError(NO_ROWS)
    if len(facts.columns) != len(columns):
        raise TrainingError(
            f"the workers tell of {len(facts.columns)} columns, but the training has "
            f"{len(columns)}; all must run the same version of sparkdl"
        )
    for found, spec in zip(facts.columns, columns, strict=True):
        _check_column(found, spec, facts)
        _check_range(found, spec, facts.rows)
    workers = len(facts.shard_rows)
    if facts.rows < workers and facts.complete:
        raise DataError(
            f"the DataFrame has {facts.rows} rows, fewer than the {workers} workers. "
            f"Set numWorkers to at most {facts.rows}"
        )


def _check_column(found: ColumnFacts, spec: ColumnSpec, facts: DataFacts) -> None:
    name, rows, padded = spec.name, facts.rows, spec.padding is not None

    def first(count: str) -> str:
        where = found.where(count)
        return f" (the first is {where})" if where else ""

    if found.nulls:
        empty = f", or make empty arrays of them: F.coalesce('{name}', F.array())" if padded else ""
        raise DataError(
            f"column '{name}' has {found.nulls} null values in {rows} rows{first('nulls')}. Drop "
            f"or fill them first: df.na.drop(subset=[...]) / df.na.fill({{...}}){empty}"
        )
    if found.null_elements:
        raise DataError(
            f"column '{name}' has null elements inside its arrays in {found.null_elements} "
            f"of {rows} rows{first('null_elements')}. Fill them first, for example with "
            "F.transform(col, lambda x: F.coalesce(x, F.lit(0)))"
        )
    if found.broken:
        raise DataError(
            f"column '{name}' has {found.broken} rows of {rows} that cannot become tensors: "
            f"{found.where('broken') or 'the first'} {found.reason}. Filter them out first, or "
            "declare what they are with columnShapes and columnDtypes"
        )
    if found.shortest != found.longest and not padded:
        places = found.where("shortest"), found.where("longest")
        where = f" (for example {places[0]} and {places[1]})" if all(places) else ""
        raise DataError(
            f"column '{name}' holds arrays of {found.shortest} to {found.longest} elements{where}; "
            "every row must have the same number. Have minibatches padded with padCols="
            f"{{'{name}': 0}}, cut them to one length first, or find the odd rows with "
            f"df.groupBy(F.size('{name}')).count()"
        )
    if found.longest == 0 and (facts.complete or not padded):
        raise DataError(f"column '{name}' holds only empty arrays: there is nothing to feed")


def _check_range(found: ColumnFacts, spec: ColumnSpec, rows: int) -> None:
    if found.out_of_range:
        low, high = limits(spec.dtype)
        where = found.where("out_of_range")
        raise DataError(
            f"column '{spec.name}' has {found.out_of_range} rows of {rows} with numbers out of the "
            f"range of {str(spec.dtype).removeprefix('torch.')}, {low:g} to {high:g}"
            f"{f' (the first is {where})' if where else ''}. Scale them first, or ask for a wider "
            "dtype with columnDtypes"
        )


def _extreme(choose: Callable[[T, T], T], a: T | None, b: T | None) -> T | None:
    """One of two numbers; NaN, which ``min`` and ``max`` see only in first place, if either is."""
    if a is None or b is None:
        return b if a is None else a
    return choose(b, a) if b != b else choose(a, b)
