"""What strategies send, against figures computed by hand; and how long sums among workers take."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from every_row import every

from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link
from sparkdl.planner.simulation.exchanges import (
    Exchange,
    exchange_of,
    short_name,
    sum_s,
    summed_bytes,
)
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

STATE = {"parameters": 4e6, "buffers": 4e4, "optimizer": 8e6}
ALL, MODEL = 12.04e6, 4.04e6
WORKERS = 8


@every(
    "strategy, expected",
    [
        (GradientAllReduce(), {"way": "group", "up": 4e6, "period": 1, "commit": ALL}),
        (GradientAllReduce(compression="fp16", accumulate=3), {"up": 2e6, "period": 3}),
        (GradientAllReduce(bucket_mb=1), {"buckets": 4}),
        (GradientAllReduce(bucket_mb=1, compression="bf16"), {"buckets": 4, "up": 2e6}),
        (GradientAllReduce(compression=TopK(0.01)), {"up": 8e4, "topology": "gather"}),
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
        # A thousandth of the entries, by their places; the reply has the sums of eight workers'.
        (ThresholdGradientSharing(), {"way": "driver", "up": 4e3, "down": 64e3}),
        (ThresholdGradientSharing(aggregation="executors"), {"up": 4e3, "topology": "gather"}),
    ],
)
def test_a_strategy_sends(strategy: Strategy[Any], expected: dict[str, object]) -> None:
    found = exchange_of(strategy, STATE, WORKERS)
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected)


@every(
    "strategy",
    [
        GradientAllReduce(compression=PowerSGD(2)),
        GradientAllReduce(compression=OneBitAdam(100)),
        GradientAllReduce(preconditioner=KFACPreconditioner()),
        GradientAllReduce(hybrid=Hybrid("*")),
        GradientAllReduce(shard_optimizer=True),
        OuterOptimizer(period=((1, 1), (3, 16))),
        ThresholdGradientSharing(sparsity=None),
        "averaging",
    ],
)
def test_what_is_not_known_is_refused_in_words(strategy: Any) -> None:
    with pytest.raises(ConfigError, match=r"is not known: it depends on|is no strategy, such as"):
        exchange_of(strategy, STATE, WORKERS)


@every("reduced", [GradientAllReduce, partial(ParameterAveraging, 5, aggregation="executors")])
def test_sums_along_trees_are_refused_in_words(reduced: Any) -> None:
    with pytest.raises(ConfigError, match=r"sums along trees .* not simulated: drop reduction"):
        exchange_of(reduced(reduction=ColorTrees()), STATE, WORKERS)


def test_an_exchange_stands_for_itself() -> None:
    own = Exchange(name="own", way="group", up=1.0)
    assert exchange_of(own, STATE, WORKERS) is own


@every(
    "period, fragments, steps, windows",
    [
        (5, 1, 12, [5, 5, 2]),
        (5, 1, 10, [5, 5]),
        (5, 1, 3, [3]),
        (1, 1, 3, [1, 1, 1]),
        (10, 3, 20, [4, 3, 3, 4, 3, 3]),
    ],
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


def test_windows_are_made_only_as_far_as_they_are_simulated() -> None:
    own = Exchange(name="own", way="driver", up=1.0, period=2, fragments=2, closing=1)
    assert own.rounds(10**15) == 10**15 + 1
    assert own.windows(10**15, 3) == [1, 1, 1]
    assert own.windows(3, 4) == [1, 1, 1, 0]


def test_sums_take_as_long_as_their_messages_one_after_the_other() -> None:
    link = Link(1e6, 0.01)
    assert sum_s("ring", 8e6, link, 4) == pytest.approx(6 * (0.01 + 2.0))
    assert sum_s("tree", 8e6, link, 8) == pytest.approx(6 * (0.01 + 8.0))
    assert sum_s("tree", 8e6, link, 5) == pytest.approx(6 * (0.01 + 8.0))
    assert sum_s("gather", 8e6, link, 4) == pytest.approx(3 * (0.01 + 8.0))
    assert summed_bytes("ring", 8e6, 4) == 12e6
    assert summed_bytes("tree", 8e6, 8) == 24e6
    assert summed_bytes("gather", 8e6, 4) == 24e6


def test_one_worker_sums_by_itself() -> None:
    for topology in ("ring", "tree", "gather"):
        assert sum_s(topology, 8e6, Link(1e6, 0.01), 1) == 0  # type: ignore[arg-type]
        assert summed_bytes(topology, 8e6, 1) == 0  # type: ignore[arg-type]


def test_rings_overtake_trees_where_bytes_outweigh_messages() -> None:
    """By the alpha-beta model at S = a B (2 (N - 1) - 2 log N) / (2 log N - 2 (N - 1) / N)."""
    for workers, log in ((4, 2), (16, 4), (64, 6)):
        link = Link(1e8, 1e-3)
        least = link.latency * link.bandwidth * (workers - 1 - log) / (log - 1 + 1 / workers)
        for part, faster in ((0.99, "tree"), (1.01, "ring")):
            seconds = {each: sum_s(each, part * least, link, workers) for each in ("ring", "tree")}  # type: ignore[arg-type]
            assert min(seconds, key=seconds.__getitem__) == faster


def test_a_name_has_what_differs_from_the_defaults() -> None:
    assert short_name(ParameterAveraging()) == "ParameterAveraging(period=5)"
    strategy = AsynchronousSGD(barrier=SSP(2))
    assert short_name(strategy) == "AsynchronousSGD(period=5, barrier=SSP(s=2))"
