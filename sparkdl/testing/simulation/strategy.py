"""A strategy in virtual time: its own center, wire format, update and policy, without its workers.

What a worker has trained is one number. The center is the real one, and an oracle says after each
commit what it has to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.values.accumulator import Accumulator
from sparkdl.averager.values.center import Center as RealCenter
from sparkdl.averager.values.center_update import Contributions
from sparkdl.averager.values.chunks import Chunk
from sparkdl.protocols import Segment
from sparkdl.strategies import Strategy
from sparkdl.testing.simulation.plan import Plan
from sparkdl.testing.simulation.run import Outcome, simulate
from sparkdl.testing.simulation.values import PRIME, Center, Sum

Oracle = Callable[[float, Contributions, Mapping[int, float], Mapping[int, float]], float]
"""(center before, contributions, what ranks have trained, what they began with) -> center after"""

TOLERANCE = 1e-12 * PRIME
"""Values are up to a few times as large, and where they cancel their rounding errors stay."""


def simulate_strategy(
    strategy: Strategy[Any],
    plan: Plan,
    oracle: Oracle,
    *,
    most_ahead: int | None = None,
) -> Outcome:
    """Run a plan with what a strategy has the driver do.

    Args:
        strategy: whose rounds they are; a window of the plan counts as one step.
        plan: what happens.
        oracle: what each commit makes of the center, by other code than the strategy's. It may
            remember: a run needs an oracle of its own.
        most_ahead: as for ``simulate``.

    Raises:
        Violation: something that must always hold did not.
        AssertionError: the center is not what the oracle says.
    """

    def coordinator(*arguments: Any, **options: Any) -> Coordinator:
        return Coordinator(*arguments, policy=strategy.round_policy, **options)

    center = partial(StrategyCenter, strategy, oracle)
    return simulate(plan, coordinator, center=center, most_ahead=most_ahead)


class StrategyCenter(Center):
    """The averager's center in the place of the simulation's.

    It has as many fragments as the strategy, each of as many equal numbers as a contribution has
    messages. Workers are sent the number that the fragment of the last round consists of.

    Args:
        strategy: whose wire format and update it has.
        oracle: what each commit makes of it.
        chunks: into how many messages a contribution is cut.
    """

    def __init__(self, strategy: Strategy[Any], oracle: Oracle, chunks: int) -> None:
        super().__init__(chunks)
        self._wire_format = strategy.wire_format
        size = strategy.fragments * chunks
        (self._segment,) = layout = (Segment("parameters", torch.float64, size),)
        ones = torch.ones(size, dtype=torch.float64)
        self._center = RealCenter(layout, [ones], 1, self._wire_format, strategy.center_update)
        # Messages of one number, where it would cut none of so few.
        self._center._fragments = [
            [Chunk(0, index, index + 1) for index in range(first, first + chunks)]
            for first in range(0, size, chunks)
        ]
        self._of_round = self._center.next_fragment
        self._oracle = oracle
        self._sent: dict[int, float] = {}
        self._rounds = 0

    def send_to(self, rank: int) -> float:
        """What a worker is sent; its contribution is encoded as a change since."""
        self._sent[rank] = self.value
        return self.value

    def open_sum(self, ranks: Sequence[int]) -> None:
        """Begin a sum of the next fragment."""
        self._of_round = self._center.next_fragment
        self._look()
        self.sum = _RealSum(self._center.open_sum(ranks), self._encode, self._center.scale)

    def commit(self, contributions: Contributions) -> None:
        """Have the sum change the center as the strategy says."""
        self._rounds += 1
        self._center.commit(contributions)
        self._look()
        self.sum = None

    def start_epoch(self) -> None:
        """Begin with the first fragment again."""
        self._center.start_epoch()

    def require(
        self, before: float, contributions: Contributions, values: Mapping[int, float]
    ) -> None:
        """Check that the center is what the oracle says."""
        expected = before
        if values:
            told = replace(contributions, round=self._rounds)
            expected = self._oracle(before, told, values, self._sent)
        assert math.isclose(self.value, expected, rel_tol=1e-12, abs_tol=TOLERANCE), (
            f"the center is {self.value!r} after {contributions}, and the oracle's {expected!r}"
        )

    def _look(self) -> None:
        (self.value,) = {chunk.of(self._center.values).item() for chunk in self._of_round}

    def _encode(self, rank: int, value: float) -> Tensor:
        base = torch.tensor([self._sent[rank]], dtype=torch.float64)
        return self._wire_format.encode(torch.full_like(base, value), base, self._segment)


class _RealSum(Sum):
    """An accumulator of one number a message."""

    def __init__(
        self,
        total: Accumulator,
        encode: Callable[[int, float], Tensor],
        scale: Callable[[int], float],
    ) -> None:
        self._total = total
        self._encode = encode
        self._scale = scale

    def declare(self, rank: int, weight: int, staleness: int = 0) -> None:
        """Say what a contribution weighs, and scale it by how stale it is."""
        self._total.declare(rank, weight, self._scale(staleness))

    def turn(self, index: int) -> int | None:
        """Whose turn it is to add a chunk."""
        return self._total.turn(index)

    def add(self, rank: int, index: int, value: float) -> None:
        """Add a chunk, encoded."""
        self._total.add(rank, index, self._encode(rank, value))
