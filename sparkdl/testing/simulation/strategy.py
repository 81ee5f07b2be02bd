"""A strategy in virtual time: its own center, wire format, update and policy, without its workers.

What a worker has trained is a single number. The center is the real one, and after each commit an
oracle says what it has to be.
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
from sparkdl.averager.coordination.run_state import Restart, RunSpec
from sparkdl.averager.values.accumulator import Accumulator
from sparkdl.averager.values.center import Center as RealCenter
from sparkdl.averager.values.center_update import Contributions
from sparkdl.averager.values.packing import Chunk
from sparkdl.protocols import Segment
from sparkdl.strategies import Strategy
from sparkdl.testing.simulation.plan import Plan
from sparkdl.testing.simulation.run import Outcome, simulate
from sparkdl.testing.simulation.values import PRIME, Center, Sum

Oracle = Callable[[float, Contributions, Mapping[int, float], Mapping[int, float]], float]
"""(center before, contributions, what ranks trained, what they began with) -> center after"""

TOLERANCE = 1e-12 * PRIME
"""Values are up to a few times PRIME, and their rounding errors stay even where they cancel."""


def simulate_strategy(
    strategy: Strategy[Any],
    plan: Plan,
    oracle: Oracle,
    *,
    most_ahead: int | None = None,
) -> Outcome:
    """Run a plan with what a strategy has the driver do.

    Args:
        strategy: determines the rounds; a window of the plan counts as one step.
        plan: what happens.
        oracle: computes the center after each commit, with code other than the strategy's. It may
            have state, so each run needs an oracle of its own.
        most_ahead: as for ``simulate``.

    Raises:
        Violation: something that must always hold did not.
        AssertionError: the center is not what the oracle says.
    """

    def coordinator(spec: RunSpec, now: float, restart: Restart) -> Coordinator:
        return Coordinator(replace(spec, policy=strategy.round_policy), now, restart)

    center = partial(StrategyCenter, strategy, oracle)
    return simulate(plan, coordinator, center=center, most_ahead=most_ahead)


class StrategyCenter(Center):
    """The averager's center in place of the simulation's.

    It has as many fragments as the strategy, each of as many equal numbers as a contribution has
    messages. Workers are sent the number that the last round's fragment consists of.

    Args:
        strategy: provides its wire format and update.
        oracle: says what it has to be after each commit.
        chunks: the number of messages that make up a contribution.
    """

    def __init__(self, strategy: Strategy[Any], oracle: Oracle, chunks: int) -> None:
        super().__init__(chunks)
        self._wire_format = strategy.wire_format
        size = strategy.fragments * chunks
        (self._segment,) = layout = (Segment("parameters", torch.float64, size),)
        ones = torch.ones(size, dtype=torch.float64)
        self._update = strategy.center_update
        self._center = RealCenter(layout, [ones], 1, self._wire_format, self._update)
        # One number per message, although the format would not split so few.
        self._center._fragments = [
            [Chunk(0, index, index + 1) for index in range(first, first + chunks)]
            for first in range(0, size, chunks)
        ]
        self._of_round = self._center.next_fragment
        self._oracle = oracle
        self._sent: dict[int, float] = {}
        self._rounds = 0

    def send_to(self, rank: int) -> float:
        """The value that a worker is sent; its contribution is encoded as the change from it."""
        self._sent[rank] = self.value
        return self.value

    def open_sum(self, ranks: Sequence[int]) -> None:
        """Start a sum of the next fragment."""
        self._of_round = self._center.next_fragment
        self._look()
        self.sum = _RealSum(self._center.open_sum(ranks), self._encode, self._center.scale)

    def commit(self, contributions: Contributions) -> None:
        """Apply the sum to the center as the strategy says."""
        self._rounds += 1
        self._center.commit(contributions)
        self._look()
        self.sum = None

    def start_epoch(self) -> None:
        """Start again with the first fragment."""
        self._center.start_epoch()

    def require(
        self, before: float, contributions: Contributions, values: Mapping[int, float]
    ) -> None:
        """Check that the center is what the oracle says."""
        expected = before
        if values or self._update.moves_alone(self._rounds):
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
    """An accumulator with one number per message."""

    def __init__(
        self,
        total: Accumulator,
        encode: Callable[[int, float], Tensor],
        scale: Callable[[int], float],
    ) -> None:
        self._total = total
        self._encode = encode
        self._scale = scale

    def declare(self, rank: int, weight: float, staleness: int = 0) -> None:
        """Say what a contribution weighs, and scale it by how stale it is."""
        self._total.declare(rank, weight, self._scale(staleness))

    def turn(self, index: int) -> int | None:
        """The rank whose turn it is to add a chunk."""
        return self._total.turn(index)

    def add(self, rank: int, index: int, value: float) -> None:
        """Add a chunk, encoded."""
        self._total.add(rank, index, self._encode(rank, value))
