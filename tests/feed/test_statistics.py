"""What is found in a worker's rows: counts against plain Python, however the rows are cut."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
import torch
from every_row import every, every_row
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.encodings import VECTOR
from sparkdl.errors import DataError, TrainingError
from sparkdl.feed.column_statistics import ColumnStatistics, places_from, scan
from sparkdl.feed.shards import DataStatistics, ShardStatistics, check_statistics
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


COUNTS = ("nulls", "null_elements", "fractions", "not_finite", "out_of_range")
REALS, WHOLES = pa.float64(), pa.int64()


@every(
    ("kind", "value", "spec", "found"),
    [
        *((kind, None, WHOLE, {"nulls": 1}) for kind in (REALS, WHOLES, pa.bool_())),
        (REALS, 3.0, WHOLE, {"smallest": 3.0, "largest": 3.0}),
        (REALS, -0.5, REAL, {"smallest": -0.5, "largest": -0.5}),
        (REALS, -0.5, WHOLE, {"smallest": -0.5, "largest": -0.5, "fractions": 1}),
        *(
            (REALS, number, REAL, {"smallest": number, "largest": number, "not_finite": 1})
            for number in (math.nan, math.inf, -math.inf)
        ),
        (REALS, math.inf, WHOLE, {"smallest": math.inf, "largest": math.inf, "not_finite": 1}),
        (REALS, 2.0**63, WHOLE, {"smallest": 2.0**63, "largest": 2.0**63, "out_of_range": 1}),
        *((WHOLES, each, WHOLE, {"smallest": each, "largest": each}) for each in (-(2**63), 7)),
        *((pa.bool_(), each, WHOLE, {"smallest": each, "largest": each}) for each in (0, 1)),
        (pa.list_(WHOLES), None, ARRAY, {"nulls": 1}),
        (pa.list_(WHOLES), [], ARRAY, {"shortest": 0, "longest": 0}),
        (
            pa.list_(WHOLES),
            [5, None, 2**53 + 1],
            ARRAY,
            {
                **{"null_elements": 1, "shortest": 3, "longest": 3},
                **{"smallest": 5, "largest": 2**53 + 1},
            },
        ),
        # Those of fractions are looked into by what they become.
        (pa.list_(pa.float32()), [1.5, 2.0], ARRAY, {"shortest": 2, "longest": 2}),
        (
            pa.list_(pa.float32()),
            [math.nan, None],
            ARRAY,
            {"shortest": 2, "longest": 2, "not_finite": 1, "null_elements": 1},
        ),
    ],
)
def test_a_row_is_counted_as_what_it_is(
    kind: pa.DataType, value: Any, spec: ColumnSpec, found: dict[str, Any]
) -> None:
    values = pa.array([None if value is None else value], REALS if kind == pa.bool_() else kind)
    places = {name: (2, 7) for name, each in found.items() if each or name not in COUNTS}
    told = scan(values.cast(kind), spec, places_from(2, 7, 20))
    assert numbers(told) == numbers(ColumnStatistics(**found, places=places))


def test_elements_behind_a_null_array_do_not_count() -> None:
    arrays = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 7], pa.int32()),
        pa.array([1, None, None, 99, 5, 6, 7]),
        mask=pa.array([False, True, False]),
    )
    assert arrays.to_pylist() == [[1, None], None, [5, 6, 7]]
    nulls = {"nulls": 1, "null_elements": 1}
    found = ColumnStatistics(**nulls, shortest=2, longest=3, smallest=1, largest=7)
    assert scan(arrays, ARRAY) == found


KINDS = [REALS, WHOLES, pa.bool_(), pa.list_(WHOLES), pa.list_(pa.float32())]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=50)
@given(data=st.data())
def test_the_statistics_do_not_depend_on_how_the_rows_are_cut(
    kind: pa.DataType, data: st.DataObject
) -> None:
    spec = ARRAY if pa.types.is_list(kind) else WHOLE
    of_kind = {REALS: floats, WHOLES: integers, pa.bool_(): st.booleans()}
    element = integers if kind == pa.list_(WHOLES) else floats
    value = of_kind.get(kind, st.lists(st.none() | element, max_size=3))
    rows = data.draw(st.lists(st.none() | value, max_size=12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    values = pa.array(rows, kind)

    pieces = [
        (values.slice(start, stop - start), start)
        for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)
    ]
    found = [scan(piece, spec, places_from(3, start, 20)) for piece, start in pieces]

    whole = numbers(scan(values, spec, places_from(3, 0, 20)))
    assert numbers(sum(found, ColumnStatistics())) == whole
    alone = [scan(values[k : k + 1], spec, places_from(3, k, 20)) for k in range(len(rows))]
    assert numbers(sum(alone, ColumnStatistics())) == whole


GOOD = ColumnStatistics(smallest=0, largest=1)


@every_row(
    ({}, (0,), "the DataFrame is empty"),
    ({}, (0, 0), "the DataFrame is empty"),
    ({}, (1, 1, 0), r"2 rows, fewer than the 3 workers.*numWorkers.*num_workers.* 2"),
    ({"nulls": 5}, (3, 4), r"has 5 null values in 7 rows\. Drop these rows .*F\.coalesce"),
    (
        {"null_elements": 2, "shortest": 3, "longest": 3},
        (3, 4),
        r"has null elements .* in 2 of 7 rows\. .*F\.coalesce",
    ),
    (
        {"shortest": 2, "longest": 9},
        (3, 4),
        r"holds arrays of 2 to 9 elements;.*F\.size\('`second`'\)",
    ),
    ({"shortest": 0, "longest": 0}, (3, 4), "holds only empty arrays"),
    (
        {"out_of_range": 2, "smallest": 0, "largest": 1e300},
        (3, 4),
        r"has 2 rows of 7 .* range of float32, -3.4\S+e\+38 .*columnDtypes",
    ),
)
def test_what_cannot_be_trained_on_is_refused_with_its_number_and_a_remedy(
    found: dict[str, Any], shard_rows: tuple[int, ...], words: str
) -> None:
    told = DataStatistics(shard_rows, (GOOD, ColumnStatistics(**found)))
    specs = [ColumnSpec(name, torch.float32) for name in ("first", "second")]
    named = "column 'second' " if sum(shard_rows) == 7 else ""
    with pytest.raises(DataError, match=named + words):
        check_statistics(told, specs)


@every_row(
    ((0, 0), "nothing to train on: validationIndicatorCol"),
    ((0, 1), r"has 1 row to train on \(validationIndicatorCol"),
)
def test_rows_that_are_held_out_are_not_said_to_be_missing(
    shard_rows: tuple[int, ...], words: str
) -> None:
    told = DataStatistics(shard_rows, (GOOD,), held_out=7)
    with pytest.raises(DataError, match=f"{words}.* holds out 7 rows"):
        check_statistics(told, [WHOLE])


def test_how_to_find_vectors_of_another_length_is_code_that_spark_runs() -> None:
    told = DataStatistics((3,), (ColumnStatistics(shortest=5, longest=6),))
    spec = ColumnSpec("a.b", torch.float32, (UNKNOWN,), VECTOR)
    code = r"F\.size\(pyspark\.ml\.functions\.vector_to_array\('`a\.b`'\)\)"
    with pytest.raises(DataError, match=code):
        check_statistics(told, [spec])


@every("told", [0, 1, 3])
def test_workers_that_tell_of_other_columns_are_refused_with_both_numbers(told: int) -> None:
    with pytest.raises(TrainingError, match=f"reported {told} columns, but the training has 2"):
        check_statistics(DataStatistics((9,), (GOOD,) * told), [WHOLE, REAL])


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
