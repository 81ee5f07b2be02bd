"""The real center, with a strategy's wire format and update, in the simulation's virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from sparkdl.averager.accumulator import Accumulator
from sparkdl.averager.center import Center
from sparkdl.averager.center_update import Contributions
from sparkdl.averager.coordinator import Coordinator
from sparkdl.averager.wire import Chunk
from sparkdl.protocols import Segment
from sparkdl.strategies import Strategy
from sparkdl.testing.simulation import Outcome, random_plan, simulate
from sparkdl.testing.simulation.values import Center as Simulated
from sparkdl.testing.simulation.values import Sum

Oracle = Callable[[float, Contributions, Mapping[int, float], Mapping[int, float]], float]
"""(center before, contributions, what ranks have trained, what they began with) -> center after"""


class RealSum(Sum):
    """An accumulator of one number a message."""

    def __init__(
        self,
        total: Accumulator,
        encode: Callable[[int, float], torch.Tensor],
        scale: Callable[[int], float],
    ) -> None:
        self._total = total
        self._encode = encode
        self._scale = scale

    def declare(self, rank: int, weight: int, staleness: int = 0) -> None:
        self._total.declare(rank, weight, self._scale(staleness))

    def turn(self, index: int) -> int | None:
        return self._total.turn(index)

    def add(self, rank: int, index: int, value: float) -> None:
        self._total.add(rank, index, self._encode(rank, value))


class RealCenter(Simulated):
    """A center of fragments, each of as many equal numbers as a contribution has messages.

    What a worker trains is one number, which it is sent as the fragment of the last round.
    """

    def __init__(self, strategy: Strategy[Any], oracle: Oracle, chunks: int) -> None:
        super().__init__(chunks)
        self._wire_format = strategy.wire_format
        size = strategy.fragments * chunks
        (self._segment,) = layout = (Segment("parameters", torch.float64, size),)
        ones = torch.ones(size, dtype=torch.float64)
        self._center = Center(layout, [ones], 1, self._wire_format, strategy.center_update)
        self._center._fragments = [
            [Chunk(0, index, index + 1) for index in range(first, first + chunks)]
            for first in range(0, size, chunks)
        ]
        self._of_round = self._center.next_fragment
        self._oracle = oracle
        self._sent: dict[int, float] = {}
        self._rounds = 0

    def send_to(self, rank: int) -> float:
        self._sent[rank] = self.value
        return self.value

    def open_sum(self, ranks: Sequence[int]) -> None:
        self._of_round = self._center.next_fragment
        self._look()
        self.sum = RealSum(self._center.open_sum(ranks), self._encode, self._center.scale)

    def commit(self, contributions: Contributions) -> None:
        self._rounds += 1
        self._center.commit(contributions)
        self._look()
        self.sum = None

    def start_epoch(self) -> None:
        self._center.start_epoch()

    def _look(self) -> None:
        """See what the round's fragment is now."""
        (self.value,) = {chunk.of(self._center.values).item() for chunk in self._of_round}

    def require(
        self, before: float, contributions: Contributions, values: Mapping[int, float]
    ) -> None:
        if values:
            contributions = replace(contributions, round=self._rounds)
            before = self._oracle(before, contributions, values, self._sent)
        assert self.value == pytest.approx(before, rel=1e-12)

    def _encode(self, rank: int, value: float) -> torch.Tensor:
        base = torch.tensor([self._sent[rank]], dtype=torch.float64)
        return self._wire_format.encode(torch.full_like(base, value), base, self._segment)


def simulated(strategy: Strategy[Any], oracle: Callable[[], Oracle], seeds: range) -> list[Outcome]:
    """Run a strategy's decisions and its center under many schedules."""

    def coordinator(*arguments: Any, **options: Any) -> Coordinator:
        return Coordinator(*arguments, policy=strategy.round_policy, **options)

    return [
        simulate(random_plan(seed), coordinator, center=partial(RealCenter, strategy, oracle()))
        for seed in seeds
    ]
