"""The algorithms by which replicas agree, one a file."""

from sparkdl.strategies.base import Run, Strategy
from sparkdl.strategies.gradient_all_reduce import GradientAllReduce
from sparkdl.strategies.parameter_averaging import ParameterAveraging

__all__ = ["GradientAllReduce", "ParameterAveraging", "Run", "Strategy"]
