"""What is found in a worker's rows: counts against plain Python, however the rows are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.errors import DataError, TrainingError
from sparkdl.feed.statistics.column import ColumnStatistics, places_from, scan
from sparkdl.feed.statistics.shards import DataStatistics, ShardStatistics, check_statistics
from sparkdl.protocols import UNKNOWN, ColumnSpec

WHOLE = ColumnSpec("x", torch.int64)
REAL = ColumnSpec("x", torch.float32)
ARRAY = ColumnSpec("x", torch.float32, (UNKNOWN,))

floats = st.sampled_from([math.nan, math.inf, -math.inf, -0.5, 3.0]) | st.floats(width=32)
integers = st.integers(-(2**63), 2**63 - 1)


def numbers(statistics: ColumnStatistics) -> tuple[Any, ...]:
    """The fields, places included, with a NaN that equals itself."""
    fields = [getattr(statistics, name) for name in ColumnStatistics.__slots__ if name != "places"]
    fields += sorted(statistics.places.items())
    return tuple("NaN" if isinstance(f, float) and math.isnan(f) else f for f in fields)


def extremes(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The smallest and the largest by numpy, whose NaN wins."""
    if not values:
        return None, None
    return np.min(values).item(), np.max(values).item()


def first(places: dict[str, Any], name: str, rows: Sequence[bool]) -> int:
    """Count what is true and note the first place, in partition 0."""
    if any(rows):
        places[name] = (0, rows.index(True))
    return sum(rows)


def first_of(places: dict[str, Any], rows: Sequence[Any], **extremes: Any) -> None:
    """Note the first row that has each extreme."""
    for name, value in extremes.items():
        if value is not None:
            places[name] = (0, [str(row) for row in rows].index(str(value)))


def statistics_of_numbers(rows: Sequence[float | None], *, whole_wanted: bool) -> ColumnStatistics:
    """The oracle for a column of numbers."""
    present = [row for row in rows if row is not None]
    places: dict[str, Any] = {}
    wanting = [
        isinstance(row, float) and not math.isinf(row) and not row.is_integer() for row in rows
    ]
    too_large = [
        row is not None and math.isfinite(row) and not -(2**63) <= row < 2**63 for row in rows
    ]
    smallest, largest = extremes(present)
    zeros = [None if row is None else row + 0.0 if row == 0 else row for row in rows]
    first_of(
        places,
        zeros if present and isinstance(present[0], float) else rows,
        smallest=None if smallest is None else smallest + 0 if smallest == 0 else smallest,
        largest=None if largest is None else largest + 0 if largest == 0 else largest,
    )
    return ColumnStatistics(
        nulls=first(places, "nulls", [row is None for row in rows]),
        fractions=first(places, "fractions", wanting) if whole_wanted else 0,
        not_finite=first(
            places, "not_finite", [row is not None and not math.isfinite(row) for row in rows]
        ),
        out_of_range=first(places, "out_of_range", too_large) if whole_wanted else 0,
        smallest=smallest,
        largest=largest,
        places=places,
    )


def statistics_of_arrays(
    rows: Sequence[Sequence[Any] | None], *, look_inside: bool
) -> ColumnStatistics:
    """The oracle for a column of arrays."""
    present = [row for row in rows if row is not None]
    lengths = [len(row) for row in present]
    elements = [e for row in present for e in row if e is not None]
    smallest, largest = extremes(elements) if look_inside else (None, None)
    shortest, longest = min(lengths, default=None), max(lengths, default=None)
    places: dict[str, Any] = {}
    first_of(
        places,
        [None if row is None else len(row) for row in rows],
        shortest=shortest,
        longest=longest,
    )
    for name, value in (("smallest", smallest), ("largest", largest)):
        if value is not None:
            first(places, name, [row is not None and value in row for row in rows])
    infinite = [
        row is not None and any(e is not None and not math.isfinite(e) for e in row) for row in rows
    ]
    return ColumnStatistics(
        nulls=first(places, "nulls", [row is None for row in rows]),
        null_elements=first(
            places, "null_elements", [row is not None and None in row for row in rows]
        ),
        not_finite=0 if look_inside else first(places, "not_finite", infinite),
        shortest=shortest,
        longest=longest,
        smallest=smallest,
        largest=largest,
        places=places,
    )


@pytest.mark.parametrize("spec", [WHOLE, REAL], ids=["whole", "real"])
@settings(deadline=None)
@given(rows=st.lists(st.none() | floats, max_size=12))
def test_a_column_of_fractions_is_counted_as_plain_python_counts(
    spec: ColumnSpec, rows: list[float | None]
) -> None:
    found = scan(pa.array(rows, pa.float64()), spec)
    assert numbers(found) == numbers(statistics_of_numbers(rows, whole_wanted=spec is WHOLE))


@pytest.mark.parametrize("spec", [WHOLE, REAL], ids=["whole", "real"])
@settings(deadline=None)
@given(rows=st.lists(st.none() | integers, max_size=12))
def test_a_column_of_integers_is_counted_exactly(spec: ColumnSpec, rows: list[int | None]) -> None:
    found = scan(pa.array(rows, pa.int64()), spec)
    assert numbers(found) == numbers(statistics_of_numbers(rows, whole_wanted=True))


@settings(deadline=None)
@given(rows=st.lists(st.none() | st.booleans(), max_size=12))
def test_booleans_are_zero_and_one(rows: list[bool | None]) -> None:
    as_numbers = [None if row is None else int(row) for row in rows]
    found = scan(pa.array(rows, pa.bool_()), WHOLE)
    assert found == statistics_of_numbers(as_numbers, whole_wanted=True)


@settings(deadline=None)
@given(rows=st.lists(st.none() | st.lists(st.none() | integers, max_size=4), max_size=10))
def test_arrays_of_integers_are_counted_and_looked_into(
    rows: list[list[int | None] | None],
) -> None:
    found = scan(pa.array(rows, pa.list_(pa.int64())), ARRAY)
    assert numbers(found) == numbers(statistics_of_arrays(rows, look_inside=True))


@settings(deadline=None)
@given(rows=st.lists(st.none() | st.lists(st.none() | floats, max_size=4), max_size=10))
def test_arrays_of_fractions_are_counted_and_not_looked_into(
    rows: list[list[float | None] | None],
) -> None:
    found = scan(pa.array(rows, pa.list_(pa.float32())), ARRAY)
    assert numbers(found) == numbers(statistics_of_arrays(rows, look_inside=False))


def test_elements_behind_a_null_array_do_not_count() -> None:
    arrays = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 7], pa.int32()),
        pa.array([1, None, None, 99, 5, 6, 7]),
        mask=pa.array([False, True, False]),
    )
    assert arrays.to_pylist() == [[1, None], None, [5, 6, 7]]
    assert scan(arrays, ARRAY) == ColumnStatistics(
        nulls=1, null_elements=1, shortest=2, longest=3, smallest=1, largest=7
    )


@pytest.mark.parametrize(
    "kind", [pa.float64(), pa.int64(), pa.bool_(), pa.list_(pa.int64())], ids=str
)
@settings(deadline=None)
@given(data=st.data())
def test_the_statistics_do_not_depend_on_how_the_rows_are_cut(
    kind: pa.DataType, data: st.DataObject
) -> None:
    spec = ARRAY if pa.types.is_list(kind) else WHOLE
    of_kind = {pa.float64(): floats, pa.int64(): integers, pa.bool_(): st.booleans()}
    value = of_kind.get(kind, st.lists(st.none() | integers, max_size=3))
    rows = data.draw(st.lists(st.none() | value, max_size=12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    values = pa.array(rows, kind)

    pieces = [
        (values.slice(start, stop - start), start)
        for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)
    ]
    found = [scan(piece, spec, places_from(3, start, 20)) for piece, start in pieces]

    together = sum(found, ColumnStatistics())
    assert numbers(together) == numbers(scan(values, spec, places_from(3, 0, 20)))


def check(*columns: ColumnStatistics, shard_rows: tuple[int, ...] = (3, 4)) -> None:
    specs = [ColumnSpec(name, torch.float32) for name in ("first", "second")]
    check_statistics(DataStatistics(shard_rows, columns), specs[: len(columns)])


GOOD = ColumnStatistics(smallest=0, largest=1)


@every(
    ("columns", "shard_rows", "words"),
    [
        ([ColumnStatistics()], (0,), "the DataFrame is empty"),
        ([ColumnStatistics()], (0, 0), "the DataFrame is empty"),
        ([GOOD], (1, 1, 0), r"2 rows, fewer than the 3 workers.*numWorkers.* 2"),
        (
            [GOOD, ColumnStatistics(nulls=5)],
            (3, 4),
            r"column 'second' has 5 null values in 7 rows\. Drop these rows .*F\.coalesce",
        ),
        (
            [ColumnStatistics(null_elements=2, shortest=3, longest=3), GOOD],
            (3, 4),
            r"column 'first' has null elements .* in 2 of 7 rows\. .*F\.coalesce",
        ),
        (
            [GOOD, ColumnStatistics(shortest=2, longest=9)],
            (3, 4),
            r"column 'second' holds arrays of 2 to 9 elements;.*F\.size\('second'\)",
        ),
        (
            [ColumnStatistics(shortest=0, longest=0)],
            (3, 4),
            "column 'first' holds only empty arrays",
        ),
        (
            [ColumnStatistics(out_of_range=2, smallest=0, largest=1e300)],
            (3, 4),
            r"column 'first' has 2 rows of 7 .* range of float32, -3.4\S+e\+38 .*columnDtypes",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_its_number_and_a_remedy(
    columns: list[ColumnStatistics], shard_rows: tuple[int, ...], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        check(*columns, shard_rows=shard_rows)


@every("told", [0, 1, 3])
def test_workers_that_tell_of_other_columns_are_refused_with_both_numbers(told: int) -> None:
    with pytest.raises(TrainingError, match=f"reported {told} columns, but the training has 2"):
        check_statistics(DataStatistics((9,), (GOOD,) * told), [WHOLE, REAL])


def test_sound_data_pass_also_where_a_worker_has_no_rows() -> None:
    check(GOOD, ColumnStatistics(shortest=3, longest=3))
    check(GOOD, GOOD, shard_rows=(0, 2))


def test_what_lasts_of_the_statistics_does_not_depend_on_the_order_of_the_rows() -> None:
    first, second = (
        DataStatistics.of([ShardStatistics(3, (scan(pa.array(rows), REAL),), weight=2.0)])
        for rows in ([1.0, None, 3.0], [3.0, 1.0, None])
    )
    assert first.columns[0].places != second.columns[0].places
    assert first.lasting() == second.lasting()
    assert repr(first) == repr(second)


def test_the_mean_weight_is_over_the_rows_of_all_workers() -> None:
    shards = [
        ShardStatistics(3, (), weight=9.0),
        ShardStatistics(0, ()),
        ShardStatistics(1, (), weight=3.0),
    ]
    assert DataStatistics.of(shards).mean_weight == 3.0
    assert DataStatistics.of([ShardStatistics(4, ())]).mean_weight == 1.0


def test_the_first_bad_row_is_that_of_the_first_partition_whoever_has_read_it() -> None:
    def shard(partition: int, reason: str) -> ShardStatistics:
        places = {"broken": (partition, 4), "skipped": (partition, 1)}
        counts = {"broken": 1, "skipped": 1, "reason": reason, "skip_reason": reason}
        return ShardStatistics(9, (ColumnStatistics(**counts, places=places),))  # type: ignore[arg-type]

    shards = [shard(5, "is blue"), shard(2, "is red"), shard(7, "is green")]
    for ranks in (shards, shards[::-1]):
        (found,) = DataStatistics.of(ranks).columns
        assert (found.broken, found.reason, found.skip_reason) == (3, "is red", "is red")
        assert found.where("broken") == "row 4 of partition 2"
        assert found.where("skipped") == "row 1 of partition 2"
