"""Schedules of the averager's decisions in virtual time: all of them end as their faults allow.

``--schedules`` says how many, ``--seed`` with which one they begin. A schedule that fails is
printed with its seed and the smallest plan that still fails.
"""

import logging
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

import harness

from sparkdl.testing.simulation import Plan, random_plan, shrink, simulate

SHARE = 500
"""Seeds that a process takes at a time."""


def main() -> None:
    """Runs the schedules in as many processes as there are cores, and reports."""
    options = harness.parser(__doc__)
    options.add_argument("--schedules", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=0)
    chosen = harness.parse(options, repeats=1)
    schedules = 2_000 if chosen.quick else chosen.schedules
    began = time.perf_counter()
    counted: Counter[str] = Counter()
    failed: list[int] = []
    starts = range(chosen.seed, chosen.seed + schedules, SHARE)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for part, seeds in pool.map(run, starts, repeat(chosen.seed + schedules)):
            counted += part
            failed += seeds
    for seed in failed[:10]:
        print(f"seed {seed}: {shrink(random_plan(seed), fails)}")
    harness.report(
        "simulation",
        [
            harness.Claim(
                name=f"schedules that end as their faults allow / {schedules:,}",
                ratio=1 - len(failed) / schedules,
                target=1.0,
                at_least=True,
            )
        ],
        {
            "seconds": time.perf_counter() - began,
            "first_seed": chosen.seed,
            "failed_seeds": failed,
            **counted,
        },
    )


def run(start: int, stop: int) -> tuple[Counter[str], list[int]]:
    """Returns what happened in some schedules, and the seeds of those that failed."""
    logging.disable(logging.CRITICAL)  # each loss is a warning
    counted: Counter[str] = Counter()
    failed = []
    for seed in range(start, min(start + SHARE, stop)):
        try:
            outcome = simulate(random_plan(seed))
        except Exception:  # whatever it is, it is a fault, and its seed is what is needed
            failed.append(seed)
            continue
        counted["models"] += outcome.failure is None
        counted["named_errors"] += outcome.failure is not None
        counted["events"] += outcome.events
        counted["commits"] += outcome.commits
        counted["losses"] += outcome.losses
        counted["checkpoints"] += outcome.checkpoints
    return counted, failed


def fails(plan: Plan) -> bool:
    """Whether something does not hold in a plan."""
    try:
        simulate(plan)
    except Exception:  # as above
        return True
    return False


if __name__ == "__main__":
    main()
