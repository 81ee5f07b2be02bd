"""The workers that a simulated training has, and what came of it.

Optimizer steps take as long as a distribution says, given or fitted to measured times, feed
included; a window of several steps takes the sum of as many independent ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkdl.arguments import convert_numbers, require_positive, require_whole
from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link

Seconds = NDArray[np.float64]
EQUAL = 1e-6
"""Times whose logarithms differ by less than this are equal."""


@dataclass(frozen=True)
class LogNormal:
    """Steps whose logarithm is normal: most are close to the median, a few take much longer.

    Sums of several steps are taken to be log-normal too, with the right mean and variance.

    Args:
        mean: seconds of a step on average.
        sigma: standard deviation of the natural logarithm; 0 for steps that all take the same.

    Raises:
        ConfigError: an argument is out of range.

    Source: for the sums, Fenton 1960, "The sum of log-normal probability distributions in scatter
    transmission systems".
    """

    mean: float
    sigma: float = 0.0

    def __post_init__(self) -> None:
        require_positive("mean", self.mean)
        require_positive("sigma", self.sigma, or_zero=True)

    def draw(self, generator: np.random.Generator, steps: int, count: int) -> Seconds:
        """Draw how long windows take: log-normal, with the mean and the variance of the sum.

        Args:
            generator: what to draw with.
            steps: optimizer steps of each window, >= 1.
            count: how many windows.

        Returns:
            Seconds of each, shape (count,).
        """
        if not self.sigma:
            return np.full(count, steps * self.mean)
        variance = math.log1p(math.expm1(self.sigma**2) / steps)
        normal = math.sqrt(variance) * generator.standard_normal(count)
        drawn: Seconds = steps * self.mean * np.exp(normal - variance / 2)
        return drawn


def fitted(seconds: Seconds, steps: int) -> LogNormal:
    """The log-normal distribution that measured times are likeliest to come from.

    Args:
        seconds: measured times, each of a window; > 0.
        steps: optimizer steps in each of these windows, >= 1.
    """
    logs = np.log(seconds)
    sigma = float(logs.std())
    if sigma < EQUAL:
        return LogNormal(float(seconds.mean()) / steps)
    whole = math.exp(float(logs.mean()) + sigma**2 / 2)
    return LogNormal(whole / steps, math.sqrt(math.log1p(steps * math.expm1(sigma**2))))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Who trains, over which links.

    Attributes:
        workers: how many.
        link: of every host, and of the driver's.
        times: how long the steps of a usual worker take.
        slow: how many times as long the steps of some ranks take.
        per_host: workers on each host.
        within: what connects the workers of a host.
        seed: determines everything that is drawn.

    Raises:
        ConfigError: something is out of range.
    """

    workers: int
    link: Link
    times: LogNormal
    slow: Mapping[int, float] = field(default_factory=dict)
    per_host: int = 1
    within: Link = field(default_factory=lambda: Link(4e9, 1e-5))
    seed: int = 0

    def __post_init__(self) -> None:
        convert_numbers(self)
        require_whole("workers", self.workers, 1)
        require_whole("workers_per_host", self.per_host, 1)
        for rank, times in self.slow.items():
            if rank not in range(self.workers):
                raise ConfigError(
                    f"slow names rank {rank!r}, but {self.workers} workers have ranks 0 to "
                    f"{self.workers - 1}"
                )
            require_positive(f"slow[{rank}]", times)
        require_whole("seed", self.seed, 0)

    @property
    def slowness(self) -> Seconds:
        """How many times as long each rank's steps take, shape (workers,)."""
        slowness = np.ones(self.workers)
        slowness[list(self.slow)] = list(self.slow.values())
        return slowness


@dataclass(kw_only=True)
class Epoch:
    """What a simulated epoch comes to.

    Attributes:
        strategy: its name.
        rounds: exchanges of each worker.
        part: how much of the epoch was simulated; the other attributes are of that part, and the
            properties of the whole epoch.
        lasted: seconds that it took.
        did: seconds that all workers together computed; in which they waited for each other, for
            the driver, or for its link; and in which their own values were on their way.
        windows: contributions.
        staleness: how often others had moved the center since these began, in total.
        max_staleness: the most of that.
    """

    strategy: str
    rounds: int
    part: float = 1.0
    lasted: float = 0.0
    did: Seconds = field(default_factory=lambda: np.zeros(3))
    windows: int = 0
    staleness: int = 0
    max_staleness: int = 0

    def count(self, computed: Seconds | float, stood: Seconds | float, own_s: float) -> None:
        """Count what workers did.

        Args:
            computed: seconds that they computed.
            stood: seconds that they stood still.
            own_s: for how many of these, at most, a worker's own values were on their way.
        """
        carried = np.minimum(stood, own_s)
        self.did += [np.sum(each) for each in (computed, stood - carried, carried)]

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.lasted / self.part

    @property
    def figures(self) -> dict[str, Any]:
        """All of it by name, of the whole epoch; what workers do as parts of their time."""
        shares = self.did / max(float(self.did.sum()), 1e-300)
        return {
            "strategy": self.strategy,
            "seconds": self.seconds,
            **dict(zip(("computing", "waiting", "exchanging"), shares.tolist(), strict=True)),
            "rounds": self.rounds,
            "mean_staleness": self.staleness / max(self.windows, 1),
            "max_staleness": self.max_staleness,
            "part": self.part,
        }
