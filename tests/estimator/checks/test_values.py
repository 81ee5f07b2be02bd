"""Labels, weights and integers that no training can use, by what the workers found."""

from __future__ import annotations

import math

import pytest
import torch
from every_row import every
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkdl.errors import DataError
from sparkdl.estimator.checks.values import check_label, check_weight, require_holdable
from sparkdl.feed.record_batches.decode import without_infinity
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.rows.columns import InputColumn

FIRST = {"not_finite": (2, 7), "least": (0, 3), "largest": (1, 1)}


@every("value", [math.inf, -math.inf])
def test_an_infinite_label_is_named_with_its_place(value: float) -> None:
    low, high = min(value, 0.0), max(value, 0.0)
    found = ColumnStatistics(not_finite=1, smallest=low, largest=high, places=FIRST)
    with pytest.raises(DataError, match="column 'y' holds infinity, the first in row 7 of part"):
        check_label(InputColumn("y", "double", False), nn.MSELoss(), found)


@every("name", ["y", "a.b", "of `y`"])
@every("is_array", [False, True])
def test_the_advice_about_infinity_leaves_what_is_finite(
    spark: SparkSession, name: str, *, is_array: bool
) -> None:
    values = [1.0, math.nan, math.inf, -math.inf, -2.0]
    rows = [([value, 0.0] if is_array else value,) for value in values]
    df = spark.createDataFrame(rows, [name])
    advice = without_infinity(name, is_array=is_array).removeprefix("Drop these rows first: ")
    assert sorted(row[0] for row in eval(advice, {"df": df, "F": F}).collect()) == sorted(
        row[0] for row in (rows[0], rows[4])
    )


@every("count", ["not_finite", "fractions"])
def test_integers_hold_no_infinity_and_no_fractions(count: str) -> None:
    found = ColumnStatistics(**{count: 3}, places={count: (2, 7)})
    with pytest.raises(DataError, match=r"'x' .* 3 rows \(the first is row 7 .* int32 cannot hold"):
        require_holdable(ColumnSpec("x", torch.int32), found)
    require_holdable(ColumnSpec("x", torch.float16), found)


@every(
    ("low", "high", "told"),
    [
        (0.0, math.inf, "holds inf in row 1 of partition 1"),
        (-math.inf, 3.0, "holds -inf in row 2 of partition 2"),
        (math.nan, math.nan, "holds nan in row 2 of partition 2"),
        (-1.0, math.inf, "holds -1 in row 2 of partition 2"),
    ],
)
def test_a_weight_that_is_none_is_named_with_its_place(low: float, high: float, told: str) -> None:
    places = {"smallest": (2, 2), "largest": (1, 1), "not_finite": (0, 0)}
    found = ColumnStatistics(smallest=low, largest=high, not_finite=1, places=places)
    with pytest.raises(DataError, match=told):
        check_weight("w", found, 1.0, 4)


def weights(least: float, high: float) -> ColumnStatistics:
    return ColumnStatistics(smallest=0.0, largest=high, least=least, places=FIRST)


def test_a_weight_that_would_become_zero_is_named_with_its_place_and_the_mean() -> None:
    with pytest.raises(DataError, match=r"1e-50 in row 3 of partition 0, .* mean weight, 0.5"):
        check_weight("w", weights(1e-50, 1.0), 4.0, 8)


def test_weights_without_a_mean_in_float64_are_refused() -> None:
    with pytest.raises(DataError, match=r"up to 1e\+308 \(row 1 of partition 1\).* infinite"):
        check_weight("w", weights(1e308, 1e308), math.inf, 8)
    with pytest.raises(DataError, match="mean of 8 rows is 0"):
        check_weight("w", weights(5e-324, 5e-324), 5e-324, 8)


@every("unit", [1e-300, 1e-46, 1e-44, 1.0, 1e300])
def test_weights_of_any_unit_are_taken(unit: float) -> None:
    check_weight("w", weights(unit, 3 * unit), 6 * unit, 4)
