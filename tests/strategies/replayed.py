"""A run's decisions, and the same once more in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from decided import Told, do, told
from torch import Tensor, nn
from toys import Data, _train_by_hand, batches_by_hand, mlp

from sparkdl.averager import Averager
from sparkdl.events import WindowReport


@contextmanager
def recorded_decisions() -> Iterator[list[Told]]:
    """Take down what the runs of this process decide meanwhile."""
    decided: list[Told] = []
    decide = Averager._decide

    def recording(self: Averager, event: Any, *arguments: Any, **options: Any) -> None:
        decide(self, event, *arguments, **options)
        decided.extend(told(self.coordinator.do.decisions))

    Averager._decide = recording  # type: ignore[method-assign]
    try:
        yield decided
    finally:
        Averager._decide = decide  # type: ignore[method-assign]


class Replay:
    """A run's commits, window by window.

    Attributes:
        module: of the parameters with which a window is trained, and at last of the center's.
        center: as it is now.
        share: what part of a full round the last commit was said to be.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        self.module = mlp().train()
        self.center = [p.detach().clone() for p in self.module.parameters()]
        self._steps = dict.fromkeys(range(len(data.sizes)), 0)
        self._round: list[WindowReport] = []
        self.share = 1.0

    def follow(self, decisions: list[Told]) -> nn.Module:
        for decision in decisions:
            if isinstance(decision, do.report) and isinstance(decision.event, WindowReport):
                self._round.append(decision.event)
                continue
            windows, self._round = self._round, []
            self.commit(windows)
            if isinstance(decision, do.commit):
                self.share = decision.contributions.share
            if isinstance(decision, (do.welcome, do.reply)):
                self.send_center(decision.member.rank, joins=isinstance(decision, do.welcome))
        self.put(self.center)
        return self.module

    def commit(self, windows: list[WindowReport]) -> None:
        """Have windows, which may be none, change the center."""
        raise NotImplementedError

    def send_center(self, rank: int, *, joins: bool) -> None:
        """A rank goes on from the center as it is now."""
        raise NotImplementedError

    def put(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.module.parameters(), values, strict=True):
                parameter.copy_(value)

    def train(self, window: WindowReport) -> None:
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        plan = batches_by_hand(self.data, window.rank, window.epoch, 4)
        batches = plan[self._steps[window.rank] : window.step_of_epoch]
        _train_by_hand(self.module, optimizer, batches)
        self._steps[window.rank] = 0 if window.last else window.step_of_epoch


class ByHand(Replay):
    """The center moves by the mean change, of each window since the center that its rank was sent.

    Args:
        data: of the run.
        rate: part of the mean that it moves by.
        scale_by_staleness: whether changes are divided by how many updates there were.
        by_share: whether a round that is not a full one moves it by less; by default if staleness
            has no influence.
    """

    def __init__(
        self,
        data: Data,
        rate: float = 1.0,
        *,
        scale_by_staleness: bool = False,
        by_share: bool | None = None,
    ) -> None:
        super().__init__(data)
        self._rate = rate
        self._by_share = not scale_by_staleness if by_share is None else by_share
        self._scale_by_staleness = scale_by_staleness
        self._updates = 0
        self._rounds = 0
        self._sent: dict[int, tuple[list[Tensor], int]] = {}

    def send_center(self, rank: int, *, joins: bool) -> None:
        self._sent[rank] = [values.clone() for values in self.center], self._updates

    def commit(self, windows: list[WindowReport]) -> None:
        moves = [torch.zeros_like(values) for values in self.center]
        total = sum(window.examples for window in windows)
        for window in windows:
            began, since = self._sent[window.rank]
            self.put(began)
            self.train(window)
            stale = 1 + self._updates - since if self._scale_by_staleness else 1
            for move, start, mine in zip(moves, began, self.module.parameters(), strict=True):
                share = window.examples / total if total else 0
                share *= self.share if self._by_share else 1
                move += (mine.detach() - start) * (share * self._rate / stale)
        if windows:
            self._rounds += 1
        if total or (windows and self.moves_alone()):
            moves = self.moved(moves)
        for values, move in zip(self.center, moves, strict=True):
            values += move
        self._updates += bool(total)

    def moves_alone(self) -> bool:
        """Whether the center moves without a change."""
        return False

    def moved(self, change: list[Tensor]) -> list[Tensor]:
        """How the center moves in a round of a mean change."""
        return change


class HeavyBall(ByHand):
    """With slow momentum, and a rate for that."""

    def __init__(self, data: Data, rate: float, momentum: float) -> None:
        super().__init__(data)
        self._outer_rate, self._momentum = rate, momentum
        self._velocity = [torch.zeros_like(values) for values in self.center]

    def moved(self, change: list[Tensor]) -> list[Tensor]:
        """Further in the direction of earlier rounds."""
        self._velocity = [
            self._momentum * v + c for v, c in zip(self._velocity, change, strict=True)
        ]
        return [self._outer_rate * v for v in self._velocity]


class Delayed(ByHand):
    """Liu et al.'s delayed Nesterov momentum: a step of it in every N-th round.

    Args:
        data: of the run.
        buffer: N.
        rate: of the outer optimizer.
        momentum: of the outer optimizer.
    """

    def __init__(self, data: Data, buffer: int, rate: float, momentum: float) -> None:
        super().__init__(data, 1 / buffer, by_share=False)
        self._buffer, self._outer_rate, self._momentum = buffer, rate, momentum
        self._velocity = [torch.zeros_like(values) for values in self.center]
        self._gathered = [torch.zeros_like(values) for values in self.center]

    def moves_alone(self) -> bool:
        """Where momentum is due."""
        return self._rounds % self._buffer == 0

    def moved(self, change: list[Tensor]) -> list[Tensor]:
        """A part of the change at once, and momentum when it is due."""
        for total, values in zip(self._gathered, change, strict=True):
            total += values
        if self._rounds % self._buffer:
            return [self._outer_rate * values for values in change]
        for velocity, total in zip(self._velocity, self._gathered, strict=True):
            velocity.mul_(self._momentum).add_(total)
            total.zero_()
        return [
            self._outer_rate * (values + self._momentum * velocity)
            for values, velocity in zip(change, self._velocity, strict=True)
        ]
