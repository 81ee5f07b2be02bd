"""The algorithms by which replicas agree, one a file."""

from sparkdl.strategies.base import Needs, Run, Strategy
from sparkdl.strategies.gradient_all_reduce import GradientAllReduce
from sparkdl.strategies.parameter_averaging import ParameterAveraging

__all__ = ["GradientAllReduce", "Needs", "ParameterAveraging", "Run", "Strategy"]
