"""Checks of labels, weights and held-out rows, once the workers have read them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from sparkdl.errors import DataError
from sparkdl.feed.statistics.column import ColumnStatistics
from sparkdl.protocols import LossFunction
from sparkdl.spark.rows.columns import InputColumn

logger = logging.getLogger(__name__)


class UnbalancedError(DataError):
    """The tasks read numbers of rows too unequal to train on; never leaves ``fit``."""


def check_label(label: InputColumn, loss: LossFunction, statistics: ColumnStatistics) -> None:
    """Check that a loss can learn from a label column.

    Args:
        label: the column.
        loss: the loss that is given its values.
        statistics: of what the workers read.

    Raises:
        DataError: it has NaN, or fractions where the loss takes class indices.
    """
    if statistics.largest is not None and math.isnan(statistics.largest):
        raise DataError(
            f"label column '{label.name}' holds NaN (not a number), the first in "
            f"{statistics.where('not_finite')}, which no loss can learn from. Drop those rows "
            f"first: df.where(~F.isnan('{label.name}'))"
        )
    if statistics.fractions:
        raise DataError(
            f"label column '{label.name}' ({label.type_name}) holds {statistics.fractions} "
            f"numbers that are not whole, the first in {statistics.where('fractions')}, but "
            f"{getattr(loss, '__name__', type(loss).__name__)} takes class indices 0, 1, .... "
            "Index the classes with pyspark.ml.feature.StringIndexer, or use a regression loss"
        )


def check_weight(name: str, statistics: ColumnStatistics) -> None:
    """Check that a column holds weights: none below 0, and not all of them 0.

    Args:
        name: the column's.
        statistics: of what the workers read.

    Raises:
        DataError: it does not.
    """
    low, high = statistics.smallest or 0.0, statistics.largest or 0.0
    if statistics.not_finite or low < 0:
        what = "not_finite" if statistics.not_finite else "smallest"
        raise DataError(
            f"weight column '{name}' holds {low:g} in {statistics.where(what)}; weights are "
            "numbers >= 0"
        )
    if high == 0:
        raise DataError(f"weight column '{name}' is 0 in every row: there is nothing to train on")


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
            f"column '{by}' (validationIndicatorCol) is false in all {rows} rows: there is nothing "
            "to validate with"
        )
    if not isinstance(by, float):
        return
    if not held_out:
        raise DataError(
            f"validationFraction={by:g} holds out none of {rows} rows: there is nothing to "
            "validate with. Raise it, or choose another seed"
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


def balanced(rows: Sequence[int]) -> bool:
    """Whether no task, for which all would wait, has over a twentieth more than the mean.

    Args:
        rows: by task.
    """
    return max(rows) <= 1.05 * sum(rows) / len(rows) + 1
