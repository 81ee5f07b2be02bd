"""What replicas exchange: how many bytes, over which links, how often.

What the table of docs/strategies.md says is tested against ``traffic_of`` strategies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdl.protocols import Layout
    from sparkdl.strategies import Strategy

PLACES = ("driver", "executors", "hierarchical")
"""Where ``ParameterAveraging`` forms means."""
BACKWARD = 2 / 3
"""The part of a step that is its backward pass: twice the arithmetic of the forward pass."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the workers of a training exchange, and how.

    Attributes:
        through: ``driver``, ``hosts`` (the driver, with one contribution a host) or ``workers``
            (summed among themselves, in a ring).
        up: bytes that a worker contributes in a period.
        down: bytes that it is sent back; 0 among the workers, where they pass in the same sums.
        period: steps in which all values are exchanged once.
        fragments: how many exchanges that takes, each with its part of the values.
        waits: whether everybody waits for everybody else in an exchange.
        hidden: what goes on during an exchange: ``backward`` passes, so that its time is counted as
            computing, further ``steps``, or nothing.
        buckets: in how many messages, one after the other, a sum travels that hides behind the
            backward pass; the last one cannot.
        state: bytes that the driver is sent at the end of an epoch beside them.
        places: values of the strategy's ``aggregation`` that would exchange the same values.
    """

    through: Literal["driver", "hosts", "workers"]
    up: float
    down: float = 0.0
    period: int = 1
    fragments: int = 1
    waits: bool = True
    hidden: Literal["", "backward", "steps"] = ""
    buckets: int = 1
    state: float = 0.0
    places: tuple[str, ...] = ()

    @property
    def every(self) -> float:
        """Steps between two exchanges."""
        return self.period / self.fragments

    def load(self, workers: int, per_host: int = 1) -> float:
        """How many contributions' worth of bytes passes the busiest link in an exchange.

        Args:
            workers: N.
            per_host: how many of them are on one host.
        """
        if self.through == "workers":
            return 2 * (workers - 1) / workers
        return math.ceil(workers / per_host) if self.through == "hosts" else workers

    def bytes_a_step(self, workers: int, per_host: int = 1) -> float:
        """Bytes a step over the busiest link, in its busier direction."""
        return self.load(workers, per_host) * max(self.up, self.down) / self.period

    def passing(self, workers: int, per_host: int = 1) -> float:
        """Bytes over the busiest link one after the other in an exchange that all wait for."""
        return self.load(workers, per_host) * (self.up + self.down) / self.fragments

    def hops(self, workers: int) -> int:
        """Messages of an exchange that wait for each other, each for the link's latency."""
        return 2 * (workers - 1) * self.buckets if self.through == "workers" else 2

    def shown(self, seconds: float, step_s: float) -> float:
        """What is waited for of an exchange, the rest of which the backward pass hides.

        With k equal buckets, the first is ready when a k-th of the backward pass is over, and the
        last one when all of it is.

        Args:
            seconds: of the exchange.
            step_s: of a step's computing.
        """
        return max(seconds - self._behind_s(step_s), seconds / self.buckets)

    def whole(self, shown: float, step_s: float) -> float:
        """What an exchange takes of which so much is waited for: the inverse of ``shown``."""
        return min(shown + self._behind_s(step_s), shown * self.buckets)

    def _behind_s(self, step_s: float) -> float:
        return BACKWARD * step_s * (1 - 1 / self.buckets)


def traffic_of(
    strategy: Strategy[Any], layout: Layout, trained: Iterable[Tensor]
) -> Traffic | None:
    """What a strategy exchanges.

    Args:
        strategy: of the training; one's own too if its values pass through the driver.
        layout: the segments of the replicas' state that they agree on.
        trained: the parameters that are trained.

    Returns:
        None where the bytes depend on the values, on a schedule, or on how the strategy's own code
        uses a group of workers, and for sums along trees, whose time does not follow from them.
    """
    from sparkdl.strategies import All, ElasticAveraging, GradientAllReduce, ParameterAveraging

    summed = sum(each.numel * each.center_dtype.itemsize for each in layout)
    state = sum(each.numel * each.dtype.itemsize for each in layout)
    period = getattr(strategy, "period", 1)
    along_trees = getattr(strategy, "reduction", None) is not None
    if strategy.needs.peers or along_trees or not isinstance(period, int):
        return None
    if isinstance(strategy, GradientAllReduce):
        gradients = list(trained)
        sent = _gradients(strategy.compression, gradients)
        # Factors, rows, and the parameters that others have stepped or sent, travel besides.
        sharded = strategy.shard_optimizer or strategy.shard_parameters
        others = strategy.preconditioner, strategy.hybrid
        if sent is None or sharded or others != (None, None):
            return None
        whole = sum(each.numel() * each.element_size() for each in gradients)
        return Traffic(
            through="workers",
            up=sent,
            period=strategy.accumulate,
            hidden="backward",
            buckets=max(1, math.ceil(whole / (strategy.bucket_mb * 2**20))),
            state=state,
        )
    if strategy.needs.collective:
        if not isinstance(strategy, (ElasticAveraging, ParameterAveraging)):
            return None
        if strategy.aggregation == "hierarchical":
            return Traffic(through="hosts", up=state, down=state, period=period, places=PLACES)
        elastic = isinstance(strategy, ElasticAveraging)
        return Traffic(
            through="workers",
            up=summed,
            period=period,
            hidden="steps" if elastic else "",
            state=state,
            places=() if elastic else PLACES,
        )
    wire = strategy.wire_format
    ups, downs = ([(each, way(each)) for each in layout] for way in (wire.contribution, wire.reply))
    if any(packing.varies for _, packing in (*ups, *downs)):
        return None
    up, down = (
        sum(packing.numel(each.numel) * packing.dtype.itemsize for each, packing in way)
        for way in (ups, downs)
    )
    plain = isinstance(strategy, ParameterAveraging) and strategy.wire_dtype == "float32"
    goes_on = strategy.needs.steps_ahead or getattr(strategy, "overlap", 0)
    return Traffic(
        through="driver",
        up=up,
        down=down,
        period=period,
        fragments=strategy.fragments,
        waits=isinstance(strategy.round_policy, All),
        hidden="steps" if goes_on else "",
        places=PLACES if plain and strategy.round_policy.in_step else (),
    )


def _gradients(compression: Any, trained: Iterable[Tensor]) -> float | None:
    """Bytes of a step's gradients as they are summed; None if that depends on their values."""
    from sparkdl.strategies import PowerSGD

    sent = 0
    for each in trained:
        if compression is None:
            sent += each.numel() * each.element_size()
        elif compression in ("fp16", "bf16"):
            sent += each.numel() * 2
        elif isinstance(compression, PowerSGD):
            values = each.numel()
            if compression.compresses(each.shape):
                rows, columns = each.shape[0], values // each.shape[0]
                values = min(compression.rank, rows, columns) * (rows + columns)
            sent += values * each.element_size()
        else:
            return None
    return float(sent)
