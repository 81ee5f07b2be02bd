"""What a plan puts first, against what is fastest, for two models on links of three speeds.

As in ``planned_hosts.py`` every worker and the driver is on a host of its own, and a step's
computing is a sleep. A plan is made from fits with 1 and 2 workers that average in the driver and
one with 2 workers that average among themselves, on the same links, which is what ``sparkdl.plan``
probes. Then each number of workers and each place is measured on the same rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import harness
import numpy as np
from planned_hosts import EFFICIENCY, MBIT, OFF, Hosts, LinkedHosts

from sparkdl.planner.links import Link
from sparkdl.planner.plan import Plan
from sparkdl.planner.profile import Profile
from sparkdl.strategies import ParameterAveraging

WORKERS = (1, 2, 4, 8)
PLACES: tuple[Literal["driver"], Literal["executors"]] = ("driver", "executors")
EPOCHS, WITHIN = 3, 1.1
Choice = tuple[int, str]
"""How many workers, and where they average."""
FITTED: tuple[Choice, ...] = ((1, "driver"), (2, "driver"), (2, "executors"))


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        width: of its one layer.
        step_s: seconds of a step.
        period: steps between two rounds.
        steps: of an epoch, all workers' together.
    """

    width: int
    step_s: float
    period: int
    steps: int


MODELS = {"4 MB": Model(1000, 0.1, 5, 80), "2 kB": Model(20, 0.02, 1, 320)}


def measure(*, quick: bool) -> None:
    """Measures everything, and reports.

    Args:
        quick: one speed and fewer epochs, to see that it works.
    """
    worst: dict[str, bool] = {}
    fastest: dict[str, float] = {}
    efficient: dict[str, float] = {}
    measured: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        LinkedHosts(max(WORKERS), Path(folder)) as linked,
    ):
        for name, model in MODELS.items():
            hosts = Hosts(linked, Path(folder), 2 if quick else EPOCHS, model.step_s, model.width)
            for mbit in MBIT[-1:] if quick else MBIT:
                linked.limit(mbit)
                fits = dict(_fits(hosts, model))
                where = f"{name}, {mbit:g} Mbit/s"
                plan = Plan([fits[each] for each in FITTED], measured_on=Link(mbit * 1e6 / 8))
                took = {each: float(np.mean(fit.epoch_seconds)) for each, fit in fits.items()}
                first, thrifty = advised(plan, 0.0), advised(plan, EFFICIENCY)
                fastest[where] = took[first] / min(took.values())
                worst[where] = took[first] == max(took.values())
                # As efficiencies are predicted within OFF, so are those that count here.
                least = EFFICIENCY + OFF
                enough = [s for each, s in took.items() if efficiency(took, each) >= least]
                efficient[where] = took[thrifty] / min(enough)
                measured[where] = {
                    f"{workers} workers, {place}": round(seconds, 3)
                    for (workers, place), seconds in took.items()
                }
                print(
                    f"{where}: first {first}, {fastest[where]:.3f} times as long as the fastest; "
                    f"of those {EFFICIENCY} efficient {thrifty}, {efficient[where]:.3f} times; "
                    f"{measured[where]}",
                    flush=True,
                )
    harness.report(
        "planning_advice",
        [
            harness.Claim(
                name="largest seconds of an epoch as advised first / of the fastest measured",
                ratio=max(fastest.values()),
                target=WITHIN,
            ),
            harness.Claim(
                name="how often what is advised first is the slowest of all",
                ratio=sum(worst.values()),
                target=0,
            ),
            harness.Claim(
                name=f"largest seconds of an epoch as advised for an efficiency of {EFFICIENCY} / "
                f"of the fastest measured at {EFFICIENCY + OFF:g} or more",
                ratio=max(efficient.values()),
                target=WITHIN,
            ),
        ],
        {"seconds_an_epoch": measured, "first": fastest, "efficient": efficient},
    )


def _fits(hosts: Hosts, model: Model) -> Iterator[tuple[Choice, Profile]]:
    for place in PLACES:
        for workers in WORKERS:
            strategy = ParameterAveraging(model.period, aggregation=place)
            yield (workers, place), hosts.profile(strategy, workers, model.steps // workers)


def advised(plan: Plan, least_efficiency: float) -> Choice:
    """The number of workers and the place with the shortest epoch of those that are measured."""
    found = [
        each
        for workers in WORKERS
        for place in PLACES
        for each in [plan.predict(workers, aggregation=place)]
        if each.efficiency >= least_efficiency
    ]
    best = min(found, key=lambda each: each.seconds)
    return best.workers, str(best.aggregation)


def efficiency(took: dict[Choice, float], choice: Choice) -> float:
    """One worker's seconds / all workers' seconds together."""
    workers, place = choice
    return took[1, place] / (workers * took[choice])
