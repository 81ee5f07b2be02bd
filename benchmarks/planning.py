"""Steps with 4 and 8 workers, predicted from fits with 1 and 2, on links of three speeds.

Every worker and the driver is on a host of its own (network namespaces, ``linked_hosts``).
A step's computing is a sleep, since all hosts share the cores of this machine; exchanges are real,
and so is the time that the processors take for them.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from linked_hosts import LinkedHosts
from torch import Tensor, nn

from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.planner.links import Link
from sparkdl.planner.plan import Plan
from sparkdl.planner.profile import Profile
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import batches_of
from sparkdl.worker import Job

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
STRATEGIES: dict[str, Strategy[Any]] = {
    "driver": ParameterAveraging(PERIOD),
    "executors": ParameterAveraging(PERIOD, aggregation="executors"),
    "all-reduce": GradientAllReduce(),
}


class Paced(nn.Module):
    """A layer whose forward pass takes as long as it is told to, most of it asleep."""

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, rows: Tensor) -> Tensor:
        """Scores, shape (rows, width)."""
        began = time.monotonic()
        scores: Tensor = self.layer(rows)
        time.sleep(max(0.0, self.seconds - (time.monotonic() - began)))
        return scores


class Hosts:
    """Trains on some of the hosts, and keeps the profiles.

    Args:
        hosts: all of them.
        folder: for the workers' rows.
        epochs: of each training.
        step_s: seconds of a step.
        width: of the model's one layer.
    """

    def __init__(
        self,
        hosts: LinkedHosts,
        folder: Path,
        epochs: int,
        step_s: float = STEP_S,
        width: int = WIDTH,
    ) -> None:
        self._hosts, self._folder, self._epochs = hosts, folder, epochs
        self._step_s, self._width = step_s, width

    def profile(self, strategy: Strategy[Any], workers: int, steps: int) -> Profile:
        """Train, and return what that cost.

        Args:
            strategy: how the replicas agree.
            workers: how many.
            steps: of each, in an epoch.
        """
        features = np.zeros((steps * BATCH, self._width), dtype=np.float32)
        labels = np.zeros(steps * BATCH, dtype=np.int64)
        shard = self._folder / f"{steps}-steps-of-{self._width}"
        shard.write_bytes(pickle.dumps(batches_of(10_000, features=features, label=labels)))
        job = Job(
            model=partial(Paced, self._step_s, self._width),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=0.01),
            strategy=strategy,
            schema=FeedSchema(
                (ColumnSpec("features", torch.float32, (self._width,)),),
                ColumnSpec("label", torch.int64, ()),
            ),
            epochs=self._epochs,
            batch_size=BATCH,
            seed=0,
            deadline_s=300.0,
        )
        profile = self._hosts.train(job, [shard] * workers)
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
    quick = harness.arguments(__doc__, repeats=1).quick  # fewer epochs and one speed
    speeds = MBIT[:1] if quick else MBIT
    with (
        tempfile.TemporaryDirectory() as folder,
        LinkedHosts(max(PREDICTED), Path(folder)) as linked,
    ):
        hosts = Hosts(linked, Path(folder), 2 if quick else EPOCHS)
        found = {
            (mbit, name): dict(_profiles(linked, hosts, mbit, strategy))
            for mbit in (*speeds, FAST_MBIT)
            for name, strategy in STRATEGIES.items()
        }
        same = _compared(found, speeds, from_fast=False)
        other = _compared(found, speeds, from_fast=True)
        efficiencies = dict(_efficiencies(linked, hosts, found, speeds))
    harness.report(
        "planning",
        [
            harness.Claim(
                name=f"a step with 4 and 8 workers from fits with 1 and 2 on the same links: "
                f"largest |predicted / measured - 1| / {ERROR}",
                ratio=max(abs(each - 1) for each in same.values()) / ERROR,
                target=1,
            ),
            harness.Claim(
                name=f"efficiency of as many workers as are predicted to have {EFFICIENCY}: "
                f"largest difference / {OFF}",
                ratio=max(abs(each - EFFICIENCY) for each in efficiencies.values()) / OFF,
                target=1,
            ),
            harness.Claim(
                name=f"a step with 1 to 8 workers from fits with 1 and 2 on links of 10 Gbit/s: "
                f"largest |predicted / measured - 1| / {ERROR}",
                ratio=max(abs(each - 1) for each in other.values()) / ERROR,
                target=1,
            ),
        ],
        {
            "milliseconds_a_step": {
                f"{name}, {mbit:g} Mbit/s": {
                    workers: round(1e3 * seconds_a_step(each), 2) for workers, each in them.items()
                }
                for (mbit, name), them in found.items()
            },
            "predicted_over_measured": {name: round(each, 3) for name, each in same.items()},
            "from_10_gbit": {name: round(each, 3) for name, each in other.items()},
            "efficiencies": {name: round(each, 3) for name, each in efficiencies.items()},
        },
    )


def _profiles(
    linked: LinkedHosts, hosts: Hosts, mbit: float, strategy: Strategy[Any]
) -> Iterator[tuple[int, Profile]]:
    linked.limit(mbit)
    counts = MEASURED if mbit == FAST_MBIT else (*MEASURED, *PREDICTED)
    for workers in counts:
        yield workers, hosts.profile(strategy, workers, ROUNDS * PERIOD)


def _compared(
    found: dict[tuple[float, str], dict[int, Profile]],
    speeds: tuple[float, ...],
    *,
    from_fast: bool,
) -> dict[str, float]:
    """Predicted / measured seconds of a step, by strategy, speed and number of workers."""
    ratios = {}
    for mbit in speeds:
        for name in STRATEGIES:
            measured = found[mbit, name]
            base = found[FAST_MBIT if from_fast else mbit, name]
            plan = {"link" if from_fast else "measured_on": Link(mbit * 1e6 / 8)}
            for workers in (*MEASURED, *PREDICTED) if from_fast else PREDICTED:
                guess = predicted([base[each] for each in MEASURED], workers, **plan)
                ratio = guess / seconds_a_step(measured[workers])
                ratios[f"{name}, {mbit:g} Mbit/s, {workers} workers"] = ratio
                source = "10 Gbit/s" if from_fast else "the same links"
                print(
                    f"{name}, {mbit:g} Mbit/s, {workers} workers, from fits on {source}: "
                    f"{1e3 * guess:.1f} ms a step, predicted / measured {ratio:.3f}",
                    flush=True,
                )
    return ratios


def _efficiencies(
    linked: LinkedHosts,
    hosts: Hosts,
    found: dict[tuple[float, str], dict[int, Profile]],
    speeds: tuple[float, ...],
) -> Iterator[tuple[str, float]]:
    """The measured efficiency of as many workers as are predicted to have 0.8, by speed.

    The period is the shortest at which six workers are predicted to be that efficient, so that the
    most that are is a number between those that the prediction was made from and those that fit.
    """
    for mbit in speeds:
        rounds = 2 * PERIOD * TRIED * max(PREDICTED)
        plan = Plan(
            [found[mbit, "driver"][each] for each in MEASURED],
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
        linked.limit(mbit)
        alone, many = (
            seconds_a_step(hosts.profile(ParameterAveraging(period), each, 2 * period))
            for each in (1, most)
        )
        print(
            f"{mbit:g} Mbit/s, period {period}: {most} workers have an efficiency of "
            f"{alone / many:.3f}",
            flush=True,
        )
        yield f"{mbit:g} Mbit/s, period {period}, {most} workers", alone / many


if __name__ == "__main__":
    main()
