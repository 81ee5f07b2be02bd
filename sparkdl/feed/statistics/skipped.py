"""Rows that are left out because a feature cannot be used, counted with what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparkdl.feed.record_batches.decode import Decoded, usable
from sparkdl.feed.statistics.column import ColumnStatistics, RowLocation
from sparkdl.protocols import ColumnSpec


def unusable(
    features: Sequence[Decoded], specs: Sequence[ColumnSpec], rows: int, at: RowLocation
) -> tuple[np.ndarray, list[ColumnStatistics]]:
    """Look for rows of one record batch that are to be left out.

    Args:
        features: the decoded columns.
        specs: what they become.
        rows: of the record batch.
        at: the place of the first.

    Returns:
        Which rows are kept, shape (rows,), bool; and by column how many are not.
    """
    sound = [usable(*pair, rows) for pair in zip(features, specs, strict=True)]
    found = [_found(*pair, at) for pair in zip(features, sound, strict=True)]
    return np.logical_and.reduce(sound), found


def _found(column: Decoded, sound: np.ndarray, at: RowLocation) -> ColumnStatistics:
    if sound.all():
        return ColumnStatistics()
    rows, broken = np.flatnonzero(~sound), column.broken
    reason = "holds a null, NaN or infinity" if broken is None else broken.reason
    first = int(rows[0] if broken is None else broken.rows[0])
    places = {"skipped": (at[0], at[1] + first)}
    return ColumnStatistics(skipped=len(rows), skip_reason=reason, places=places)
