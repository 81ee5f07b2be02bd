"""What the replicas of each strategy send, how often, and over which links.

For rounds in the driver this follows from what a strategy declares: its wire format, its round
policy, whether the optimizer's state is exchanged. Sums among the workers go around a ring, as
gloo's and NCCL's do, or up and down a tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal

from sparkdl.averager.policies.round_policy import All, RoundPolicy
from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link
from sparkdl.planner.traffic import Traffic, traffic_of
from sparkdl.protocols import float32_layout
from sparkdl.strategies import (
    GossipAveraging,
    GradientAllReduce,
    Strategy,
    ThresholdGradientSharing,
    TopK,
)

Topology = Literal["ring", "tree", "gather"]
PLACE_BYTES = 4
BUCKET_MB = 25.0
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
    strategy: Strategy[Any] | Exchange,
    state: State,
    workers: int,
    topology: Literal["ring", "tree"] = "ring",
) -> Exchange:
    """What a strategy's replicas send.

    Args:
        strategy: any; or what it sends, as it is.
        state: what a replica holds.
        workers: how many there are.
        topology: how workers sum among themselves.

    Raises:
        ConfigError: what it sends depends on values or shapes that are not known, or it is no
            strategy.
    """
    if isinstance(strategy, Exchange):
        return strategy
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"{strategy!r:.200} is no strategy, such as ParameterAveraging(period=5)")
    name, needs = short_name(strategy), strategy.needs
    kinds = {"parameters": state.parameters, "buffers": state.buffers}
    if needs.exchanges_optimizer_state:
        kinds["optimizer"] = state.optimizer
    layout = float32_layout(kinds)
    if isinstance(strategy, GossipAveraging):
        return Exchange(
            name=name,
            way="neighbors" if strategy.mode == "symmetric" else "visits",
            up=0.0 if strategy.mode == "pull" else state.model,
            down=0.0 if strategy.mode == "push" else state.model,
            period=strategy.period,
            commit=state.model,
        )
    if isinstance(strategy, ThresholdGradientSharing):
        return _thresholds(strategy, name, state, workers)
    if isinstance(strategy, GradientAllReduce) and isinstance(strategy.compression, TopK):
        octets = state.parameters * strategy.compression.fraction * (1 + PLACE_BYTES / 4)
        return Exchange(
            name=name,
            way="group",
            up=octets,
            period=strategy.accumulate,
            topology="gather",
            commit=sum(kinds.values()),
            commit_every=strategy.commit_every,
        )
    traffic = None
    if not _depends_on_shapes(strategy):
        traffic = traffic_of(strategy, layout, [_Flat(layout[0].numel)])  # type: ignore[list-item]
    if traffic is None:
        raise _unknown(name, "it depends on the layers, on a schedule, or on the strategy's code")
    return of_traffic(name, traffic, strategy, topology)


def of_traffic(
    name: str,
    traffic: Traffic,
    strategy: Strategy[Any] | None = None,
    topology: Literal["ring", "tree"] = "ring",
) -> Exchange:
    """The exchanges of a training whose traffic is known.

    Args:
        name: of its strategy.
        traffic: what it exchanges.
        strategy: that one; without, everyone is waited for in each round, and nothing is hidden
            but what ``traffic`` says.
        topology: how workers sum among themselves.
    """
    ways: dict[str, Any] = {"driver": "driver", "hosts": "hosts", "workers": "group"}
    overlap, buckets = getattr(strategy, "overlap", 0), 1
    if traffic.hidden == "steps" and not overlap:
        overlap = traffic.period
    if traffic.hidden == "backward":
        bucket_bytes = 1e6 * getattr(strategy, "bucket_mb", BUCKET_MB)
        buckets = max(1, math.ceil(traffic.up / bucket_bytes))
    return Exchange(
        name=name,
        way=ways[traffic.through],
        up=traffic.up / traffic.fragments,
        down=traffic.down / traffic.fragments,
        period=traffic.period,
        fragments=traffic.fragments,
        overlap=overlap,
        policy=All if strategy is None else lambda: strategy.round_policy,
        in_step=strategy is None or strategy.round_policy.in_step,
        topology=topology,
        hidden=BACKWARD if traffic.hidden == "backward" else 0.0,
        buckets=buckets,
        commit=traffic.state,
        commit_every=getattr(strategy, "commit_every", None),
    )


def short_name(strategy: Strategy[Any]) -> str:
    """A strategy with its period, and those arguments that are not the defaults."""
    if not is_dataclass(strategy):
        return type(strategy).__name__
    given = []
    for each in fields(strategy):
        value, usual = getattr(strategy, each.name), each.default
        if each.default_factory is not MISSING:
            usual = each.default_factory()
        if each.name == "period" or value != usual:
            given.append(f"{each.name}={value!r}")
    return f"{type(strategy).__name__}({', '.join(given)})"


@dataclass(frozen=True)
class _Flat:
    """All trained parameters as one, of which only the size is known; for ``traffic_of``."""

    size: int

    def numel(self) -> int:
        """How many numbers."""
        return self.size

    def element_size(self) -> int:
        """Bytes of each, as float32."""
        return 4


def _depends_on_shapes(strategy: Strategy[Any]) -> bool:
    """Whether it takes the layers' shapes to say what is sent."""
    if not isinstance(strategy, GradientAllReduce):
        return False
    rounded = strategy.compression in (None, "fp16", "bf16")
    return not rounded or strategy.preconditioner is not None


def _thresholds(
    strategy: ThresholdGradientSharing, name: str, state: State, workers: int
) -> Exchange:
    """Messages with the part of the entries that is in the middle of what the threshold adapts to.

    An entry is its place; the driver's reply has the places and sums of all that any worker sent.
    """
    if strategy.sparsity is None:
        raise _unknown(name, "with a constant threshold it depends on the gradients")
    low, high = strategy.sparsity
    sent = state.parameters * math.sqrt(max(low, 1e-9) * high)
    if strategy.aggregation == "driver":
        down = min(state.parameters, workers * sent * (1 + PLACE_BYTES / 4))
        return Exchange(name=name, way="driver", up=sent, down=down, period=strategy.period)
    return Exchange(
        name=name,
        way="group",
        up=sent,
        period=strategy.period,
        topology="gather",
        commit=state.model,
        commit_every=strategy.commit_every,
    )


def _unknown(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"what {name} sends is not known: {why}. Leave it out of strategies, or put there what it "
        "sends: sparkdl.planner.exchanges.Exchange(name=..., way=..., up=...)"
    )
