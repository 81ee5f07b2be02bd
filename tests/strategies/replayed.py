"""A run's decisions once more in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from toys import Data, batches_by_hand, mlp

from sparkdl.averager import decisions as do
from sparkdl.events import WindowReport


class ByHand:
    """What was decided, done in plain torch: each window from the center that its rank was sent."""

    def __init__(self, data: Data, rate: float = 1.0, *, scale_by_staleness: bool = False) -> None:
        self.data = data
        self.rate = rate
        self.scale_by_staleness = scale_by_staleness
        self.module = mlp().train()
        self.center = [p.detach().clone() for p in self.module.parameters()]
        self.updates = 0
        self.sent: dict[int, tuple[list[Tensor], int]] = {}
        self.steps = dict.fromkeys(range(len(data.sizes)), 0)
        self.round: list[WindowReport] = []

    def follow(self, decisions: list[do.Decision]) -> nn.Module:
        for decision in decisions:
            if isinstance(decision, do.Report) and isinstance(decision.event, WindowReport):
                self.round.append(decision.event)
                continue
            self.update()
            if isinstance(decision, (do.Welcome, do.Reply)):
                copies = [values.clone() for values in self.center]
                self.sent[decision.member.rank] = copies, self.updates
        self.put(self.center)
        return self.module

    def put(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.module.parameters(), values, strict=True):
                parameter.copy_(value)

    def update(self) -> None:
        windows, self.round = self.round, []
        moves = [torch.zeros_like(values) for values in self.center]
        total = sum(window.examples for window in windows)
        for window in windows:
            began, since = self.sent[window.rank]
            self.put(began)
            self.train(window)
            stale = 1 + self.updates - since if self.scale_by_staleness else 1
            for move, start, mine in zip(moves, began, self.module.parameters(), strict=True):
                share = window.examples / total if total else 0
                move += (mine.detach() - start) * (share * self.rate / stale)
        for values, move in zip(self.center, moves, strict=True):
            values += move
        self.updates += bool(total)

    def train(self, window: WindowReport) -> None:
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        plan = batches_by_hand(self.data, window.rank, window.epoch, 4)
        for features, targets in plan[self.steps[window.rank] : window.step_of_epoch]:
            optimizer.zero_grad()
            outputs = self.module(torch.from_numpy(features))
            nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
            optimizer.step()
        self.steps[window.rank] = 0 if window.last else window.step_of_epoch
