"""Distributions of step times: drawn, summed over windows, and found again in what was drawn."""

from __future__ import annotations

import numpy as np
import pytest
from every_row import every

from sparkdl.errors import ConfigError
from sparkdl.planner.simulation.step_times import LogNormal, ShiftedGamma, StepTimes, fitted

MANY = 200_000


def drawn(times: StepTimes, steps: int = 1, count: int = MANY) -> np.ndarray:
    return times.draw(np.random.default_rng(0), steps, count)


@every(
    "times, variance",
    [
        (LogNormal(0.1, 0.4), 0.1**2 * (np.exp(0.4**2) - 1)),
        (LogNormal(2.0), 0.0),
        (ShiftedGamma(1.0, 1.0), 1.0),
        (ShiftedGamma(0.0, 2.0, 4.0), 1.0),
    ],
)
def test_windows_have_the_mean_and_the_variance_of_so_many_independent_steps(
    times: StepTimes, variance: float
) -> None:
    for steps in (1, 7, 500):
        seconds = drawn(times, steps)
        assert seconds.mean() == pytest.approx(steps * times.mean, rel=0.01)
        assert seconds.var() == pytest.approx(steps * variance, rel=0.03)


def test_a_sum_of_exponential_times_is_exact() -> None:
    """Erlang's distribution: of 3 times of mean 1, a part 8.5 / e^3 / ... exceeds 3."""
    share = np.mean(drawn(ShiftedGamma(0.0, 1.0), 3) > 3)
    assert share == pytest.approx(np.exp(-3) * (1 + 3 + 4.5), abs=0.005)


@every(
    "true, steps",
    [
        (LogNormal(0.1, 0.3), 1),
        (LogNormal(0.1, 0.3), 8),
        (LogNormal(5.0, 1.0), 1),
        (ShiftedGamma(1.0, 1.0), 1),
        (ShiftedGamma(0.02, 0.01, 2.0), 1),
    ],
)
def test_what_was_drawn_is_found_again_by_kind_and_numbers(true: StepTimes, steps: int) -> None:
    found = fitted(drawn(true, steps, 4000), steps)
    assert type(found) is type(true)
    for name, value in vars(true).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.1)


@every("seconds", [[0.5], [0.5] * 10, [0.4, 0.6]])
def test_a_few_or_equal_times_are_taken_to_be_constant(seconds: list[float]) -> None:
    assert fitted(seconds, 5) == LogNormal(0.1, 0.0)


@every(
    "make",
    [
        lambda: LogNormal(0.0),
        lambda: LogNormal(1.0, -0.1),
        lambda: LogNormal(float("nan")),
        lambda: ShiftedGamma(-1.0, 1.0),
        lambda: ShiftedGamma(1.0, 0.0),
        lambda: ShiftedGamma(1.0, 1.0, float("inf")),
        lambda: fitted([]),
        lambda: fitted([0.1, 0.0]),
        lambda: fitted([0.1, float("nan")]),
        lambda: fitted("0.1"),
    ],
)
def test_times_that_cannot_be_are_refused_in_words(make: object) -> None:
    with pytest.raises(ConfigError, match=r"must be a (number >|list of seconds)"):
        make()  # type: ignore[operator]
