"""Checks of labels, weights and held-out rows, once the workers have read them."""

from __future__ import annotations

import logging
import math

import torch

from sparkdl.arguments import counted
from sparkdl.errors import DataError
from sparkdl.feed.record_batches.decode import without_infinity
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.protocols import ColumnSpec, LossFunction
from sparkdl.spark.rows.columns import InputColumn

logger = logging.getLogger(__name__)


def check_label(label: InputColumn, loss: LossFunction, statistics: ColumnStatistics) -> None:
    """Check that a loss can learn from a label column.

    Args:
        label: the column.
        loss: the loss that is given its values.
        statistics: of what the workers read.

    Raises:
        DataError: it has NaN, infinity, or fractions where the loss takes class indices.
    """
    low, high = statistics.smallest or 0.0, statistics.largest or 0.0
    if not (math.isfinite(low) and math.isfinite(high)):
        what = "NaN (not a number)" if math.isnan(high) else "infinity"
        raise DataError(
            f"label column '{label.name}' holds {what}, the first in "
            f"{statistics.where('not_finite')}, which no loss can learn from. "
            f"{without_infinity(label.name, is_array=bool(label.dimensions))}"
        )
    if statistics.fractions:
        raise DataError(
            f"label column '{label.name}' ({label.type_name}) holds numbers that are "
            f"not whole in {counted(statistics.fractions, 'row')}, the first in "
            f"{statistics.where('fractions')}, but "
            f"{getattr(loss, '__name__', type(loss).__name__)} takes class indices 0, 1, .... "
            "Index the classes with pyspark.ml.feature.StringIndexer, or use a regression loss"
        )


def require_holdable(spec: ColumnSpec, statistics: ColumnStatistics, or_skip: str = "") -> None:
    """Refuse NaN, infinity and fractions in a column that becomes integers, which have none.

    Args:
        spec: what the column becomes.
        statistics: of what the workers read.
        or_skip: how else such rows can be left out, for the message.

    Raises:
        DataError: there are some.
    """
    if spec.dtype.is_floating_point:
        return
    dtype = str(spec.dtype).removeprefix("torch.")
    if statistics.not_finite:
        raise DataError(
            f"column '{spec.name}' holds NaN or infinity in "
            f"{counted(statistics.not_finite, 'row')} (the first is "
            f"{statistics.where('not_finite')}), which {dtype} cannot hold. "
            f"{without_infinity(spec.name, is_array=spec.is_array)}, or ask for a floating-point "
            f"dtype with columnDtypes{or_skip}"
        )
    if statistics.fractions:
        raise DataError(
            f"column '{spec.name}' holds numbers that are not whole in "
            f"{counted(statistics.fractions, 'row')} (the first is "
            f"{statistics.where('fractions')}), which {dtype} cannot hold. Round them first with "
            f"F.round, or ask for a floating-point dtype with columnDtypes{or_skip}"
        )


def check_weight(name: str, statistics: ColumnStatistics, total: float, rows: int) -> None:
    """Check that a column holds weights: none below 0, not all of them 0, none too small to count.

    Args:
        name: the column's.
        statistics: of what the workers read.
        total: the sum of the weights of the rows to train on.
        rows: how many those are.

    Raises:
        DataError: it does not.
    """
    low, high = statistics.smallest or 0.0, statistics.largest or 0.0
    for value, what in ((low, "smallest"), (high, "largest")):
        if not 0 <= value < math.inf:
            raise DataError(
                f"weight column '{name}' holds {value:g} in {statistics.where(what)}; weights are "
                "finite numbers >= 0"
            )
    if total == 0:
        where = "every row" if high == 0 else "every row to train on"
        raise DataError(f"weight column '{name}' is 0 in {where}: there is nothing to train on")
    mean = total / rows
    if not 0 < mean < math.inf:
        largest = f"up to {high:g} ({statistics.where('largest')})"
        raise DataError(
            f"weight column '{name}' holds numbers {largest}, and the mean of "
            f"{counted(rows, 'row')} is {'0' if mean == 0 else 'infinite'} in float64. Scale the "
            "weights first; only their ratios count"
        )
    least = statistics.least
    if least is not None and not torch.tensor(least / mean, dtype=torch.float32):
        raise DataError(
            f"weight column '{name}' holds {least:g} in {statistics.where('least')}, which is "
            f"{least / mean:g} of the mean weight, {mean:g}, and so 0 in float32. Set it to 0 to "
            "leave the row out of the loss, or make the weights less unequal"
        )


def check_held_out(by: str | float | None, held_out: int, trained: int) -> None:
    """Check that there are rows to validate with, and as many as were asked for.

    Args:
        by: the column that marks held-out rows, or the fraction that is held out.
        held_out: how many rows are held out.
        trained: how many are not.

    Raises:
        DataError: none is held out.
    """
    rows = trained + held_out
    if isinstance(by, str) and not held_out:
        raise DataError(
            f"column '{by}' (validationIndicatorCol) is false in all of "
            f"{counted(rows, 'row')}: there is nothing to validate with"
        )
    if not isinstance(by, float):
        return
    if not held_out:
        raise DataError(
            f"validationFraction={by:g} holds out none of {counted(rows, 'row')}: there is nothing "
            "to validate with. Raise it, or choose another seed"
        )
    # Were all rows different, the odds of so few, or so many, would be below one in a million.
    if abs(held_out - by * rows) > 5 * math.sqrt(rows * by * (1 - by)) + 1:
        logger.warning(
            "validationFraction=%g holds out %d of %d rows: rows with the same content are on the "
            "same side, and there are few distinct ones. To choose among equal rows, mark them in "
            "a column (validationIndicatorCol)",
            by,
            held_out,
            rows,
        )
