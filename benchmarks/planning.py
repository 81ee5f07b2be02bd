"""Steps with 4 and 8 workers, predicted from fits with 1 and 2, on links of three speeds.

Every worker and the driver is on a host of its own (network namespaces, ``linked_hosts``).
A step's computing is a sleep, since all hosts share the cores of this machine; exchanges are real,
and so is the time that the processors take for them.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import digits
import harness
import numpy as np
import torch
from linked_hosts import LinkedHosts
from torch import Tensor, nn

from sparkdl.planner.links import Link
from sparkdl.planner.plan import Plan
from sparkdl.planner.profile import Profile
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import batches_of

MBIT = (100.0, 300.0, 1000.0)
FAST_MBIT = 10_000.0
"""Links that hardly matter, from which the others are predicted too."""
MEASURED, PREDICTED = (1, 2), (4, 8)
WIDTH = 1000
"""Of the model's one layer: 1,001,000 parameters, 4 MB."""
STEP_S = 0.2
BATCH = 4
PERIOD = 5
ROUNDS, EPOCHS = 2, 3
EFFICIENCY, TRIED = 0.8, 6
"""The efficiency at the most workers that are predicted to have it, six at a period chosen so."""
ERROR, OFF = 0.15, 0.08
Profiles = dict[tuple[float, str], dict[int, Profile]]
"""By speed and strategy, and by the number of workers."""
STRATEGIES: dict[str, Strategy[Any]] = {
    "driver": ParameterAveraging(PERIOD),
    "executors": ParameterAveraging(PERIOD, aggregation="executors"),
    "all-reduce": GradientAllReduce(),
}


class Paced(nn.Module):
    """A layer whose forward pass takes ``STEP_S``, most of it asleep."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        """Scores, shape (rows, width)."""
        began = time.monotonic()
        scores: Tensor = self.layer(rows)
        time.sleep(max(0.0, STEP_S - (time.monotonic() - began)))
        return scores


class Hosts:
    """Trains on some of the hosts.

    Args:
        linked: all of them.
        epochs: of each training.
    """

    def __init__(self, linked: LinkedHosts, epochs: int) -> None:
        self.linked, self._epochs = linked, epochs

    def profile(self, strategy: Strategy[Any], workers: int, steps: int) -> Profile:
        """Train, and return what that cost.

        Args:
            strategy: how the replicas agree.
            workers: how many.
            steps: of each, in an epoch.
        """
        features = np.zeros((steps * BATCH, WIDTH), dtype=np.float32)
        labels = np.zeros(steps * BATCH, dtype=np.int64)
        shard = batches_of(10_000, features=features, label=labels)
        job = digits.job(
            strategy,
            width=WIDTH,
            model=Paced,
            optimizer=partial(torch.optim.SGD, lr=0.01),
            epochs=self._epochs,
            batch_size=BATCH,
            seed=0,
        )
        profile = self.linked.train(job, [shard] * workers)
        print(
            f"{type(strategy).__name__}, {profile.aggregation}, {workers} workers: "
            f"{1e3 * seconds_a_step(profile):.1f} ms a step, {1e3 * profile.step_s:.1f} computing",
            flush=True,
        )
        return profile


def seconds_a_step(profile: Profile) -> float:
    """As the driver's clock measured the epochs."""
    steps = profile.rows / profile.workers / profile.batch_size
    return float(np.mean(profile.epoch_seconds)) / steps


def predicted(profiles: list[Profile], workers: int, **plan: Any) -> float:
    """Seconds of a step, from profiles with other numbers of workers."""
    steps = profiles[0].rows // profiles[0].workers // BATCH
    made = Plan(profiles, workers=[workers], rows=steps * BATCH * workers, **plan)
    return made.predict(workers).seconds / steps


def main() -> None:
    """Measures everything, and reports."""
    quick = harness.parse(harness.parser(__doc__), repeats=1).quick  # fewer epochs and one speed
    speeds = MBIT[:1] if quick else MBIT
    with (
        tempfile.TemporaryDirectory() as folder,
        LinkedHosts(max(PREDICTED), Path(folder)) as linked,
    ):
        hosts = Hosts(linked, 2 if quick else EPOCHS)
        found: Profiles = {}
        for mbit in (*speeds, FAST_MBIT):
            linked.limit(mbit)
            counts = MEASURED if mbit == FAST_MBIT else (*MEASURED, *PREDICTED)
            for name, strategy in STRATEGIES.items():
                found[mbit, name] = {
                    workers: hosts.profile(strategy, workers, ROUNDS * PERIOD) for workers in counts
                }
        same = compared(found, speeds)
        other = compared(found, speeds, base=FAST_MBIT)
        reached = {
            f"{mbit:g} Mbit/s": efficiency(hosts, found[mbit, "driver"], mbit) for mbit in speeds
        }
    off = max(abs(each - EFFICIENCY) for each in reached.values())
    name = f"efficiency of as many workers as are predicted to have {EFFICIENCY}"
    few = "workers from fits with 1 and 2"
    claims = [
        largest_error(f"a step with 4 and 8 {few} on the same links", same),
        harness.claim(f"{name}: largest difference / {OFF}", off, OFF, target=1),
        largest_error(f"a step with 1 to 8 {few} on links of 10 Gbit/s", other),
    ]
    measured = {"predicted_over_measured": same, "from_10_gbit": other, "efficiencies": reached}
    harness.report("planning", claims, measured)


def largest_error(what: str, ratios: Mapping[str, float]) -> harness.Claim:
    """Returns the claim about the prediction that is off most."""
    worst = max(abs(each - 1) for each in ratios.values())
    name = f"{what}: largest |predicted / measured - 1| / {ERROR}"
    return harness.claim(name, worst, ERROR, target=1)


def compared(
    found: Profiles, speeds: Sequence[float], *, base: float | None = None
) -> dict[str, float]:
    """Predicted / measured seconds of a step, by strategy, speed and number of workers.

    Args:
        found: what was measured.
        speeds: those that are predicted for.
        base: the speed of the links to predict from; the same one if left out.
    """
    ratios = {}
    for mbit, name in itertools.product(speeds, STRATEGIES):
        link = Link(mbit * 1e6 / 8)
        profiles = [found[base or mbit, name][each] for each in MEASURED]
        for workers in (*MEASURED, *PREDICTED) if base else PREDICTED:
            guess = predicted(profiles, workers, **{"link" if base else "measured_on": link})
            ratio = guess / seconds_a_step(found[mbit, name][workers])
            ratios[f"{name}, {mbit:g} Mbit/s, {workers} workers"] = round(ratio, 3)
    return ratios


def efficiency(hosts: Hosts, profiles: Mapping[int, Profile], mbit: float) -> float:
    """The measured efficiency of as many workers as are predicted to have 0.8, at a speed.

    The period is the shortest at which six workers are predicted to be that efficient, so that the
    most that are is a number between those that the prediction was made from and those that fit.
    """
    rounds = 2 * PERIOD * TRIED * max(PREDICTED)
    plan = Plan(
        [profiles[each] for each in MEASURED],
        measured_on=Link(mbit * 1e6 / 8),
        workers=[max(PREDICTED)],
        rows=1000 * rounds * BATCH,
    )
    period = next(
        each
        for each in range(PERIOD, 100_000)
        if plan.predict(TRIED, aggregation="driver", period=each).efficiency >= EFFICIENCY
    )
    most = max(
        each
        for each in range(1, max(PREDICTED) + 1)
        if plan.predict(each, period=period).efficiency >= EFFICIENCY
    )
    hosts.linked.limit(mbit)
    alone, many = (
        seconds_a_step(hosts.profile(ParameterAveraging(period), each, 2 * period))
        for each in (1, most)
    )
    print(f"{mbit:g} Mbit/s, period {period}: {most} workers: {alone / many:.3f}", flush=True)
    return round(alone / many, 3)


if __name__ == "__main__":
    main()
