"""Making a simulated schedule that fails as small as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sparkdl.testing.simulation import Plan

OTHER_DELAYS = 10


def shrink(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Make a failing plan smaller, as long as it fails.

    Args:
        plan: the plan that fails.
        fails: tells whether another plan fails.
    """
    while True:
        for smaller in _smaller(plan):
            if fails(smaller):
                plan = smaller
                break
        else:
            return plan


def _smaller(plan: Plan) -> Sequence[Plan]:
    # What is left of the faults may need other delays.
    plans = [
        replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :], seed=seed)
        for seed in (plan.seed, *range(OTHER_DELAYS))
        for index in range(len(plan.faults))
    ]
    if plan.epochs > 1:
        plans.append(replace(plan, epochs=plan.epochs - 1))
    if plan.chunks > 1:
        plans.append(replace(plan, chunks=1))
    ranks = {fault.rank for fault in plan.faults}
    if len(plan.windows) > 1 and len(plan.windows) - 1 not in ranks:
        fewer = plan.windows[:-1]
        plans.append(replace(plan, windows=fewer, min_workers=min(plan.min_workers, len(fewer))))
    plans += [
        replace(plan, windows=(*plan.windows[:rank], count - 1, *plan.windows[rank + 1 :]))
        for rank, count in enumerate(plan.windows)
        if count > 1
    ]
    return plans
