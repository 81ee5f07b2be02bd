"""Refuses data that cannot be trained on, by what the workers found in it."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.errors import DataError, TrainingError
from sparkdl.feed.record_batches.decode import instead_of_nulls
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.feed.statistics.ranges import limits
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.protocols import ColumnSpec

NO_ROWS = "the DataFrame is empty: there is nothing to train on"


def check_statistics(statistics: DataStatistics, columns: Sequence[ColumnSpec]) -> None:
    """Refuse data that cannot be trained on.

    Args:
        statistics: what the workers found.
        columns: the columns that were looked at.

    Raises:
        DataError: nulls, or arrays of unequal length; where all rows have arrived also none, or
            fewer than workers.
        TrainingError: the workers have looked at a different number of columns.
    """
    if statistics.rows == 0 and statistics.complete:
        raise DataError(NO_ROWS)
    if len(statistics.columns) != len(columns):
        raise TrainingError(
            f"the workers reported {len(statistics.columns)} columns, but the training has "
            f"{len(columns)}; all must run the same version of sparkdl"
        )
    for found, spec in zip(statistics.columns, columns, strict=True):
        _check_column(found, spec, statistics)
        _check_range(found, spec, statistics.rows)
    workers = len(statistics.shard_rows)
    if statistics.rows < workers and statistics.complete:
        raise DataError(
            f"the DataFrame has {statistics.rows} rows, fewer than the {workers} workers. "
            f"Set numWorkers to at most {statistics.rows}"
        )


def _check_column(found: ColumnStatistics, spec: ColumnSpec, statistics: DataStatistics) -> None:
    name, rows, padded = spec.name, statistics.rows, spec.padding is not None

    def first(count: str) -> str:
        where = found.where(count)
        return f" (the first is {where})" if where else ""

    if found.nulls:
        raise DataError(
            f"column '{name}' has {found.nulls} null values in {rows} rows{first('nulls')}. "
            f"{instead_of_nulls(spec)}"
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
            "declare their type with columnShapes and columnDtypes"
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
    if found.longest == 0 and (statistics.complete or not padded):
        raise DataError(f"column '{name}' holds only empty arrays: there is nothing to feed")


def _check_range(found: ColumnStatistics, spec: ColumnSpec, rows: int) -> None:
    if found.out_of_range:
        low, high = limits(spec.dtype)
        where = found.where("out_of_range")
        raise DataError(
            f"column '{spec.name}' has {found.out_of_range} rows of {rows} with numbers out of the "
            f"range of {str(spec.dtype).removeprefix('torch.')}, {low:g} to {high:g}"
            f"{f' (the first is {where})' if where else ''}. Scale them first, or ask for a wider "
            "dtype with columnDtypes"
        )
