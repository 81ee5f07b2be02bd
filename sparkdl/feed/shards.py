"""What a worker's rows look like: found while they arrive, told to the driver before step one.

A null, arrays of two lengths or a label out of range are known to the driver, with their counts
over all workers, before anybody trains; the rows are read once for that and for training.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sparkdl.arguments import counted
from sparkdl.encodings import VECTOR
from sparkdl.errors import DataError, TrainingError
from sparkdl.feed.column_statistics import ColumnStatistics, located
from sparkdl.feed.conversion import limits
from sparkdl.feed.decode import FILL_ELEMENTS, Decoded, in_sql, instead_of_nulls, usable
from sparkdl.feed.fingerprint import MODULUS
from sparkdl.protocols import ColumnSpec

Part = tuple[int, int, int, float]
"""The number of a partition, and of its rows: how many to train on, how many to validate with, and
the weight of the former."""


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """What was found in the rows of one worker.

    Attributes:
        rows: how many there are to train on.
        columns: statistics of each column, in the order of the feed's schema.
        held_out: how many more there are to validate with.
        weight: the sum of the weights of those to train on; 0 without weights.
        fingerprint: of the rows to train on; see ``fingerprint``.
        held_out_fingerprint: of those to validate with.
        skipped: how many rows were left out, because their features cannot be used.
        parts: the rows by partition of the user's DataFrame, if the workers exchange them: then it
            does not matter who has read which. Else None: a shard is a partition.
    """

    rows: int
    columns: tuple[ColumnStatistics, ...]
    held_out: int = 0
    weight: float = 0.0
    fingerprint: int = 0
    held_out_fingerprint: int = 0
    skipped: int = 0
    parts: tuple[Part, ...] | None = None


@dataclass(frozen=True, slots=True)
class DataStatistics:
    """What all workers found together.

    Attributes:
        shard_rows: rows of each worker to train on, by rank.
        columns: statistics of each column, in the order of the feed's schema.
        held_out: rows of all workers to validate with.
        weight: the sum of the weights of all rows to train on; 0 without weights.
        fingerprint: of the rows of all workers to train on; see ``fingerprint``.
        held_out_fingerprint: of those to validate with.
        skipped: rows of all workers that were left out.
        parts: of each worker's rows by partition, by rank.
    """

    shard_rows: tuple[int, ...]
    columns: tuple[ColumnStatistics, ...]
    held_out: int = 0
    weight: float = 0.0
    fingerprint: int = 0
    held_out_fingerprint: int = 0
    skipped: int = 0
    parts: tuple[tuple[Part, ...], ...] = ()

    @property
    def mean_weight(self) -> float:
        """The mean weight of all rows to train on; 1 without weights."""
        return self.weight / self.rows if self.weight else 1.0

    def lasting(self, *, resized: bool = False) -> dict[str, Any]:
        """What is the same when the rows are read again, as JSON: all but the places.

        A shuffle delivers rows in any order, and which worker reads which partition may differ.

        Args:
            resized: whether another number of workers reads them: then only their number and their
                values are the same.
        """
        if resized:
            names = ("rows", "held_out", "skipped", "fingerprint", "held_out_fingerprint")
            return {name: getattr(self, name) for name in names}
        fields = asdict(self)
        del fields["parts"]
        fields["shard_rows"] = [rows for _, rows, *_ in in_order(self.parts)]
        for column in fields["columns"]:
            del column["places"], column["reason"], column["skip_reason"]
        return fields

    @property
    def rows(self) -> int:
        """Rows of all workers to train on."""
        return sum(self.shard_rows)

    @classmethod
    def of(cls, shards: Sequence[ShardStatistics]) -> DataStatistics:
        """Put the workers' findings together.

        Args:
            shards: one per worker, by rank.
        """
        columns = zip(*(shard.columns for shard in shards), strict=True)
        parts = tuple(
            ((rank, shard.rows, shard.held_out, shard.weight),)
            if shard.parts is None
            else shard.parts
            for rank, shard in enumerate(shards)
        )
        return cls(
            tuple(shard.rows for shard in shards),
            tuple(sum(statistics, ColumnStatistics()) for statistics in columns),
            sum(shard.held_out for shard in shards),
            sum((weight for *_, weight in in_order(parts)), 0.0),
            sum(shard.fingerprint for shard in shards) % MODULUS,
            sum(shard.held_out_fingerprint for shard in shards) % MODULUS,
            sum(shard.skipped for shard in shards),
            parts,
        )


def in_order(parts: Sequence[Sequence[Part]]) -> list[Part]:
    """What all workers have read of all partitions, in the same order whoever has read which.

    Args:
        parts: by rank. Ranks that share a partition share a task: their order is always the same.
    """
    return sorted(itertools.chain(*parts), key=lambda part: part[0])


OR_SKIP = ", or leave out what cannot be used with handleInvalid='skip'"
NO_ROWS = "the DataFrame is empty: there is nothing to train on"


def unusable(
    features: Sequence[Decoded], specs: Sequence[ColumnSpec], places: np.ndarray
) -> tuple[np.ndarray, list[ColumnStatistics]]:
    """Look for rows of one record batch that are to be left out.

    Args:
        features: the decoded columns.
        specs: what they become.
        places: of the rows, as in ``PLACE_COLUMN``.

    Returns:
        Which rows are kept, shape (rows,), bool; and by column how many are not.
    """
    sound = [usable(*pair, len(places)) for pair in zip(features, specs, strict=True)]
    found = [_skipped(*pair, places) for pair in zip(features, sound, strict=True)]
    return np.logical_and.reduce(sound), found


def _skipped(column: Decoded, sound: np.ndarray, places: np.ndarray) -> ColumnStatistics:
    if sound.all():
        return ColumnStatistics()
    rows, broken = np.flatnonzero(~sound), column.broken
    reason = "holds a null, NaN or infinity" if broken is None else broken.reason
    first = int(rows[0] if broken is None else broken.rows[0])
    place = located(int(places[first]))
    return ColumnStatistics(skipped=len(rows), skip_reason=reason, places={"skipped": place})


def left_out(statistics: DataStatistics, columns: Sequence[ColumnSpec]) -> str:
    """How many rows were left out by ``handleInvalid='skip'``, and why; empty for none.

    Args:
        statistics: what the workers found.
        columns: the columns that were looked at.
    """
    if not statistics.skipped:
        return ""
    total = statistics.rows + statistics.held_out + statistics.skipped
    by_column = [
        f"{found.skipped} because of column '{spec.name}' (the first, {found.where('skipped')}, "
        f"{found.skip_reason})"
        for found, spec in zip(statistics.columns, columns, strict=True)
        if found.skipped
    ]
    return (
        f"handleInvalid='skip' left out {statistics.skipped} of {counted(total, 'row')}: "
        f"{'; '.join(by_column)}"
    )


def check_statistics(
    statistics: DataStatistics, columns: Sequence[ColumnSpec], features: int = 0
) -> None:
    """Refuse data that cannot be trained on.

    Args:
        statistics: what the workers found.
        columns: the columns that were looked at.
        features: how many of them, the first ones, ``handleInvalid`` is about.

    Raises:
        DataError: nulls, arrays of unequal length, no rows, or fewer than workers.
        TrainingError: the workers have looked at a different number of columns.
    """
    held_out = ""
    if statistics.held_out:
        what = counted(statistics.held_out, "row")
        held_out = f"validationIndicatorCol or validationFraction holds out {what}"
    if statistics.rows == 0:
        told = "; ".join(filter(None, (held_out, left_out(statistics, columns))))
        raise DataError(f"there is nothing to train on: {told}" if told else NO_ROWS)
    if len(statistics.columns) != len(columns):
        raise TrainingError(
            f"the workers reported {len(statistics.columns)} columns, but the training has "
            f"{len(columns)}; all must run the same version of sparkdl"
        )
    rows = statistics.rows + statistics.held_out
    for at, (found, spec) in enumerate(zip(statistics.columns, columns, strict=True)):
        _check_column(found, spec, rows, OR_SKIP if at < features else "")
        _check_range(found, spec, rows)
    workers = len(statistics.shard_rows)
    if statistics.rows < workers:
        to_train = f" to train on ({held_out})" if held_out else ""
        raise DataError(
            f"the DataFrame has {counted(statistics.rows, 'row')}{to_train}, fewer than the "
            f"{workers} workers. Set numWorkers, or num_workers of sparkdl.run, to at most "
            f"{statistics.rows}"
        )


def _check_column(found: ColumnStatistics, spec: ColumnSpec, rows: int, or_skip: str) -> None:
    name, padded = spec.name, spec.padding is not None

    def first(count: str) -> str:
        where = found.where(count)
        return f" (the first is {where})" if where else ""

    if found.nulls:
        raise DataError(
            f"column '{name}' has {counted(found.nulls, 'null value')} in "
            f"{counted(rows, 'row')}{first('nulls')}. {instead_of_nulls(spec)}{or_skip}"
        )
    if found.null_elements:
        raise DataError(
            f"column '{name}' has null elements inside its arrays in {found.null_elements} "
            f"of {counted(rows, 'row')}{first('null_elements')}. {FILL_ELEMENTS}{or_skip}"
        )
    if found.broken:
        # Of images of any size, say, all has been declared.
        declare = ", or declare their type with columnShapes and columnDtypes"
        raise DataError(
            f"column '{name}' has {counted(found.broken, 'row')} of {rows} that cannot become "
            f"tensors: {found.where('broken') or 'the first'} {found.reason}. Filter them out first"
            f"{'' if spec.encoding.chosen else declare}{or_skip}"
        )
    if found.shortest != found.longest and not padded:
        places = found.where("shortest"), found.where("longest")
        where = f" (for example {places[0]} and {places[1]})" if all(places) else ""
        values = f"'{in_sql(name)}'"
        if spec.encoding == VECTOR:
            values = f"pyspark.ml.functions.vector_to_array({values})"
        raise DataError(
            f"column '{name}' holds arrays of {found.shortest} to {found.longest} elements{where}; "
            "every row must have the same number. Have minibatches padded with padCols="
            f"{{'{name}': 0}}, cut them to one length first, or find the odd rows with "
            f"df.groupBy(F.size({values})).count()"
        )
    if found.longest == 0:
        raise DataError(f"column '{name}' holds only empty arrays: there is nothing to feed")


def _check_range(found: ColumnStatistics, spec: ColumnSpec, rows: int) -> None:
    if found.out_of_range:
        low, high = limits(spec.dtype)
        where = found.where("out_of_range")
        raise DataError(
            f"column '{spec.name}' has {counted(found.out_of_range, 'row')} of {rows} with numbers "
            f"out of the range of {str(spec.dtype).removeprefix('torch.')}, {low:g} to {high:g}"
            f"{f' (the first is {where})' if where else ''}. Scale them first, or ask for a wider "
            "dtype with columnDtypes"
        )
