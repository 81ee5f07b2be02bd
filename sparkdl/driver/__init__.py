"""The driver's half of a run: an initial center goes in, a trained module comes out.

Knows nothing of Spark: whoever starts the workers is passed in as ``launch``.
"""

from sparkdl.driver.center import as_builder, build_replica, first_replica, initial_center
from sparkdl.driver.lifecycle import Launch, Outcome, run

__all__ = [
    "Launch",
    "Outcome",
    "as_builder",
    "build_replica",
    "first_replica",
    "initial_center",
    "run",
]
