"""What the replicas of each strategy send, how often, and over which links.

For rounds in the driver this follows from what a strategy declares: its wire format, its round
policy, whether the optimizer's state is exchanged. Sums among the workers go around a ring, as
gloo's and NCCL's do, or up and down a tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sparkdl.averager.policies.round_policy import All, RoundPolicy
from sparkdl.averager.values.wire_format import bytes_a_value
from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link
from sparkdl.strategies import (
    ElasticAveraging,
    GossipAveraging,
    GradientAllReduce,
    OuterOptimizer,
    ParameterAveraging,
    Strategy,
    ThresholdGradientSharing,
    TopK,
)

Topology = Literal["ring", "tree", "gather"]
PLACE_BYTES = 4
BACKWARD = 2 / 3
"""The part of a step that is its backward pass: twice the arithmetic of the forward pass."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The size of what replicas hold.

    Attributes:
        parameters: bytes of the trained parameters.
        buffers: bytes of the module's buffers.
        optimizer: bytes of the optimizer's floating-point state: as many as the parameters have
            with momentum, twice as many with Adam.
    """

    parameters: float
    buffers: float = 0.0
    optimizer: float = 0.0

    @property
    def model(self) -> float:
        """Bytes of parameters and buffers."""
        return self.parameters + self.buffers


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The exchanges of one strategy.

    Attributes:
        name: of the strategy.
        way: ``driver``: each worker with the center. ``hosts``: those of a host first, then each
            host with the center. ``group``: all workers among themselves. ``visits``: each worker
            with another, for whom it does not wait. ``neighbors``: with two others, for whom it
            does.
        up: bytes that a worker sends in an exchange.
        down: bytes that it receives; in a group, what is summed is counted once, as ``up``.
        period: steps after which the whole state has been exchanged.
        fragments: exchanges in which that happens.
        overlap: steps that a worker trains on while an exchange is under way.
        policy: makes the round policy, for rounds in the driver.
        in_step: whether that waits for everyone in each round.
        topology: how sums travel in a group; in a ``gather`` all receive what each sends.
        hidden: the part of a step in which a group may already exchange what is ready.
        buckets: how many equal parts become ready in that time, one after another.
        commit: bytes that one worker sends to the driver at an epoch's end.
        commit_every: steps after which it does so too; None for no extra copies.
    """

    name: str
    way: Literal["driver", "hosts", "group", "visits", "neighbors"]
    up: float
    down: float = 0.0
    period: int = 1
    fragments: int = 1
    overlap: int = 0
    policy: Callable[[], RoundPolicy] = All
    in_step: bool = True
    topology: Topology = "ring"
    hidden: float = 0.0
    buckets: int = 1
    commit: float = 0.0
    commit_every: int | None = None

    def windows(self, steps: int) -> list[int]:
        """Steps of each window of an epoch, which together are ``steps``."""
        ends = [
            -(-index * self.period // self.fragments)
            for index in range(1, steps * self.fragments // self.period + 1)
        ]
        if not ends or ends[-1] < steps:
            ends.append(steps)
        return [end - before for before, end in zip([0, *ends], ends, strict=False)]

    def sum_s(self, link: Link, workers: int) -> float:
        """Seconds that a group takes to sum one bucket, once all are there."""
        return sum_s(self.topology, self.up / self.buckets, link, workers)


def sum_s(topology: Topology, octets: float, link: Link, workers: int) -> float:
    """Seconds in which workers sum what each of them has, so that all have the sum.

    Args:
        topology: ``ring``: 2 (N - 1) messages of an N-th each. ``tree``: the whole, up a binary
            tree of ceil(log2 N) levels and down again. ``gather``: N - 1 times around a ring, the
            whole of each worker.
        octets: bytes that each worker has.
        link: between any two of them.
        workers: N; one alone sends nothing.

    Source: the alpha-beta model; for the tree of You, Buluc, Demmel 2017, arXiv:1708.02983.
    """
    hops, whole = workers - 1, octets / link.bandwidth
    if topology == "ring":
        return 2 * hops * (link.latency + whole / workers)
    if topology == "tree":
        return 2 * hops.bit_length() * (link.latency + whole)
    return hops * (link.latency + whole)


def summed_bytes(topology: Topology, octets: float, workers: int) -> float:
    """Bytes that pass the busiest worker's link in the busier direction, as in ``sum_s``."""
    hops = workers - 1
    if topology == "ring":
        return 2 * hops * octets / workers
    return octets * (hops if topology == "gather" else hops.bit_length())


def exchange_of(
    strategy: Strategy[Any] | Exchange, state: State, topology: Literal["ring", "tree"] = "ring"
) -> Exchange:
    """What a strategy's replicas send.

    Args:
        strategy: any; or what it sends, as it is.
        state: what a replica holds.
        topology: how workers sum among themselves.

    Raises:
        ConfigError: what it sends depends on values or shapes that a summary does not have.
    """
    if isinstance(strategy, Exchange):
        return strategy
    name, needs = str(strategy), strategy.needs
    period = _period(strategy)
    up, down = _through_driver(strategy, state)
    if isinstance(strategy, GossipAveraging):
        waits = strategy.mode == "symmetric"
        return Exchange(
            name=name,
            way="neighbors" if waits else "visits",
            up=0.0 if strategy.mode == "pull" else state.model,
            down=0.0 if strategy.mode == "push" else state.model,
            period=period,
            commit=state.model,
        )
    if not needs.collective:
        policy = strategy.round_policy
        streams = isinstance(strategy, OuterOptimizer)
        hogwild = isinstance(strategy, ElasticAveraging) and strategy.mode == "hogwild"
        overlap = strategy.overlap if isinstance(strategy, OuterOptimizer) else 0
        return Exchange(
            name=name,
            way="driver",
            up=up,
            down=down,
            period=period,
            fragments=strategy.fragments if streams else 1,
            overlap=period if hogwild else overlap,
            policy=lambda: strategy.round_policy,
            in_step=policy.in_step,
        )
    if isinstance(strategy, ParameterAveraging) and strategy.aggregation == "hierarchical":
        return Exchange(name=name, way="hosts", up=up, down=down, period=period)
    octets, kind = _summed(strategy, state, topology)
    reduces = isinstance(strategy, GradientAllReduce)
    return Exchange(
        name=name,
        way="group",
        up=octets,
        period=needs.minibatches_a_step if reduces else period,
        overlap=period if isinstance(strategy, ElasticAveraging) else 0,
        topology=kind,
        hidden=BACKWARD if reduces else 0.0,
        buckets=max(1, math.ceil(octets / (1e6 * strategy.bucket_mb))) if reduces else 1,
        commit=_through_driver(strategy, state)[0],
        commit_every=getattr(strategy, "commit_every", None),
    )


def _period(strategy: Strategy[Any]) -> int:
    period = getattr(strategy, "period", 1)
    if isinstance(period, int):
        return period
    if isinstance(strategy, OuterOptimizer):
        return strategy.period_in(1 << 30)
    raise ConfigError(
        f"the period of {strategy} is {period!r}, which is no number of steps: describe what it "
        "sends by a sparkdl.planner.exchanges.Exchange"
    )


def _through_driver(strategy: Strategy[Any], state: State) -> tuple[float, float]:
    """Bytes of a whole contribution, and of the reply to it."""
    kinds = {"parameters": state.parameters, "buffers": state.buffers}
    if strategy.needs.exchanges_optimizer_state:
        kinds["optimizer"] = state.optimizer
    up = down = 0.0
    for kind, octets in kinds.items():
        each_up, each_down = bytes_a_value(strategy.wire_format, kind)
        up, down = up + octets / 4 * each_up, down + octets / 4 * each_down
    if isinstance(strategy, ThresholdGradientSharing) and strategy.aggregation == "driver":
        share = _sparsity(strategy)
        # A reply has what any of the workers has sent, which with many of them is nearly all.
        up, down = min(up, up * share), down
    return up / strategy.fragments, down / strategy.fragments


def _summed(strategy: Strategy[Any], state: State, topology: Topology) -> tuple[float, Topology]:
    """Bytes that each worker of a group has to be summed, and how they travel."""
    if isinstance(strategy, ThresholdGradientSharing):
        return state.parameters * _sparsity(strategy), "gather"
    if isinstance(strategy, GradientAllReduce):
        if strategy.preconditioner is not None:
            raise _unknown(strategy, "K-FAC's factors have sizes that depend on the layers")
        if isinstance(strategy.compression, TopK):
            share = strategy.compression.fraction
            return state.parameters * share * (1 + PLACE_BYTES / 4), "gather"
        if strategy.compression in ("fp16", "bf16"):
            return state.parameters / 2, topology
        if strategy.compression is not None:
            raise _unknown(strategy, "what its compression sends depends on the layers' shapes")
        return state.parameters, topology
    whole = state.model + (state.optimizer if strategy.needs.exchanges_optimizer_state else 0.0)
    return whole, topology


def _sparsity(strategy: ThresholdGradientSharing) -> float:
    """The part of the bytes that is sent: the geometric middle of the range it adapts to."""
    if strategy.sparsity is None:
        raise _unknown(strategy, "with a constant threshold, what is sent depends on the gradients")
    low, high = strategy.sparsity
    return math.sqrt(max(low, 1e-9) * high)


def _unknown(strategy: Strategy[Any], why: str) -> ConfigError:
    return ConfigError(
        f"what {strategy} sends is not known: {why}. Leave it out of strategies, or put there "
        "what it sends, as sparkdl.planner.exchanges.Exchange(name=..., way=..., up=...)"
    )
