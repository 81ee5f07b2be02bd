"""The lemmas' closed forms: a table worked out by hand, brute force, and what must hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
from every_row import every
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ConfigError
from sparkdl.planner.lemmas import least_period, least_period_for, most_workers

OVERHEADS = st.floats(1e-4, 10)
EFFICIENCIES = st.floats(0.05, 1)


def efficiency(workers: int, overhead: float) -> float:
    return (1 + overhead) / (1 + workers * overhead)


@every(("overhead", "most"), [(0.02, 13), (0.05, 6), (0.10, 3), (0.20, 2)])
def test_as_many_workers_as_in_the_table_of_lemma_1_have_an_efficiency_of_four_fifths(
    overhead: float, most: int
) -> None:
    assert most_workers(overhead, 0.8) == most


@given(overhead=OVERHEADS, alpha=EFFICIENCIES)
def test_one_worker_more_would_be_less_efficient(overhead: float, alpha: float) -> None:
    most = int(most_workers(overhead, alpha))
    assert efficiency(most, overhead) >= alpha - 1e-6
    assert efficiency(most + 1, overhead) < alpha


def test_without_an_overhead_nothing_limits_the_workers() -> None:
    assert most_workers(0.0, 0.8) == math.inf


def test_only_one_worker_is_as_efficient_as_one() -> None:
    assert most_workers(0.3, 1.0) == 1


@every(
    ("bandwidth", "servers"),
    [(1.25e9, 2), (0.125e9, 16)],
)
def test_lemma_2_for_alexnet_on_four_workers(bandwidth: float, servers: int) -> None:
    """244 MB, a step of one second: 10 GbE needs 2 servers or steps a round, 1 GbE needs 16."""
    assert least_period(244e6, 4, bandwidth, 1.0) == servers
    assert least_period(244e6, 4, bandwidth, 1.0, both_ways=False) == servers // 2


@given(workers=st.integers(1, 64), step_s=st.floats(1e-3, 1))
def test_from_the_least_period_on_a_round_takes_no_longer_than_its_steps(
    workers: int, step_s: float
) -> None:
    sent, bandwidth = 1e6, 12.5e6
    round_s = 2 * sent * workers / bandwidth
    by_counting = next(p for p in range(1, 100_000) if p * step_s >= round_s * (1 - 1e-9))
    assert least_period(sent, workers, bandwidth, step_s) == by_counting


@given(
    alpha=st.floats(0.1, 0.95),
    round_s=st.floats(0.01, 5),
    alone=st.floats(0, 1),
    slowest=st.floats(1, 1.04),
)
def test_from_the_least_period_on_the_workers_are_so_efficient(
    alpha: float, round_s: float, alone: float, slowest: float
) -> None:
    step_s, alone = 0.05, alone * round_s

    def at(period: int) -> float:
        return (step_s + alone / period) / (slowest * step_s + round_s / period)

    period = int(least_period_for(alpha, step_s, round_s, alone, slowest))
    assert at(period) >= alpha - 1e-6
    assert period == 1 or at(period - 1) < alpha + 1e-6


def test_where_no_period_is_efficient_the_least_is_infinite() -> None:
    assert least_period_for(1.0, 0.05, 1.0, 0.5) == math.inf
    assert least_period_for(0.9, 0.05, 1.0, 0.5, slowest=1.5) == math.inf


@every("alpha", [0, -0.1, 1.01, float("nan"), "0.8", True, None])
def test_what_is_no_efficiency_is_refused(alpha: Any) -> None:
    with pytest.raises(ConfigError, match="efficiency must be a number > 0 and <= 1"):
        most_workers(0.1, alpha)


@every(
    ("lemma", "arguments"),
    [
        (most_workers, (-0.1, 0.8)),
        (most_workers, (math.nan, 0.8)),
        (least_period, (1e6, 4, 0.0, 1.0)),
        (least_period, (1e6, 4, 1e6, 0.0)),
    ],
)
def test_numbers_that_no_training_has_are_refused(lemma: Any, arguments: Any) -> None:
    with pytest.raises(ConfigError):
        lemma(*arguments)
