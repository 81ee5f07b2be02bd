"""Simulated and planned epochs in a report."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from every_row import every

from sparkdl.averager.policies.cutoff import best_cutoff
from sparkdl.planner.links import Link
from sparkdl.planner.simulation.cluster import Cluster
from sparkdl.planner.simulation.exchanges import Exchange, Topology, exchange_of
from sparkdl.planner.simulation.step_times import LogNormal, ShiftedGamma
from sparkdl.report import simulation
from sparkdl.report.simulation import STRATEGIES as USUAL
from sparkdl.report.simulation import simulate_epoch
from sparkdl.strategies import (
    ASP,
    SSP,
    AsynchronousSGD,
    ElasticAveraging,
    GossipAveraging,
    GradientAllReduce,
    OuterOptimizer,
    ParameterAveraging,
    Strategy,
)

STATE = {"parameters": 4e6, "buffers": 0.0, "optimizer": 4e6}
STRATEGIES: list[Strategy[Any]] = [
    *USUAL,
    ParameterAveraging(aggregation="hierarchical"),
    ParameterAveraging(cutoff=1),
    ElasticAveraging(mode="hogwild"),
    ElasticAveraging(mode="round_robin"),
    AsynchronousSGD(barrier=ASP()),
    OuterOptimizer(20, fragments=2, overlap=3, wire_dtype="float4"),
    GossipAveraging(mode="symmetric"),
]


def cluster(**given: Any) -> Cluster:
    usual: dict[str, Any] = {"workers": 8, "link": Link(12.5e6), "times": LogNormal(0.1)}
    return Cluster(**usual | given)


PASSING_S = 0.32
COMPUTING_S = 0.13 / 0.87 * 16 * PASSING_S
STAIRS: list[tuple[ElasticAveraging, Topology, int | None, float]] = [
    (ElasticAveraging(1, mode="round_robin"), "ring", None, 4.74),
    (ElasticAveraging(1, aggregation="executors"), "tree", 0, 3.06),
    (ElasticAveraging(1, aggregation="executors"), "ring", 0, 1.41),
    (ElasticAveraging(1, aggregation="executors"), "ring", None, 0.78),
]
"""As measured by ``bc8c4b4b:benchmarks/studies/elastic_staircase.py``, in seconds a step."""


def stair(strategy: ElasticAveraging, topology: Topology, overlap: int | None) -> float:
    exchange = replace(exchange_of(strategy, STATE, 8, topology), commit=0.0)
    if overlap is not None:
        exchange = replace(exchange, overlap=overlap)
    return simulate_epoch(exchange, cluster(times=LogNormal(COMPUTING_S)), 60).seconds / 60


@every("strategy, topology, overlap, measured", STAIRS)
def test_the_staircase_of_easgd_is_as_high_as_measured(
    strategy: ElasticAveraging, topology: Topology, overlap: int | None, measured: float
) -> None:
    assert stair(strategy, topology, overlap) == pytest.approx(measured, rel=0.15)


def test_messages_around_and_up_a_tree_have_the_ratio_of_you_et_al() -> None:
    """P exchanges against log2 P: 8 / 3 for 8 workers, where a millisecond is all that they take.

    In the round robin a worker's own two messages do not follow each other's: both are counted.
    """
    link = Link(1e15, 1e-3)
    one_s = simulate_epoch(
        exchange_of(AsynchronousSGD(1, barrier=ASP()), STATE, 1),
        cluster(workers=1, link=link, times=LogNormal(1e-9)),
        100,
    ).seconds
    tree = Exchange(name="tree", way="group", up=4e6, topology="tree")
    tree_s = simulate_epoch(tree, cluster(link=link, times=LogNormal(1e-9)), 100).seconds
    assert 8 * one_s / tree_s == pytest.approx(8 / 3, rel=1e-3)


@every("workers", [4, 16, 64])
def test_a_star_a_tree_and_a_ring_overtake_each_other_where_their_closed_forms_say(
    workers: int,
) -> None:
    """With latency a, S seconds for the model on a link, N workers and L = log2 N::

        star  2 a + 2 N S       tree  2 L (a + S)       ring  2 (N - 1) (a + S / N)

    So a star is fastest up to S = a (L - 1) / (N - L), then a tree is, and a ring from
    S = a (N - 1 - L) / (L - 1 + 1 / N) on. The star is the averager's, in the driver.
    """
    log, latency = math.log2(workers), 1e-3
    link = Link(1e9, latency)
    star_tree = latency * (log - 1) / (workers - log)
    tree_ring = latency * (workers - 1 - log) / (log - 1 + 1 / workers)
    for model_s, first in (
        (0.95 * star_tree, "star"),
        (1.05 * star_tree, "tree"),
        (0.95 * tree_ring, "tree"),
        (1.05 * tree_ring, "ring"),
    ):
        octets = model_s * link.bandwidth
        ways: dict[str, dict[str, Any]] = {
            "star": {"way": "driver", "up": octets, "down": octets},
            "tree": {"way": "group", "up": octets, "topology": "tree"},
            "ring": {"way": "group", "up": octets, "topology": "ring"},
        }
        of = cluster(workers=workers, link=link, times=LogNormal(1e-9))
        seconds = {
            name: simulate_epoch(Exchange(name=name, **way), of, 10).seconds
            for name, way in ways.items()
        }
        assert min(seconds, key=seconds.__getitem__) == first, (model_s, seconds)


@every(
    "workers, shift, cutoff, cut, everyone",
    [
        (16, 1.0, 11, 5.24, 3.65),
        (64, 1.0, 44, 20.5, 11.1),
        (158, 1.0, 108, 50.4, 23.8),
        (158, 3.0, 131, 27.6, 18.3),
    ],
)
def test_cutting_off_stragglers_pays_as_much_as_the_closed_form_says(
    workers: int, shift: float, cutoff: int, cut: float, everyone: float
) -> None:
    """Teng & Wood 2018: gradients a second of n workers whose times are shift + Exp(1).

    E[x_(c)] = shift + H_n - H_(n - c). Everyone's rounds are simulated; in the paper's scheme all
    begin together and late gradients are thrown away, so that the c-th smallest time is a round.
    """
    times = ShiftedGamma(shift, 1.0)
    of = cluster(workers=workers, times=times, link=Link(1e15))
    waits = exchange_of(ParameterAveraging(1), STATE, workers)
    rounds = 2000
    assert workers * rounds / simulate_epoch(waits, of, rounds).seconds == pytest.approx(
        everyone, rel=0.02
    )
    drawn = times.draw(np.random.default_rng(0), 1, 20_000 * workers).reshape(-1, workers)
    chosen = best_cutoff(drawn, np.empty((len(drawn), 0)))
    assert chosen == pytest.approx(cutoff, abs=0.04 * workers)  # the maximum is flat
    assert chosen / np.sort(drawn)[:, chosen - 1].mean() == pytest.approx(cut, rel=0.02)


@every("strategy", STRATEGIES)
def test_more_bandwidth_never_takes_longer(strategy: Strategy[Any]) -> None:
    exchange = exchange_of(strategy, STATE, 8)
    speeds = (1e5, 1e6, 1e7, 1e8, 1e9, 1e10)
    seconds = [
        simulate_epoch(exchange, cluster(link=Link(speed, 1e-4)), 60).seconds for speed in speeds
    ]
    assert seconds == sorted(seconds, reverse=True)
    # Those that are cut off miss a round; in a round robin, all wait for their turns.
    assert seconds[-1] == pytest.approx(6.0, rel=0.6 if "cutoff" in exchange.name else 0.15)


@every("strategy", STRATEGIES)
def test_with_links_that_take_no_time_the_slowest_worker_s_steps_are_an_epoch(
    strategy: Strategy[Any],
) -> None:
    exchange = exchange_of(strategy, STATE, 8)
    found = simulate_epoch(exchange, cluster(link=Link(1e15), slow={2: 1.5}), 60)
    assert found.seconds == pytest.approx(60 * 0.15, rel=0.2)
    assert found.seconds >= 60 * 0.15
    assert found.did[0] == pytest.approx(60 * 0.1 * 8.5, rel=1e-6)


def test_a_worker_alone_has_nobody_to_exchange_with_but_the_driver() -> None:
    alone = cluster(workers=1, link=Link(1.0))
    for strategy in STRATEGIES:
        exchange = replace(exchange_of(strategy, STATE, 1), commit=0.0)
        if exchange.way not in ("driver", "hosts"):
            found = simulate_epoch(exchange, alone, 60)
            assert (found.seconds, found.sent) == (pytest.approx(6.0), 0.0)


def test_ten_thousand_workers_take_a_thousand_rounds() -> None:
    """Within a minute of processor time for each strategy that rounds of all are computed for."""
    of = cluster(workers=10_000, link=Link(1.25e9, 1e-4), times=LogNormal(0.1, 0.3))
    for strategy in (ParameterAveraging(), GradientAllReduce(), GossipAveraging(5)):
        exchange = exchange_of(strategy, STATE, 10_000)
        began = time.process_time()
        found = simulate_epoch(exchange, of, 1000 * exchange.period)
        assert time.process_time() - began < 60
        assert (found.rounds, found.part) == (1000, 1.0)


def test_what_is_too_much_to_decide_on_is_taken_to_go_on_as_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = cluster(workers=30, link=Link(1.25e8), times=LogNormal(0.1, 0.3))
    exchange = exchange_of(AsynchronousSGD(1, barrier=SSP(3)), STATE, 30)
    whole = simulate_epoch(exchange, of, 600)
    monkeypatch.setattr(simulation, "MOST_DECISIONS", 30 * 200)
    some = simulate_epoch(exchange, of, 600)
    assert (whole.part, some.part) == (1.0, pytest.approx(1 / 3))
    assert some.seconds == pytest.approx(whole.seconds, rel=0.05)
    assert some.figures["driver_bytes"] == pytest.approx(whole.figures["driver_bytes"])
