"""Whole runs in virtual time: the real decisions, made-up workers, links and faults, one seed."""

from sparkdl.testing.simulation.plan import Fault, Kind, Plan, random_plan
from sparkdl.testing.simulation.run import Outcome, Violation, shrink, simulate

__all__ = [
    "Fault",
    "Kind",
    "Outcome",
    "Plan",
    "Violation",
    "random_plan",
    "shrink",
    "simulate",
]
