"""The driver's half of a run: an initial center goes in, a trained module comes out.

Knows nothing of Spark: whoever starts the workers is passed in as ``launch``.
"""

from sparkdl.driver.lifecycle import (
    Launch,
    Outcome,
    RunOptions,
    as_builder,
    initial_center,
    run,
)
from sparkdl.driver.serving import Observers

__all__ = [
    "Launch",
    "Observers",
    "Outcome",
    "RunOptions",
    "as_builder",
    "initial_center",
    "run",
]
