"""Simulated rounds, exchanges and steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from every_row import every, every_row

from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link
from sparkdl.planner.simulation.array_rounds import array_rounds
from sparkdl.planner.simulation.cluster import Cluster, Epoch, LogNormal, fitted
from sparkdl.planner.simulation.driver_run import DriverRun
from sparkdl.planner.simulation.exchanges import Exchange, around_s, exchange_of, short_name
from sparkdl.strategies import (
    SSP,
    AsynchronousSGD,
    ColorTrees,
    ElasticAveraging,
    GossipAveraging,
    GradientAllReduce,
    Hybrid,
    KFACPreconditioner,
    OneBitAdam,
    OuterOptimizer,
    ParameterAveraging,
    PowerSGD,
    Strategy,
    ThresholdGradientSharing,
    TopK,
)

LINK = Link(12.5e6)
LARGE, SMALL = 4e6, 1e5


class Exponential(LogNormal):
    """Steps of a second, and an exponential time of the same mean on top."""

    def draw(self, generator: np.random.Generator, steps: int, count: int) -> np.ndarray:
        return steps + generator.standard_gamma(steps, count)


def cluster(**given: Any) -> Cluster:
    usual: dict[str, Any] = {"workers": 4, "link": LINK, "times": LogNormal(0.1)}
    return Cluster(**usual | given)


def group(**given: Any) -> Exchange:
    return Exchange(**{"name": "x", "way": "group", "up": LARGE, "period": 5} | given)


def epoch(exchange: Exchange, steps: int, **given: Any) -> Epoch:
    return array_rounds(exchange, cluster(**given), exchange.windows(steps, 10_000))


@every_row(
    (LARGE, LARGE, 0.0, 0, 1),
    (LARGE, LARGE, 1e-3, 0, 1),
    (SMALL, LARGE, 1e-3, 0, 1),
    (SMALL, SMALL, 0.0, 0, 1),
    (LARGE, SMALL, 1e-3, 2, 1),
    (SMALL, SMALL, 0.0, 5, 1),
    (LARGE, LARGE, 1e-3, 1, 2),
)
def test_rounds_of_all_in_the_driver_are_those_that_the_averager_decides_on(
    up: float, down: float, latency: float, overlap: int, fragments: int
) -> None:
    way: Any = {"way": "driver", "up": up, "down": down, "overlap": overlap}
    parts = {"fragments": fragments, "closing": fragments - 1, "final": fragments * down}
    exchange = Exchange(name="x", period=5, **way, **parts)
    slow = {0: 3.0, 2: 1.7, 5: 1.1}
    of = cluster(workers=7, link=Link(12.5e6, latency), slow=slow)
    windows = exchange.windows(23, 10_000)
    at_once, decided = (
        each(exchange, of, windows) for each in (array_rounds, lambda *a: DriverRun(*a).train())
    )
    assert at_once.lasted == pytest.approx(decided.lasted, rel=1e-12)
    np.testing.assert_allclose(at_once.did, decided.did, rtol=1e-9, atol=1e-9)
    assert at_once.windows == decided.windows


def test_a_barrier_takes_as_long_as_the_largest_of_the_times() -> None:
    """Of N exponential times of mean 1, 1 + 1/2 + ... + 1/N on average."""
    workers, rounds = 50, 4000
    exchange = group(up=0.0, period=1)
    found = epoch(exchange, rounds, workers=workers, times=Exponential(2.0))
    harmonic = sum(1 / k for k in range(1, workers + 1))
    assert found.lasted / rounds == pytest.approx(1 + harmonic, rel=0.01)


def test_a_ring_follows_the_computing() -> None:
    found = epoch(group(commit=LARGE), 20)
    once_s = around_s(LARGE, LINK, 4)
    assert found.lasted == pytest.approx(2.0 + 4 * once_s + LARGE / LINK.bandwidth)
    np.testing.assert_allclose(found.did, [4 * 2.0, 0, 4 * 4 * once_s], atol=1e-9)


def test_what_a_worker_trains_on_meanwhile_hides_an_exchange() -> None:
    """A ring of 4 takes 0.48 s, and 5 steps 0.5 s: only the last is waited for."""
    assert epoch(group(overlap=5), 20).lasted == pytest.approx(2.0 + 0.48)
    assert epoch(group(overlap=3), 20).lasted == pytest.approx(2.0 + 3 * 0.18 + 0.48)


def test_buckets_hide_in_the_backward_pass_all_but_the_last() -> None:
    """Backward takes 2/3 of a step; the first of 4 buckets is ready when a quarter of it is over.

    The four take 0.12 s each: from 0.05 s before the step's end on, and no sooner than 0.12 s after
    it for the last.
    """
    step = group(period=1, buckets=4)
    assert epoch(step, 1).lasted == pytest.approx(0.1 - 0.05 + 0.48)
    assert epoch(replace(step, up=4e5), 1).lasted == pytest.approx(0.1 + 0.012)


def test_hosts_sum_before_they_contribute() -> None:
    exchange = Exchange(name="x", way="hosts", up=LARGE, down=LARGE, period=5)
    within = Link(4e9)
    found = epoch(exchange, 5, workers=8, per_host=4, within=within)
    both_ways_s = around_s(LARGE, within, 4)
    assert found.lasted == pytest.approx(0.5 + both_ways_s + 2 * 2 * 0.32)


def test_visitors_share_links_that_are_always_busy() -> None:
    """Values are sent, then received: half of the time in the direction of one's own visitor's.

    Without computing there always is one, so that 0.32 and 0.32 s take half as long again.
    """
    visits = Exchange(name="x", way="visits", up=LARGE, down=LARGE)
    found = epoch(visits, 10, times=LogNormal(1e-6))
    assert found.lasted == pytest.approx(10 * 1.5 * 0.64, rel=1e-3)
    pulled = epoch(replace(visits, up=0.0), 10, times=LogNormal(1e-6))
    assert pulled.lasted == pytest.approx(10 * 0.32, rel=1e-3)


def test_a_slow_worker_holds_up_its_neighbors_one_hop_a_round() -> None:
    """As many hops away as there are rounds, a worker has not heard of it yet.

    By hand, the exchange after the third window is over for the slow one and its neighbors at 3 s,
    for those two hops away at 2.1, three hops away at 1.2, and for the other two at 0.3 s.
    """
    neighbors = Exchange(name="x", way="neighbors", up=0.0, period=1)
    found = epoch(neighbors, 3, workers=9, slow={4: 10.0})
    assert found.did[0] == pytest.approx(3.0 + 8 * 0.3)
    assert found.did[1] == pytest.approx(3 * 3.0 + 2 * (2.1 + 1.2 + 0.3) - found.did[0])


def test_a_group_s_copies_for_the_driver_are_waited_for() -> None:
    """Three of 0.32 s, after 10, 20 and all of 30 steps."""
    found = epoch(group(up=0.0, period=1, commit=LARGE, commit_every=10), 30)
    assert found.lasted == pytest.approx(3.0 + 3 * 0.32)


@every("way", ["visits", "neighbors"])
def test_what_everyone_sends_the_driver_at_the_end_is_waited_for_by_everyone(way: Any) -> None:
    found = epoch(Exchange(name="x", way=way, up=LARGE, down=LARGE, period=5, commit=LARGE), 10)
    assert found.did.sum() == pytest.approx(4 * found.lasted)


STATE = {"parameters": 4e6, "buffers": 4e4, "optimizer": 8e6}
ALL, MODEL = 12.04e6, 4.04e6


@every_row(
    (GradientAllReduce(), {"way": "group", "up": 4e6, "period": 1, "commit": ALL}),
    (GradientAllReduce(compression="fp16", accumulate=3), {"up": 2e6, "period": 3}),
    (GradientAllReduce(bucket_mb=1), {"buckets": 4}),
    (GradientAllReduce(bucket_mb=1, compression="bf16"), {"buckets": 4, "up": 2e6}),
    (ParameterAveraging(), {"way": "driver", "up": ALL, "down": ALL, "period": 5}),
    (ParameterAveraging(average_optimizer_state=False), {"up": MODEL, "down": MODEL}),
    (ParameterAveraging(aggregation="executors"), {"way": "group", "up": ALL, "commit": ALL}),
    (ParameterAveraging(aggregation="hierarchical"), {"way": "hosts", "up": ALL}),
    (ElasticAveraging(3, mode="hogwild"), {"way": "driver", "up": MODEL, "overlap": 3}),
    (ElasticAveraging(3, aggregation="executors"), {"way": "group", "overlap": 3}),
    (OuterOptimizer(60, fragments=4, overlap=2), {"up": MODEL / 4, "overlap": 2}),
    (AsynchronousSGD(7, barrier=SSP(1)), {"way": "driver", "up": MODEL, "period": 7}),
    (GossipAveraging(), {"way": "visits", "up": MODEL, "down": MODEL, "commit": MODEL}),
    (GossipAveraging(mode="pull"), {"up": 0.0, "down": MODEL}),
    (GossipAveraging(2, mode="symmetric"), {"way": "neighbors", "period": 2}),
)
def test_a_strategy_sends(strategy: Strategy[Any], expected: dict[str, object]) -> None:
    found = exchange_of(strategy, STATE)
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected)


UNKNOWN = "is not known: it depends on"
AMONG_TREES = ParameterAveraging(5, aggregation="executors", reduction=ColorTrees())


@every_row(
    (GradientAllReduce(compression=PowerSGD(2)), UNKNOWN),
    (GradientAllReduce(compression=OneBitAdam(100)), UNKNOWN),
    (GradientAllReduce(preconditioner=KFACPreconditioner()), UNKNOWN),
    (GradientAllReduce(hybrid=Hybrid("*")), UNKNOWN),
    (GradientAllReduce(shard_optimizer=True), UNKNOWN),
    (OuterOptimizer(period=((1, 1), (3, 16))), UNKNOWN),
    (GradientAllReduce(compression=TopK(0.01)), UNKNOWN),
    (ThresholdGradientSharing(), UNKNOWN),
    (ThresholdGradientSharing(aggregation="executors"), UNKNOWN),
    ("averaging", "is no strategy, such as"),
    (GradientAllReduce(reduction=ColorTrees()), UNKNOWN),
    (AMONG_TREES, UNKNOWN),
)
def test_what_is_not_known_or_not_simulated_is_refused_in_words(strategy: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        exchange_of(strategy, STATE)


@every_row(
    (5, 1, 12, [5, 5, 2]),
    (5, 1, 10, [5, 5]),
    (5, 1, 3, [3]),
    (1, 1, 3, [1, 1, 1]),
    (10, 3, 20, [4, 3, 3, 4, 3, 3]),
)
def test_windows_end_where_the_strategies_exchange(
    period: int, fragments: int, steps: int, windows: list[int]
) -> None:
    """As ``OuterOptimizer`` does with fragments: after the first step that completes each part."""
    own = Exchange(name="own", way="driver", up=1.0, period=period, fragments=fragments)
    assert own.windows(steps, 100) == windows
    assert own.windows(steps, 2) == windows[:2]
    assert own.rounds(steps) == len(windows)
    strategy = OuterOptimizer(period, fragments=fragments)
    due = [step for step in range(1, steps + 1) if strategy._is_due(step, period)]
    assert [sum(windows[: k + 1]) for k in range(len(due))] == due


def test_sums_take_as_long_as_their_messages_one_after_the_other() -> None:
    link = Link(1e6, 0.01)
    assert around_s(8e6, link, 4) == pytest.approx(6 * (0.01 + 2.0))
    assert around_s(8e6, link, 1) == 0  # one worker sums by itself


def test_a_name_has_what_differs_from_the_defaults() -> None:
    assert short_name(ParameterAveraging()) == "ParameterAveraging(period=5)"
    strategy = AsynchronousSGD(barrier=SSP(2))
    assert short_name(strategy) == "AsynchronousSGD(period=5, barrier=SSP(s=2))"


MANY = 200_000


def drawn(times: LogNormal, steps: int = 1, count: int = MANY) -> np.ndarray:
    return times.draw(np.random.default_rng(0), steps, count)


@every_row((LogNormal(0.1, 0.4), 0.1**2 * (np.exp(0.4**2) - 1)), (LogNormal(2.0), 0.0))
def test_windows_have_the_mean_and_the_variance_of_so_many_independent_steps(
    times: LogNormal, variance: float
) -> None:
    for steps in (1, 7, 500):
        seconds = drawn(times, steps)
        assert seconds.mean() == pytest.approx(steps * times.mean, rel=0.01)
        assert seconds.var() == pytest.approx(steps * variance, rel=0.03)


@every_row((LogNormal(0.1, 0.3), 1), (LogNormal(0.1, 0.3), 8), (LogNormal(5.0, 1.0), 1))
def test_what_was_drawn_is_found_again(true: LogNormal, steps: int) -> None:
    found = fitted(drawn(true, steps, 4000), steps)
    for name, value in vars(true).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.1)


@every(
    "make",
    [
        lambda: LogNormal(0.0),
        lambda: LogNormal(1.0, -0.1),
        lambda: LogNormal(float("nan")),
    ],
)
def test_times_that_cannot_be_are_refused_in_words(make: object) -> None:
    with pytest.raises(ConfigError, match="must be a number >"):
        make()  # type: ignore[operator]
