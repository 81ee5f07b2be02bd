"""Outer optimizers by hand, of whole rounds and of fragments, in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from decided import Told, do
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from toys import _average_optimizers, _train_by_hand, batches_by_hand, mlp
from trainings import DATA, SIZES

from sparkdl.events import EpochSummary, WindowReport
from sparkdl.strategies import OuterOptimizer, OuterSGD

OUTER = OuterSGD(0.7, 0.5)
STREAMS = [
    OuterOptimizer(4, OUTER, fragments=2),
    OuterOptimizer(6, OUTER, fragments=5),
    OuterOptimizer(4, OUTER, overlap=2, merge=0.5),
    OuterOptimizer(4, OUTER, overlap=3),
    OuterOptimizer(4, OUTER, merge=0.3),
    OuterOptimizer(6, OUTER, fragments=3, overlap=1, merge=0.5),
    OuterOptimizer(9, OUTER, fragments=2, overlap=3, merge=0.25),
    OuterOptimizer(((1, 4), (3, 6)), OUTER, fragments=2, overlap=1),
]

ROUNDED = OuterOptimizer(6, OUTER, "keep", "float4", fragments=3, overlap=1, merge=0.5)


Part = slice
Sent = tuple[list[int], Tensor]
"""What a worker contributes to a round: rows by fragment, and all of its parameters."""


def vector_of(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach().clone()


class Outer:
    """Plain torch in one process: each worker is a generator of what it contributes."""

    def __init__(self, strategy: OuterOptimizer, inner: Any) -> None:
        self.strategy, self.inner = strategy, inner
        start = mlp().train()
        self.center = vector_of(start)
        self.velocity = torch.zeros_like(self.center)
        self.replicas = [copy.deepcopy(start) for _ in SIZES]
        self.optimizers = [inner(replica.parameters()) for replica in self.replicas]
        count, size = strategy.fragments, len(self.center)
        cuts = [size * number // count for number in range(count + 1)]
        self.parts = [Part(first, stop) for first, stop in pairwise(cuts)]
        self.number = 0
        """Rounds of the epoch until now, from which follows the fragment that is due."""

    def train(self, epochs: int) -> nn.Module:
        for epoch in range(1, epochs + 1):
            self.run_epoch({rank: self.worker(rank, epoch) for rank in range(len(SIZES))})
            for replica in self.replicas:
                vector_to_parameters(self.center.clone(), replica.parameters())
        return self.replicas[0]

    def run_epoch(self, workers: dict[int, Generator[Sent, Tensor, None]]) -> None:
        self.number = 0
        sent = {rank: next(worker) for rank, worker in workers.items()}
        while sent:
            answer = self.end_round(list(sent.values()))
            if self.strategy.inner_state == "average":
                _average_optimizers(
                    self.optimizers, {rank: rows[0] for rank, (rows, _) in sent.items()}
                )
            if self.strategy.inner_state == "reset":
                self.optimizers = [self.inner(each.parameters()) for each in self.replicas]
            going_on = {}
            for rank in sent:
                with suppress(StopIteration):
                    going_on[rank] = workers[rank].send(answer)
            sent = going_on

    @property
    def fragment(self) -> int:
        """Which fragment the next round is of."""
        return self.number % len(self.parts)

    def end_round(self, sent: list[Sent]) -> Tensor:
        part = self.parts[self.fragment]
        self.number += 1
        weights = [rows[self.parts.index(part)] for rows, _ in sent]
        if sum(weights):
            mean = np.average([values[part].numpy() for _, values in sent], 0, weights)
            change = torch.from_numpy(mean) - self.center[part]
            outer = self.strategy.outer
            assert isinstance(outer, OuterSGD)
            self.velocity[part] = outer.momentum * self.velocity[part] + change
            moved = self.velocity[part]
            if outer.nesterov:
                moved = change + outer.momentum * moved
            self.center[part] += outer.learning_rate * moved
        return self.center[part].clone()

    def worker(self, rank: int, epoch: int, first: int = 0) -> Generator[Any, Tensor, None]:
        strategy, replica, count = self.strategy, self.replicas[rank], len(self.parts)
        period = strategy.period_in(epoch)
        plan = batches_by_hand(DATA, rank, epoch, 4)
        rows = [0] * count
        under_way: tuple[int, Part, Tensor] | None = None

        def take(part: Part, answer: Tensor, local: float) -> None:
            mine = vector_of(replica)
            mine[part] = local * mine[part] + (1 - local) * answer
            vector_to_parameters(mine, replica.parameters())

        for step, batch in enumerate(plan[first:], first + 1):
            _train_by_hand(replica, self.optimizers[rank], [batch])
            rows = [each + len(batch[1]) for each in rows]
            if under_way is not None and step == under_way[0]:
                take(under_way[1], under_way[2], strategy.merge)
                under_way = None
            # After steps ceil(period / fragments), ceil(2 * period / fragments), ...
            due = any(step == -(-k * period // count) for k in range(1, 100))
            if due and step < len(plan):
                fragment = self.fragment
                part = self.parts[fragment]
                answer = yield rows, vector_of(replica)
                rows[fragment] = 0
                under_way = step + strategy.overlap, part, answer
                if not strategy.overlap:
                    take(part, answer, strategy.merge)
                    under_way = None
        if under_way is not None:
            take(under_way[1], under_way[2], strategy.merge)
        for _ in range(count):
            fragment = self.fragment
            answer = yield rows, vector_of(replica)
            rows[fragment] = 0
            take(self.parts[fragment], answer, 0.0)


class OuterAsDecided(Outer):
    """What a run has committed, and nothing else; who joins begins with the center."""

    def __init__(self, strategy: OuterOptimizer, inner: Any) -> None:
        super().__init__(strategy, inner)
        self.epoch = 1
        self.workers: dict[int, Generator[Sent, Tensor, None]] = {}
        self.sent: dict[int, Sent] = {}
        self.steps = dict.fromkeys(range(len(SIZES)), 0)

    def follow(self, decisions: list[Told]) -> nn.Module:
        committed: list[WindowReport] = []
        for decision in decisions:
            event = decision.event if isinstance(decision, do.report) else None
            if isinstance(event, WindowReport):
                committed.append(event)
                continue
            if committed:
                self.commit(committed)
                committed = []
            if isinstance(event, EpochSummary):
                self.epoch, self.number = event.epoch + 1, 0
                for rank in self.steps:
                    self.begin(rank)
            if isinstance(decision, do.welcome):
                self.begin(decision.member.rank)
        vector_to_parameters(self.center.clone(), self.replicas[0].parameters())
        return self.replicas[0]

    def begin(self, rank: int) -> None:
        vector_to_parameters(self.center.clone(), self.replicas[rank].parameters())
        self.workers[rank] = self.worker(rank, self.epoch, self.steps[rank])
        self.sent[rank] = next(self.workers[rank])

    def commit(self, windows: list[WindowReport]) -> None:
        answer = self.end_round([self.sent[window.rank] for window in windows])
        for window in windows:
            self.steps[window.rank] = 0 if window.last else window.step_of_epoch
            with suppress(StopIteration):
                self.sent[window.rank] = self.workers[window.rank].send(answer)
