"""Schedules of the averager's decisions in virtual time: all of them end as their faults allow.

``--schedules`` is their number, ``--seed`` the seed of the first one. A schedule that fails is
printed with its seed and the smallest plan that still fails, or with what was wrong.

By default everyone is in every round. ``--strategy`` uses a strategy's policy, wire format and
update instead, and an oracle that says what the center has to be (``tests/strategies/oracles.py``);
``--every-strategy`` runs all of them, one after another.
"""

import logging
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

import harness

from sparkdl.testing.simulation import Plan, random_plan, simulate

sys.path.append(str(harness.FOLDER.parent / "tests"))
sys.path.append(str(harness.FOLDER.parent / "tests" / "strategies"))
from oracles import ORACLES
from support.shrinking import shrink

SHARE = 500
"""How many seeds a process takes at a time."""
EVERYONE = "everyone in every round"


def main() -> None:
    """Runs the schedules in as many processes as there are cores, and reports."""
    options = harness.parser(__doc__)
    options.add_argument("--schedules", type=int, help="100,000; 10,000 of a strategy")
    options.add_argument("--seed", type=int, default=0)
    which = options.add_mutually_exclusive_group()
    which.add_argument("--strategy", choices=ORACLES, metavar="NAME", help=", ".join(ORACLES))
    which.add_argument("--every-strategy", action="store_true")
    chosen = harness.parse(options, repeats=1)
    names = [*ORACLES] if chosen.every_strategy else [chosen.strategy or EVERYONE]
    schedules = chosen.schedules or (100_000 if names == [EVERYONE] else 10_000)
    if chosen.quick:
        schedules = 2_000 // len(names)
    claims, measured = [], {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name in names:
            claim, found = of(name, range(chosen.seed, chosen.seed + schedules), pool)
            shown = (f"{what} {count:,}" for what, count in found.items())
            print(claim, *shown, sep=", ", flush=True)
            claims.append(claim)
            measured[name] = found
    harness.report("simulation", claims, {"first_seed": chosen.seed, "schedules": measured})


def of(name: str, seeds: range, pool: ProcessPoolExecutor) -> tuple[harness.Claim, dict[str, int]]:
    """Runs one strategy's schedules.

    Args:
        name: the name of a strategy, or ``EVERYONE``.
        seeds: the seeds of the schedules.
        pool: runs them in its processes.

    Returns:
        How many ended as they should, and what happened in them.
    """
    began = time.perf_counter()
    counted: Counter[str] = Counter()
    most_ahead = 0
    shares = [seeds[start : start + SHARE] for start in range(0, len(seeds), SHARE)]
    failed: dict[int, str] = {}
    for part, ahead, wrong in pool.map(run, repeat(name), shares):
        counted += part
        most_ahead = max(most_ahead, ahead)
        failed |= wrong
    for seed, why in list(failed.items())[:10]:
        smallest = shrink(random_plan(seed), fails) if name == EVERYONE else why
        print(f"{name}, seed {seed}: {smallest}")
    found = {**counted, "most_ahead": most_ahead, "seconds": round(time.perf_counter() - began)}
    claim = harness.Claim(
        name=f"{name}: schedules that end as their faults allow / {len(seeds):,}",
        ratio=1 - len(failed) / len(seeds),
        target=1.0,
        at_least=True,
    )
    return claim, found


def run(name: str, seeds: range) -> tuple[Counter[str], int, dict[int, str]]:
    """Runs some schedules.

    Returns:
        What happened in them, the most windows by which anybody was ahead, and, by seed, what was
        wrong in those that failed.
    """
    logging.disable(logging.CRITICAL)  # each loss is a warning
    counted: Counter[str] = Counter()
    most_ahead, failed = 0, {}
    for seed in seeds:
        try:
            outcome = simulate(random_plan(seed)) if name == EVERYONE else ORACLES[name].run(seed)
        except Exception as error:  # any exception is a fault, and its seed is needed
            failed[seed] = repr(error)
            continue
        counted["models"] += outcome.failure is None
        counted["named_errors"] += outcome.failure is not None
        counted["events"] += outcome.events
        counted["commits"] += outcome.commits
        counted["losses"] += outcome.losses
        counted["checkpoints"] += outcome.checkpoints
        most_ahead = max(most_ahead, outcome.ahead)
    return counted, most_ahead, failed


def fails(plan: Plan) -> bool:
    """Whether something does not hold in a plan."""
    try:
        simulate(plan)
    except Exception:  # as above
        return True
    return False


if __name__ == "__main__":
    main()
