"""The algorithms by which replicas agree, one per file, and what to build another one from.

``parameter_averaging`` is here; the other families have packages of their own: ``all_reduce`` (with
``compression`` and ``kfac``), ``asynchronous``, ``elastic``, ``gossip``, ``outer``, ``threshold``.
"""

from sparkdl.averager.round_policy import All as All
from sparkdl.averager.round_policy import Nobody as Nobody
from sparkdl.averager.round_policy import RoundPolicy as RoundPolicy
from sparkdl.averager.round_policy import RoundRobin as RoundRobin
from sparkdl.averager.values.center_update import CenterUpdate as CenterUpdate
from sparkdl.averager.values.center_update import Contributions as Contributions
from sparkdl.averager.values.center_update import ReplaceByMean as ReplaceByMean
from sparkdl.averager.values.wire_format import BFLOAT16_CHANGES as BFLOAT16_CHANGES
from sparkdl.averager.values.wire_format import CHANGES as CHANGES
from sparkdl.averager.values.wire_format import FLOAT4_CHANGES as FLOAT4_CHANGES
from sparkdl.averager.values.wire_format import FLOAT8_CHANGES as FLOAT8_CHANGES
from sparkdl.averager.values.wire_format import FULL_PRECISION as FULL_PRECISION
from sparkdl.averager.values.wire_format import PARAMETER_CHANGES as PARAMETER_CHANGES
from sparkdl.averager.values.wire_format import SPARSE_CHANGES as SPARSE_CHANGES
from sparkdl.averager.values.wire_format import Packing as Packing
from sparkdl.averager.values.wire_format import WireFormat as WireFormat
from sparkdl.strategies.all_reduce.adascale import AdaScale as AdaScale
from sparkdl.strategies.all_reduce.compression import Compression as Compression
from sparkdl.strategies.all_reduce.compression import Compressor as Compressor
from sparkdl.strategies.all_reduce.gradient_all_reduce import GradientAllReduce as GradientAllReduce
from sparkdl.strategies.all_reduce.hybrid import Hybrid as Hybrid
from sparkdl.strategies.all_reduce.kfac import KFACPreconditioner as KFACPreconditioner
from sparkdl.strategies.all_reduce.one_bit_adam import OneBitAdam as OneBitAdam
from sparkdl.strategies.all_reduce.power_sgd import PowerSGD as PowerSGD
from sparkdl.strategies.all_reduce.power_sgd import TopK as TopK
from sparkdl.strategies.asynchronous_barriers import ASP as ASP
from sparkdl.strategies.asynchronous_barriers import BSP as BSP
from sparkdl.strategies.asynchronous_barriers import PBSP as PBSP
from sparkdl.strategies.asynchronous_barriers import PSSP as PSSP
from sparkdl.strategies.asynchronous_barriers import SSP as SSP
from sparkdl.strategies.asynchronous_barriers import Barrier as Barrier
from sparkdl.strategies.asynchronous_barriers import Softsync as Softsync
from sparkdl.strategies.asynchronous_sgd import (
    AsynchronousOuterOptimizer as AsynchronousOuterOptimizer,
)
from sparkdl.strategies.asynchronous_sgd import AsynchronousSGD as AsynchronousSGD
from sparkdl.strategies.asynchronous_sgd import (
    DelayedNesterov as DelayedNesterov,
)
from sparkdl.strategies.base import Needs as Needs
from sparkdl.strategies.base import Run as Run
from sparkdl.strategies.base import Strategy as Strategy
from sparkdl.strategies.elastic_averaging import ElasticAveraging as ElasticAveraging
from sparkdl.strategies.gossip_averaging import GossipAveraging as GossipAveraging
from sparkdl.strategies.outer_optimizer import OuterOptimizer as OuterOptimizer
from sparkdl.strategies.outer_optimizer import OuterSGD as OuterSGD
from sparkdl.strategies.parameter_averaging import ParameterAveraging as ParameterAveraging
from sparkdl.strategies.threshold_gradient_sharing import (
    ThresholdGradientSharing as ThresholdGradientSharing,
)
from sparkdl.strategies.worker_group import ColorTrees as ColorTrees

__all__ = sorted(name for name in globals() if name[0].isupper())
