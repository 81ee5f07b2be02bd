"""The algorithms by which replicas agree, one per file, and what to build another one from.

``parameter_averaging`` is here; the other families have packages of their own: ``all_reduce`` (with
``compression`` and ``kfac``), ``asynchronous``, ``elastic``, ``gossip``, ``outer``, ``threshold``.
"""

from sparkdl.averager.policies.round_policy import All, Nobody, RoundPolicy, RoundRobin
from sparkdl.averager.values.center_update import CenterUpdate, Contributions, ReplaceByMean
from sparkdl.averager.values.packing import Packing
from sparkdl.averager.values.wire_format import (
    BFloat16Changes,
    Changes,
    Float4Changes,
    Float8Changes,
    FullPrecision,
    ParameterChanges,
    SparseChanges,
    WireFormat,
)
from sparkdl.strategies.all_reduce.adascale import AdaScale
from sparkdl.strategies.all_reduce.gradient_all_reduce import GradientAllReduce
from sparkdl.strategies.all_reduce.hybrid import Hybrid
from sparkdl.strategies.asynchronous.asynchronous_outer_optimizer import (
    AsynchronousOuterOptimizer,
    DelayedNesterov,
)
from sparkdl.strategies.asynchronous.asynchronous_sgd import AsynchronousSGD
from sparkdl.strategies.asynchronous.barriers import ASP, BSP, PBSP, PSSP, SSP, Barrier, Softsync
from sparkdl.strategies.base import Needs, Run, Strategy
from sparkdl.strategies.color_trees import ColorTrees
from sparkdl.strategies.compression.base import Compression, Compressor
from sparkdl.strategies.compression.one_bit_adam import OneBitAdam
from sparkdl.strategies.compression.power_sgd import PowerSGD
from sparkdl.strategies.compression.top_k import TopK
from sparkdl.strategies.elastic.elastic_averaging import ElasticAveraging
from sparkdl.strategies.gossip.gossip_averaging import GossipAveraging
from sparkdl.strategies.kfac import KFACPreconditioner
from sparkdl.strategies.outer.outer_optimizer import OuterOptimizer, OuterSGD
from sparkdl.strategies.parameter_averaging import ParameterAveraging
from sparkdl.strategies.threshold.threshold_gradient_sharing import ThresholdGradientSharing

__all__ = [
    "ASP",
    "BSP",
    "PBSP",
    "PSSP",
    "SSP",
    "AdaScale",
    "All",
    "AsynchronousOuterOptimizer",
    "AsynchronousSGD",
    "BFloat16Changes",
    "Barrier",
    "CenterUpdate",
    "Changes",
    "ColorTrees",
    "Compression",
    "Compressor",
    "Contributions",
    "DelayedNesterov",
    "ElasticAveraging",
    "Float4Changes",
    "Float8Changes",
    "FullPrecision",
    "GossipAveraging",
    "GradientAllReduce",
    "Hybrid",
    "KFACPreconditioner",
    "Needs",
    "Nobody",
    "OneBitAdam",
    "OuterOptimizer",
    "OuterSGD",
    "Packing",
    "ParameterAveraging",
    "ParameterChanges",
    "PowerSGD",
    "ReplaceByMean",
    "RoundPolicy",
    "RoundRobin",
    "Run",
    "Softsync",
    "SparseChanges",
    "Strategy",
    "ThresholdGradientSharing",
    "TopK",
    "WireFormat",
]
