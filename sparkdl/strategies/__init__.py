"""The algorithms by which replicas agree, one a file; and what another one is made of."""

from sparkdl.averager.center_update import CenterUpdate, Contributions, ReplaceByMean
from sparkdl.averager.round_policy import All, Nobody, RoundPolicy
from sparkdl.averager.wire_format import BFloat16Changes, Changes, FullPrecision, WireFormat
from sparkdl.strategies.base import Needs, Run, Strategy
from sparkdl.strategies.gradient_all_reduce import GradientAllReduce
from sparkdl.strategies.parameter_averaging import ParameterAveraging

__all__ = [
    "All",
    "BFloat16Changes",
    "CenterUpdate",
    "Changes",
    "Contributions",
    "FullPrecision",
    "GradientAllReduce",
    "Needs",
    "Nobody",
    "ParameterAveraging",
    "ReplaceByMean",
    "RoundPolicy",
    "Run",
    "Strategy",
    "WireFormat",
]
