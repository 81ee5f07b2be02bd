"""Epochs that are simulated, against the same ones on links of three speeds; and 10,000 workers.

As in ``planned_hosts.py`` every worker and the driver is on a host of its own, and a step's
computing is a sleep. What is simulated knows nothing of those fits but one worker's seconds a step
with links that hardly matter.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from planned_hosts import BATCH, FAST_MBIT, Hosts, LinkedHosts, seconds_a_step

import sparkdl
from sparkdl.planner.profile import Profile
from sparkdl.planner.simulation.exchanges import short_name
from sparkdl.planner.simulation.step_times import LogNormal
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

WORKERS = (4, 8, 2)
STEPS, EPOCHS, STEP_S = 20, 2, 0.5
"""Of each worker in an epoch; epochs, the first of which does not count; seconds of a step."""
STRATEGIES: dict[str, Strategy[Any]] = {
    "all-reduce": GradientAllReduce(),
    "averaging": ParameterAveraging(5),
    "averaging, executors": ParameterAveraging(5, aggregation="executors"),
    "elastic, executors": ElasticAveraging(5, aggregation="executors"),
    "elastic, asynchronous": ElasticAveraging(5, mode="asynchronous"),
    "elastic, round robin": ElasticAveraging(5, mode="round_robin"),
    "SSP": AsynchronousSGD(2, barrier=SSP(2)),
    "ASP": AsynchronousSGD(1, barrier=ASP()),
    "streaming DiLoCo": OuterOptimizer(10, fragments=2, overlap=2, wire_dtype="float4"),
    "gossip": GossipAveraging(2),
}
ERROR, TAU = 0.15, 0.8
MBIT = (100.0, 1000.0, 300.0)
ORDERED_MBIT = MBIT[:2]
MANY, ROUNDS, SECONDS = 10_000, 1_000, 60.0


def measure(*, quick: bool) -> None:
    """Measures and simulates everything, and reports.

    Args:
        quick: fewer epochs, workers and speeds, to see that it works.
    """
    counts, speeds = (WORKERS[:1], MBIT[:1]) if quick else (WORKERS, MBIT)
    with tempfile.TemporaryDirectory() as folder, LinkedHosts(max(counts), Path(folder)) as linked:
        hosts = Hosts(linked, Path(folder), EPOCHS, STEP_S)
        linked.limit(FAST_MBIT)
        alone = hosts.profile(ParameterAveraging(STEPS), 1, STEPS)
        measured: dict[tuple[float, int], dict[str, float]] = {}
        simulated: dict[tuple[float, int], dict[str, float]] = {}
        ratios: dict[str, float] = {}
        for workers, mbit in itertools.product(counts, speeds):
            linked.limit(mbit)
            simulated[mbit, workers] = guesses = simulated_steps(alone, mbit, workers)
            for each, strategy in STRATEGIES.items():
                seconds = seconds_a_step(hosts.profile(strategy, workers, STEPS))
                measured.setdefault((mbit, workers), {})[each] = seconds
                ratios[name := f"{each}, {mbit:g} Mbit/s, {workers} workers"] = (
                    guesses[each] / seconds
                )
                print(
                    f"{name}: {1e3 * seconds:.1f} ms a step, simulated / measured "
                    f"{ratios[name]:.3f}",
                    flush=True,
                )
    taus = {
        f"{mbit:g} Mbit/s, {workers} workers": kendall(of_all, simulated[mbit, workers])
        for (mbit, workers), of_all in measured.items()
        if mbit in ORDERED_MBIT
    }
    seconds = ten_thousand(alone)
    harness.report(
        "simulated_hosts",
        [
            harness.Claim(
                name=f"a step: largest |simulated / measured - 1| / {ERROR}",
                ratio=max(abs(each - 1) for each in ratios.values()) / ERROR,
                target=1,
            ),
            harness.Claim(
                name="order of the strategies: least Kendall tau of simulated and measured",
                ratio=min(taus.values()),
                target=TAU,
                at_least=True,
            ),
            harness.Claim(
                name=f"{MANY:,} workers, {ROUNDS:,} rounds: processor time / {SECONDS:g} s",
                ratio=max(seconds.values()) / SECONDS,
                target=1,
            ),
        ],
        {
            "simulated_over_measured": {name: round(each, 3) for name, each in ratios.items()},
            "taus": taus,
            "milliseconds_a_step": {
                f"{mbit:g} Mbit/s, {workers} workers": {
                    name: round(1e3 * each, 2) for name, each in of_all.items()
                }
                for (mbit, workers), of_all in measured.items()
            },
            "processor_seconds_of_10,000_workers": seconds,
        },
    )


def simulated_steps(alone: Profile, mbit: float, workers: int) -> dict[str, float]:
    """Seconds of a step, by strategy, as ``sparkdl.simulate`` has them.

    Args:
        alone: one worker's.
        mbit: of the links.
        workers: how many.
    """
    found = sparkdl.simulate(
        alone,
        workers=workers,
        link=f"{mbit} Mbit/s",
        rows=workers * STEPS * BATCH,
        optimizer_state=0,
        strategies=list(STRATEGIES.values()),
    )
    by_exchange = {exchange.name: epoch.seconds / STEPS for epoch, exchange in found.epochs}
    return {name: by_exchange[short_name(each)] for name, each in STRATEGIES.items()}


def kendall(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Pairs that two orders agree on, less those that they do not, over all pairs.

    Source: Kendall 1938, "A new measure of rank correlation".
    """
    pairs = list(itertools.combinations(one, 2))
    agreed = sum(1 if (one[a] < one[b]) == (other[a] < other[b]) else -1 for a, b in pairs)
    return agreed / len(pairs)


def ten_thousand(alone: Profile, strategies: Sequence[Strategy[Any]] = ()) -> dict[str, float]:
    """Processor time of simulating so many workers and rounds, by strategy.

    Args:
        alone: one worker's.
        strategies: which ones; by default a few of each kind.
    """
    took = {}
    for strategy in strategies or (
        ParameterAveraging(5),
        GradientAllReduce(),
        GossipAveraging(1),
        AsynchronousSGD(1, barrier=ASP()),
    ):
        began = time.process_time()
        sparkdl.simulate(
            alone,
            workers=MANY,
            link="10 Gbit/s, 0.1 ms",
            step_s=LogNormal(0.1, 0.3),
            rows=MANY * ROUNDS * alone.batch_size * getattr(strategy, "period", 1),
            strategies=[strategy],
        )
        took[short_name(strategy)] = time.process_time() - began
    return took
