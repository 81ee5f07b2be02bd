"""Drawing with matplotlib, which is imported where something is drawn and nowhere else."""

from __future__ import annotations

from typing import Any

from sparkdl.errors import SetupError


def new_figure(width: float, height: float) -> Any:
    """An empty figure that a notebook shows once: as what its cell returns.

    Args:
        width: in inches.
        height: likewise.

    Raises:
        SetupError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise SetupError(
            "the plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    figure = pyplot.figure(figsize=(width, height), layout="constrained")
    pyplot.close(figure)
    return figure
