"""What the decisions of a run come to, in plain torch and numpy: one oracle an algorithm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from decided import Told, do, told
from torch import Tensor, nn
from toys import Data, _train_by_hand, batches_by_hand, mlp, windows_by_hand
from trainings import EVEN

from sparkdl.averager import Averager
from sparkdl.events import WindowReport
from sparkdl.strategies import ThresholdGradientSharing


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

    def batches(self, window: WindowReport) -> list[Any]:
        """Those of the next window of a rank."""
        plan = batches_by_hand(self.data, window.rank, window.epoch, 4)
        first = self._steps[window.rank]
        self._steps[window.rank] = 0 if window.last else window.step_of_epoch
        return plan[first : window.step_of_epoch]

    def train(self, window: WindowReport) -> None:
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        _train_by_hand(self.module, optimizer, self.batches(window))


class MeanChange(Replay):
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


class Delayed(MeanChange):
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


class Springs(Replay):
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
        data: Data = EVEN,
    ) -> None:
        super().__init__(data)
        self.center: Any = self._flat(self.module.parameters())
        self._rate, self._momentum = rate, momentum
        self._ahead = momentum if looks_ahead else 0.0
        self._ends_ahead, self._reads = ends_ahead, reads
        self.own = [self.center] * len(data.sizes)
        self.read = [self.center] * len(data.sizes)
        self.velocity: list[Any] = [0.0] * len(data.sizes)
        self.pull: list[Any] = [0.0] * len(data.sizes)

    def send_center(self, rank: int, *, joins: bool) -> None:
        """Who joins begins at the center, and at rest."""
        self.read[rank] = self.center
        if joins:
            self.own[rank], self.velocity[rank], self.pull[rank] = self.center, 0.0, 0.0

    def commit(self, windows: list[WindowReport]) -> None:
        for window in windows:
            self.learn(window.rank, self.batches(window))
        self.meet([window.rank for window in windows if window.examples])

    def put(self, values: Any) -> None:
        nn.utils.vector_to_parameters(torch.from_numpy(values), self.module.parameters())

    def place(self, rank: int) -> np.ndarray:
        """Where a worker's gradients are taken."""
        return self.own[rank] + self._ahead * self.velocity[rank]

    def learn(self, rank: int, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for features, targets in batches:
            self.put(self.place(rank))
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

    @staticmethod
    def _flat(tensors: Any) -> np.ndarray:
        return np.concatenate([tensor.detach().numpy().ravel() for tensor in tensors])


def in_step(hand: Springs, epochs: int) -> nn.Module:
    """Windows of two minibatches of all who have some left."""
    for _, windows in windows_by_hand(hand.data, epochs, period=2):
        for rank, window in windows.items():
            hand.learn(rank, window)
        hand.meet([*windows])
    return hand.follow([])


class Encoder:
    """The rule, in float64 numpy, once more."""

    def __init__(self, strategy: ThresholdGradientSharing, size: int) -> None:
        self.strategy = strategy
        self.residual = np.zeros(size)
        self.threshold = rounded(strategy.threshold)
        self.messages = 0

    def encode(self, change: np.ndarray) -> np.ndarray:
        strategy = self.strategy
        self.messages += 1
        shake = strategy.shake_every is not None and self.messages % strategy.shake_every == 0
        threshold = rounded(self.threshold / 3) if shake else self.threshold
        self.residual = self.residual + change
        large = np.abs(self.residual) >= threshold
        share = np.where(large, np.sign(self.residual) * threshold, 0.0)
        if not threshold:
            share, large = self.residual.copy(), np.ones(len(change), bool)
        self.residual = self.residual - share
        if strategy.clip is not None and self.messages % 5 == 0 and threshold:
            most = strategy.clip * self.threshold
            self.residual = np.clip(self.residual, -most, most)
        if strategy.sparsity is not None and not shake:
            least, most = strategy.sparsity
            if large.mean() > most:
                self.threshold = rounded(self.threshold * 2 ** (1 / 20))
            elif large.mean() < least:
                self.threshold = rounded(self.threshold / 2 ** (1 / 20))
        return share


def rounded(threshold: float) -> float:
    """To 8 significant bits."""
    if not threshold:
        return 0.0
    fraction, exponent = math.frexp(threshold)
    return round(fraction * 256) / 256 * 2.0**exponent


class Shared(Replay):
    """Changes are encoded in numpy: who joins has nothing left over."""

    def __init__(self, data: Data, strategy: ThresholdGradientSharing) -> None:
        super().__init__(data)
        self.strategy = strategy
        self.encoders: dict[int, Encoder] = {}

    def send_center(self, rank: int, *, joins: bool) -> None:
        if joins:
            self.encoders[rank] = Encoder(self.strategy, sum(map(torch.numel, self.center)))

    def commit(self, windows: list[WindowReport]) -> None:
        old = nn.utils.parameters_to_vector(self.center).numpy()
        total, rows = np.zeros_like(old), 0
        for window in sorted(windows, key=lambda window: window.rank):
            self.put(self.center)
            self.train(window)
            if window.examples:
                mine = nn.utils.parameters_to_vector(self.module.parameters()).detach().numpy()
                total += window.examples * self.encoders[window.rank].encode(mine - old)
                rows += window.examples
        new = torch.from_numpy(old + total / max(1, rows))
        nn.utils.vector_to_parameters(new, self.center)
