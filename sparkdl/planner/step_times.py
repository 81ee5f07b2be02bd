"""How long optimizer steps take: distributions, fitted to measured times or given.

A window of several steps takes the sum of as many independent steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkdl.errors import ConfigError

Seconds = NDArray[np.float64]
EQUAL = 1e-6
"""Times that differ by less than this part of their mean are equal."""


class StepTimes(ABC):
    """The distribution of one worker's seconds per optimizer step, feed included."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Seconds of a step on average."""

    @abstractmethod
    def draw(self, generator: np.random.Generator, steps: int, count: int) -> Seconds:
        """Draw how long windows take.

        Args:
            generator: what to draw with.
            steps: optimizer steps of each window, >= 0.
            count: how many windows.

        Returns:
            Seconds of each, shape (count,).
        """


@dataclass(frozen=True)
class LogNormal(StepTimes):
    """Steps whose logarithm is normal: most are close to the median, a few take much longer.

    Sums of several steps are taken to be log-normal too, with the right mean and variance.

    Args:
        seconds: of a step on average.
        sigma: standard deviation of the natural logarithm; 0 for steps that all take the same.

    Raises:
        ConfigError: an argument is out of range.

    Source: for the sums, Fenton 1960, "The sum of log-normal probability distributions in scatter
    transmission systems".
    """

    seconds: float
    sigma: float = 0.0

    def __post_init__(self) -> None:
        _require_positive("seconds", self.seconds)
        if not 0 <= self.sigma < math.inf:
            raise ConfigError(f"sigma must be a number >= 0, got {self.sigma!r}")

    @property
    def mean(self) -> float:
        """As given."""
        return self.seconds

    def draw(self, generator: np.random.Generator, steps: int, count: int) -> Seconds:
        """Log-normal, with the mean and the variance of the sum."""
        if not steps:
            return np.zeros(count)
        variance = math.log1p(math.expm1(self.sigma**2) / steps)
        normal = generator.standard_normal(count) if variance else np.zeros(count)
        drawn: Seconds = steps * self.seconds * np.exp(math.sqrt(variance) * normal - variance / 2)
        return drawn


@dataclass(frozen=True)
class ShiftedGamma(StepTimes):
    """Steps that take a fixed time, and a random time with a gamma distribution on top.

    With a shape of 1, the random part is exponential; sums of steps are exact.

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
        if not 0 <= self.shift < math.inf:
            raise ConfigError(f"shift must be a number of seconds >= 0, got {self.shift!r}")
        _require_positive("above", self.above)
        _require_positive("shape", self.shape)

    @property
    def mean(self) -> float:
        """The fixed and the random part together."""
        return self.shift + self.above

    def draw(self, generator: np.random.Generator, steps: int, count: int) -> Seconds:
        """A shifted gamma distribution with as many times the shift and the shape."""
        scale = self.above / self.shape
        drawn: Seconds = steps * self.shift + scale * generator.standard_gamma(
            steps * self.shape, count
        )
        return drawn


def fitted(seconds: Sequence[float] | Seconds, steps: int = 1) -> StepTimes:
    """The distribution that measured times are likeliest to come from.

    Log-normal by maximum likelihood, or a shifted gamma by its moments, with the shift at the
    smallest time less what it exceeds the shift by in a sample of that size.

    Args:
        seconds: measured times, each of a window; at least one.
        steps: optimizer steps in each of these windows.

    Raises:
        ConfigError: there are none, or some are not positive numbers.
    """
    times = np.asarray(seconds, dtype=np.float64)
    if times.ndim != 1 or not len(times) or not np.all(np.isfinite(times) & (times > 0)):
        raise ConfigError(
            "measured times must be one or more numbers of seconds > 0, as a list or an array"
        )
    if steps < 1:
        raise ConfigError(f"steps of each measured window must be >= 1, got {steps}")
    mean, deviation = float(times.mean()), float(times.std())
    if len(times) < 3 or deviation < EQUAL * mean:
        return LogNormal(mean / steps)
    logs = np.log(times)
    sigma = float(logs.std())
    median_mean = math.exp(float(logs.mean()) + sigma**2 / 2)
    normal = -float(np.sum(logs + np.log(sigma) + (logs - logs.mean()) ** 2 / (2 * sigma**2)))
    normal -= len(times) / 2 * math.log(2 * math.pi)
    shift = max(0.0, float(times.min()) - (mean - float(times.min())) / len(times))
    above = mean - shift
    shape = (above / deviation) ** 2
    scale = above / shape
    over = times - shift
    gamma = float(np.sum((shape - 1) * np.log(over) - over / scale))
    gamma -= len(times) * (math.lgamma(shape) + shape * math.log(scale))
    # One parameter more has to gain one unit (Akaike 1974).
    if gamma - 1 > normal:
        return ShiftedGamma(shift / steps, above / steps, shape / steps)
    of_a_step = math.log1p(steps * math.expm1(sigma**2))
    return LogNormal(median_mean / steps, math.sqrt(of_a_step))


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number > 0, got {value!r}")
