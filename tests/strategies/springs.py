"""Elastic averaging by hand, for the tests of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import trainings
from decided import Told, do
from torch import nn
from toys import batches_by_hand, classification, mlp

from sparkdl.events import WindowReport
from sparkdl.strategies import ElasticAveraging, Run

SIZES = [40, 34, 22]
DATA = classification(SIZES)
STRATEGY = ElasticAveraging(period=2, moving_rate=0.2)


job = partial(trainings.job, strategy=STRATEGY)


class ByHand:
    """Zhang et al.'s algorithms 1 and 2 in numpy: flat vectors, gradients of torch.

    Args:
        rate: the moving rate.
        momentum: of each worker.
        looks_ahead: whether gradients are taken at x + momentum * v.
        ends_ahead: whether springs end there too, as torch's Nesterov has it.
        reads: whether a spring's other end is the center that its worker has read last.
    """

    def __init__(
        self,
        rate: float,
        momentum: float = 0.0,
        *,
        looks_ahead: bool = False,
        ends_ahead: bool = False,
        reads: bool = False,
    ) -> None:
        self.module = mlp().train()
        self.center = self._flat(self.module.parameters())
        self._rate, self._momentum = rate, momentum
        self._ahead = momentum if looks_ahead else 0.0
        self._ends_ahead, self._reads = ends_ahead, reads
        self.own = [self.center] * len(SIZES)
        self.read = [self.center] * len(SIZES)
        self.velocity: list[Any] = [0.0] * len(SIZES)
        self.pull: list[Any] = [0.0] * len(SIZES)

    def begin(self, rank: int) -> None:
        """At the center, and at rest."""
        self.own[rank], self.velocity[rank], self.pull[rank] = self.center, 0.0, 0.0
        self.read[rank] = self.center

    def place(self, rank: int) -> np.ndarray:
        """Where a worker's gradients are taken."""
        return self.own[rank] + self._ahead * self.velocity[rank]

    def train(self, rank: int, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for features, targets in batches:
            nn.utils.vector_to_parameters(
                torch.from_numpy(self.place(rank)), self.module.parameters()
            )
            self.module.zero_grad()
            outputs = self.module(torch.from_numpy(features))
            nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
            gradient = self._flat(p.grad for p in self.module.parameters())
            self.velocity[rank] = self._momentum * self.velocity[rank] - 0.1 * gradient
            self.own[rank] = self.own[rank] + self.velocity[rank] - self.pull[rank]
            self.pull[rank] = 0.0

    def meet(self, ranks: list[int]) -> None:
        """The exchange of some workers with one center."""
        for rank in ranks:
            end = self.place(rank) if self._ends_ahead else self.own[rank]
            held = self.read[rank] if self._reads else self.center
            self.pull[rank] = self._rate * (end - held)
        self.center = self.center + sum(self.pull[rank] for rank in ranks)

    def outcome(self) -> nn.Module:
        nn.utils.vector_to_parameters(torch.from_numpy(self.center), self.module.parameters())
        return self.module

    @staticmethod
    def _flat(tensors: Any) -> np.ndarray:
        return np.concatenate([tensor.detach().numpy().ravel() for tensor in tensors])


def in_step(hand: ByHand, epochs: int) -> nn.Module:
    """Windows of two minibatches of all who have some left."""
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(DATA, rank, epoch, 4) for rank in range(3)]
        for start in range(0, max(map(len, plans)), 2):
            ranks = [rank for rank in range(3) if start < len(plans[rank])]
            for rank in ranks:
                hand.train(rank, plans[rank][start : start + 2])
            hand.meet(ranks)
    return hand.outcome()


def as_decided(decisions: list[Told], hand: ByHand | None = None) -> nn.Module:
    """What a run has committed, and nothing else."""
    hand, steps = hand or ByHand(0.2), dict.fromkeys(range(3), 0)
    committed: list[WindowReport] = []
    for decision in decisions:
        if isinstance(decision, do.report) and isinstance(decision.event, WindowReport):
            committed.append(decision.event)
            continue
        for window in committed:
            plan = batches_by_hand(DATA, window.rank, window.epoch, 4)
            hand.train(window.rank, plan[steps[window.rank] : window.step_of_epoch])
            steps[window.rank] = 0 if window.last else window.step_of_epoch
        hand.meet([window.rank for window in committed if window.examples])
        committed = []
        if isinstance(decision, do.welcome):
            hand.begin(decision.member.rank)
        if isinstance(decision, do.reply):
            hand.read[decision.member.rank] = hand.center
    return hand.outcome()


SPRINGS: dict[int, Any] = {}


@dataclass(frozen=True)
class Watched(ElasticAveraging):
    """Lets a test see the replicas when all is over."""

    def start(self, run: Run) -> Any:
        SPRINGS[run.rank] = super().start(run)
        return SPRINGS[run.rank]


def replicas() -> list[dict[str, Any]]:
    """Of each rank, what it would take up again."""
    found = []
    for _, spring in sorted(SPRINGS.items()):
        spring.swap()
        found.append(spring.saved())
    SPRINGS.clear()
    return found
