"""The grid of the search that a stage is fitted for, which pyspark.ml tells no stage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pyspark.ml.param import Param


def searched_grid() -> Sequence[dict[Param[Any], Any]]:
    """All settings that a ``CrossValidator`` or ``TrainValidationSplit`` is going to try.

    Returns:
        The settings of the one that the caller is called by, also by way of a ``Pipeline``; none
        elsewhere, or if this Spark calls them otherwise.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "pyspark.ml.tuning" and "epm" in frame.f_locals:
            found: Sequence[dict[Param[Any], Any]] = frame.f_locals["epm"]
            return found
    return ()
