"""The workers that a simulated training has, and what came of it.

Optimizer steps take as long as a distribution says, given or fitted to measured times; a window of
several steps takes the sum of as many independent ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkdl.arguments import as_list, convert_numbers, require_positive, require_whole
from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link

Seconds = NDArray[np.float64]
EQUAL = 1e-6
"""Times that differ by less than this part of their mean are equal."""


class StepTimes(ABC):
    """The distribution of one worker's seconds per optimizer step, feed included."""

    mean: float
    """Seconds of a step on average."""

    @abstractmethod
    def draw(self, generator: np.random.Generator, steps: int, count: int) -> Seconds:
        """Draw how long windows take.

        Args:
            generator: what to draw with.
            steps: optimizer steps of each window, >= 1.
            count: how many windows.

        Returns:
            Seconds of each, shape (count,).
        """


@dataclass(frozen=True)
class LogNormal(StepTimes):
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
        """Log-normal, with the mean and the variance of the sum."""
        if not self.sigma:
            return np.full(count, steps * self.mean)
        variance = math.log1p(math.expm1(self.sigma**2) / steps)
        normal = math.sqrt(variance) * generator.standard_normal(count)
        drawn: Seconds = steps * self.mean * np.exp(normal - variance / 2)
        return drawn


@dataclass(frozen=True)
class ShiftedGamma(StepTimes):
    """Steps that take a fixed time, and a random time with a gamma distribution on top.

    With a shape of 1 the random part is exponential. Sums of steps are exact.

    Args:
        shift: seconds that every step takes at least, >= 0.
        above: seconds on top of that on average, > 0.
        shape: of the gamma distribution, > 0.

    Raises:
        ConfigError: an argument is out of range.
    """

    shift: float
    above: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        require_positive("shift", self.shift, or_zero=True)
        require_positive("above", self.above)
        require_positive("shape", self.shape)

    @property
    def mean(self) -> float:  # type: ignore[override]
        """The fixed and the random part together."""
        return self.shift + self.above

    def draw(self, generator: np.random.Generator, steps: int, count: int) -> Seconds:
        """A shifted gamma distribution with as many times the shift and the shape."""
        random = generator.standard_gamma(steps * self.shape, count) * self.above / self.shape
        return np.asarray(steps * self.shift + random)


def fitted(seconds: Sequence[float] | Seconds, steps: int = 1) -> StepTimes:
    """The distribution that measured times are likeliest to come from.

    Log-normal by maximum likelihood, or a shifted gamma by its moments, with a shift below the
    smallest time by what that is expected to exceed it by, were the rest exponential.

    Args:
        seconds: measured times, each of a window; at least one.
        steps: optimizer steps in each of these windows, >= 1.

    Raises:
        ConfigError: there are none, or some are not positive numbers.
    """
    if not as_list(seconds):
        raise ConfigError(f"measured times must be a list of seconds, got {seconds!r:.200}")
    times = np.array([require_positive("a measured time", each) for each in seconds])
    count, mean, deviation = len(times), float(times.mean()), float(times.std())
    if count < 3 or deviation < EQUAL * mean:
        return LogNormal(mean / steps)
    logs, sigma = np.log(times), float(np.log(times).std())
    normal = -float(logs.sum()) - count * (math.log(sigma * math.sqrt(2 * math.pi)) + 0.5)
    least = float(times.min())
    shift = max(0.0, least - (mean - least) / count)
    above = mean - shift
    shape = (above / deviation) ** 2
    over = (times - shift) * shape / above
    gamma = float(np.sum((shape - 1) * np.log(over) - over))
    gamma -= count * (math.lgamma(shape) + math.log(above / shape))
    if gamma - 1 > normal:  # one parameter more has to gain one unit (Akaike 1974)
        return ShiftedGamma(shift / steps, above / steps, shape / steps)
    whole = math.exp(float(logs.mean()) + sigma**2 / 2)
    return LogNormal(whole / steps, math.sqrt(math.log1p(steps * math.expm1(sigma**2))))


NEVER = (math.inf, -1)
MOST_LOSSES = 2000
"""The most lost workers of an epoch."""


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
        losses: seconds from the start after which ranks are lost, by rank; or seconds that pass on
            average between two losses of one worker. None if none is lost.
        restart_s: seconds until a lost worker, or with strategies that need each other all of them,
            can train again.
        seed: determines everything that is drawn.

    Raises:
        ConfigError: something is out of range.
    """

    workers: int
    link: Link
    times: StepTimes
    slow: Mapping[int, float] = field(default_factory=dict)
    per_host: int = 1
    within: Link = field(default_factory=lambda: Link(4e9, 1e-5))
    losses: float | Mapping[int, float] | None = None
    restart_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        convert_numbers(self)
        require_whole("workers", self.workers, 1)
        require_whole("workers_per_host", self.per_host, 1)
        lost = self.losses if isinstance(self.losses, Mapping) else {}
        for name, by_rank in (("slow", self.slow), ("losses", lost)):
            for rank, value in by_rank.items():
                if rank not in range(self.workers):
                    raise ConfigError(
                        f"{name} names rank {rank!r}, but {self.workers} workers have ranks 0 to "
                        f"{self.workers - 1}"
                    )
                require_positive(f"{name}[{rank}]", value)
        if not isinstance(self.losses, Mapping | None):
            require_positive("losses", self.losses)
        require_positive("restart_s", self.restart_s, or_zero=True)
        require_whole("seed", self.seed, 0)

    @property
    def slowness(self) -> Seconds:
        """How many times as long each rank's steps take, shape (workers,)."""
        slowness = np.ones(self.workers)
        slowness[list(self.slow)] = list(self.slow.values())
        return slowness

    def lost(self, generator: np.random.Generator) -> Iterator[tuple[float, int]]:
        """When workers are lost, and which, in the order of time; ``NEVER`` at last."""
        if isinstance(self.losses, Mapping):
            yield from sorted((float(at), rank) for rank, at in self.losses.items())
        elif self.losses is not None:
            at = 0.0
            for _ in range(MOST_LOSSES):
                at += float(generator.exponential(self.losses / self.workers))
                yield at, int(generator.integers(self.workers))
            raise ConfigError(
                f"after {MOST_LOSSES} lost workers and {at:.3g} s the epoch has not ended, and may "
                "never: give more seconds between two losses, or a shorter epoch or commit_every"
            )
        while True:
            yield NEVER


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
        sent: bytes that passed the busiest link in its busier direction.
        driver: bytes that the driver sent and received.
        windows: contributions.
        staleness: how often others had moved the center since these began, in total.
        max_staleness: the most of that.
        losses: how often a worker was lost, or all were restarted.
    """

    strategy: str
    rounds: int
    part: float = 1.0
    lasted: float = 0.0
    did: Seconds = field(default_factory=lambda: np.zeros(3))
    sent: float = 0.0
    driver: float = 0.0
    windows: int = 0
    staleness: int = 0
    max_staleness: int = 0
    losses: int = 0

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
            "busiest_bytes": self.sent / self.part,
            "driver_bytes": self.driver / self.part,
            "mean_staleness": self.staleness / max(self.windows, 1),
            "max_staleness": self.max_staleness,
            "losses": round(self.losses / self.part),
            "part": self.part,
        }
