"""How long optimizer steps take: distributions, given or fitted to measured times.

A window of several steps takes the sum of as many independent steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkdl.arguments import as_list, require_positive
from sparkdl.errors import ConfigError

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
