"""Whole runs in virtual time: the real averager and clients; made-up training, faults; one seed."""

from sparkdl.testing.simulation.center import Oracle
from sparkdl.testing.simulation.plan import Fault, Kind, Plan, random_plan
from sparkdl.testing.simulation.run import Outcome, Violation, simulate, simulate_strategy

__all__ = [
    "Fault",
    "Kind",
    "Oracle",
    "Outcome",
    "Plan",
    "Violation",
    "random_plan",
    "simulate",
    "simulate_strategy",
]
