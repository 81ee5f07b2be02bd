"""What the replicas of each strategy send, how often, and over which links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import torch

from sparkdl.averager.round_policy import All, RoundPolicy
from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link
from sparkdl.planner.traffic import Traffic, traffic_of
from sparkdl.protocols import float32_layout
from sparkdl.strategies import GossipAveraging, Strategy


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The exchanges of one strategy.

    Attributes:
        name: of the strategy.
        way: ``driver``: each worker with the center. ``hosts``: those of a host first, then each
            host with the center. ``group``: all workers among themselves. ``visits``: each worker
            with another, for whom it does not wait. ``neighbors``: with two others, for whom it
            does.
        up: bytes that a worker sends in an exchange; in a group, that it has to be summed around a
            ring, as by gloo and NCCL. To gather S bytes of all N takes as long as a sum of N S / 2.
        down: bytes that it receives; in a group 0.
        period: steps after which the whole state has been exchanged.
        fragments: exchanges in which that happens.
        closing: how many further exchanges there are at an epoch's end.
        final: bytes of a worker's last reply of an epoch, from the driver; None if it is as long as
            the others.
        overlap: steps that a worker trains on while an exchange is under way.
        policy: makes the round policy, for rounds in the driver.
        buckets: in a group, how many equal parts are exchanged one after the other, each as soon as
            the backward pass has it ready.
        commit: bytes that one worker sends to the driver at an epoch's end.
        commit_every: steps after which it does so too; None for no extra copies.
    """

    name: str
    way: Literal["driver", "hosts", "group", "visits", "neighbors"]
    up: float
    down: float = 0.0
    period: int = 1
    fragments: int = 1
    closing: int = 0
    final: float | None = None
    overlap: int = 0
    policy: Callable[[], RoundPolicy] = All
    buckets: int = 1
    commit: float = 0.0
    commit_every: int | None = None

    def rounds(self, steps: int) -> int:
        """How many exchanges an epoch of so many steps has."""
        return -(-steps * self.fragments // self.period) + self.closing

    def windows(self, steps: int, most: int) -> list[int]:
        """Steps of an epoch's first ``most`` windows; 0 in those that only close it."""
        trained = self.rounds(steps) - self.closing
        ends = [
            min(steps, -(-each * self.period // self.fragments))
            for each in range(1, min(trained, most) + 1)
        ]
        lengths = [end - before for before, end in zip([0, *ends], ends, strict=False)]
        return lengths + [0] * min(self.closing, most - len(ends))


def around_s(octets: float, link: Link, workers: int) -> float:
    """Seconds of a sum around a ring: 2 (N - 1) messages one after the other, of an N-th each.

    Args:
        octets: bytes that each worker has to be summed.
        link: of each.
        workers: N; one alone sends nothing.

    Source: the alpha-beta model.
    """
    return 2 * (workers - 1) * (link.latency + octets / workers / link.bandwidth)


def exchange_of(
    strategy: Strategy[Any] | Exchange,
    state: Mapping[str, float],
) -> Exchange:
    """What a strategy's replicas send.

    Args:
        strategy: any; or what it sends, as it is.
        state: bytes of a replica's ``parameters``, ``buffers`` and ``optimizer``, as float32.

    Raises:
        ConfigError: what it sends depends on values or shapes that are not known, or it is no
            strategy.
    """
    if isinstance(strategy, Exchange):
        return strategy
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"{strategy!r:.200} is no strategy, such as ParameterAveraging(period=5)")
    kinds, name = dict(state), short_name(strategy)
    if not strategy.needs.exchanges_optimizer_state:
        del kinds["optimizer"]
    if isinstance(strategy, GossipAveraging):
        model = state["parameters"] + state["buffers"]
        up, down = (0.0 if strategy.mode == other else model for other in ("pull", "push"))
        return Exchange(
            name=name,
            way="neighbors" if strategy.mode == "symmetric" else "visits",
            up=up,
            down=down,
            period=strategy.period,
            commit=model,
        )
    layout, traffic = float32_layout(kinds), None
    compressed = getattr(strategy, "compression", None) not in (None, "fp16", "bf16")
    if not compressed:
        trained = torch.empty(layout[0].numel, device="meta")  # only its size is known
        traffic = traffic_of(strategy, layout, [trained])
    if traffic is None:
        raise ConfigError(
            f"what {name} sends is not known: it depends on the layers, on the values, on a "
            "schedule, on trees of workers or on the strategy's own code. Leave it out of "
            "strategies, or put there what it sends, an Exchange of "
            "sparkdl.planner.simulation.exchanges"
        )
    found = of_traffic(name, traffic, strategy)
    if found.way != "driver":
        return found
    # Fragments are all sent once more. A replica that is pulled to the center that it meets says
    # that it has none of its own left, and is sent the final one.
    meets = getattr(strategy, "mode", "") in ("asynchronous", "round_robin")
    closing = found.fragments - 1 + meets
    return replace(found, closing=closing, final=sum(kinds.values()))


def of_traffic(
    name: str,
    traffic: Traffic,
    strategy: Strategy[Any] | None = None,
) -> Exchange:
    """The exchanges of a training whose traffic is known.

    Args:
        name: of its strategy.
        traffic: what it exchanges.
        strategy: that one; without it, everyone is waited for in each round.
    """
    ways: dict[str, Any] = {"driver": "driver", "hosts": "hosts", "workers": "group"}
    hides = traffic.period if traffic.hidden == "steps" else 0
    return Exchange(
        name=name,
        way=ways[traffic.through],
        up=traffic.up / traffic.fragments,
        down=traffic.down / traffic.fragments,
        period=traffic.period,
        fragments=traffic.fragments,
        overlap=getattr(strategy, "overlap", 0) or hides,
        policy=All if strategy is None else lambda: strategy.round_policy,
        buckets=traffic.buckets,
        commit=traffic.state,
        commit_every=getattr(strategy, "commit_every", None),
    )


def short_name(strategy: Strategy[Any]) -> str:
    """A strategy with its period, and those arguments that are not the defaults."""
    if not is_dataclass(strategy):
        return type(strategy).__name__
    given = [
        f"{each.name}={getattr(strategy, each.name)!r}"
        for each in fields(strategy)
        if each.name == "period" or getattr(strategy, each.name) != each.default
    ]
    return f"{type(strategy).__name__}({', '.join(given)})"
