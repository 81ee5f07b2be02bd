"""The algorithms by which replicas agree, one a file."""

from sparkdl.strategies.base import Run, Strategy
from sparkdl.strategies.parameter_averaging import ParameterAveraging

__all__ = ["ParameterAveraging", "Run", "Strategy"]
