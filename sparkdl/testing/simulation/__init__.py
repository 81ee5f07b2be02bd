"""Whole runs in virtual time: real decisions; simulated workers, links and faults; one seed."""

from sparkdl.testing.simulation.plan import Fault, Kind, Plan, random_plan
from sparkdl.testing.simulation.run import Outcome, Violation, shrink, simulate
from sparkdl.testing.simulation.strategy import Oracle, simulate_strategy

__all__ = [
    "Fault",
    "Kind",
    "Oracle",
    "Outcome",
    "Plan",
    "Violation",
    "random_plan",
    "shrink",
    "simulate",
    "simulate_strategy",
]
