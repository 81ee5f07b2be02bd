"""Threshold encoding by hand, in numpy, for the tests of what shares gradients so."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import trainings
from replayed import Replay
from torch import nn
from toys import Data

from sparkdl.events import WindowReport
from sparkdl.strategies import ThresholdGradientSharing

STRATEGY = ThresholdGradientSharing(0.01, sparsity=(0.05, 0.3), clip=5.0, shake_every=4)
AMONG = replace(STRATEGY, aggregation="executors")


job = partial(trainings.job, strategy=STRATEGY)


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


class ByHand(Replay):
    """Encoded in numpy: who joins has nothing left over."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.encoders: dict[int, Encoder] = {}

    def send_center(self, rank: int, *, joins: bool) -> None:
        if joins:
            self.encoders[rank] = Encoder(STRATEGY, sum(map(torch.numel, self.center)))

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
