"""What the parts of the chaos benchmark share: jobs under random faults, and how each is judged.

Where a window depends only on the center, one process trains the committed windows again and has
to arrive at the same parameters. Where the workers need each other, all go on from a commit, and
the parameters have to be those of a job without faults. Where each worker keeps its optimizer's
state to itself, that of a killed one is lost: there the final loss has to lie between two limits.
With fewer workers there are more rounds, and so more consecutive steps, up to as many as one worker
alone would take on all rows: its loss is the lower limit, that of a job without faults the upper
one, each with a tenth to spare.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import harness
from torch import nn

from sparkdl.errors import SparkDLError
from sparkdl.events import EpochSummary
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy

sys.path.append(str(harness.FOLDER.parent / "tests"))
from support.chaos import Storm
from support.replay import relative_difference

SAME = 1e-4
"""The largest difference of equal parameters, relative to the largest value of each tensor: float32
sums are formed in another order or precision. One window more or less makes it 1e-2."""
BAND = 0.1


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a job.

    Attributes:
        history: its epochs.
        module: the module that it trained.
        expected: the module that it should have; None where only a band of losses is known.
        band: the band of final losses.
    """

    history: Sequence[EpochSummary]
    module: nn.Module
    expected: nn.Module | None = None
    band: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One job that has ended.

    Attributes:
        part: the part of the benchmark.
        seed: the seed of its faults.
        strategy: the strategy's name.
        faults: the faults that were injected.
        hits: how many of them had something to hit.
        losses: how many workers were seen to be lost.
        seconds: how long it took.
        problem: what is wrong with it; empty if nothing is.
        difference: how far the parameters are from what they should be; None if not known.
    """

    part: str
    seed: int
    strategy: str
    faults: list[str]
    hits: int
    losses: int
    seconds: float
    problem: str
    difference: float | None


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What jobs of a part have in common.

    Attributes:
        part: the part's name.
        rows: rows per epoch.
        epochs: the number of epochs to train.
        left_behind: says what a job has left behind.
    """

    part: str
    rows: int
    epochs: int
    left_behind: Callable[[], str]

    def judge(self, result: Result) -> tuple[str, float | None]:
        """What is wrong with a job, and how far its parameters are from what they should be."""
        examples = [epoch.examples for epoch in result.history]
        if examples != [self.rows] * self.epochs:
            return f"rows were lost or doubled: {examples}", None
        difference = None
        if result.expected is not None:
            difference = relative_difference(result.module, result.expected)
            if not difference <= SAME:
                return f"parameters differ by {difference:.2g} from what they should be", difference
        loss = result.history[-1].loss
        if result.band is not None and not result.band[0] <= loss <= result.band[1]:
            return f"final loss {loss:.4f} outside of {result.band}", difference
        left = self.left_behind()
        return left and f"left behind: {left}", difference


Start = Callable[[int], tuple[Storm, Strategy, Callable[[], Result]]]


def run_jobs(kind: Kind, first_seed: int, faults: int, start: Start) -> list[Ended]:
    """Run one job after another until ``faults`` faults had something to hit.

    Args:
        kind: the kind of the jobs.
        first_seed: the first job's seed; the next one's is one more.
        faults: the number of faults in all.
        start: prepares a job; returns its storm, its strategy and a function that runs it.
    """
    ended: list[Ended] = []
    while sum(job.hits for job in ended) < faults:
        seed = first_seed + len(ended)
        storm, strategy, run = start(seed)
        started, difference = time.monotonic(), None
        try:
            problem, difference = kind.judge(run())
        except SparkDLError as error:
            problem = f"{type(error).__name__}: {error}"
        job = Ended(
            part=kind.part,
            seed=seed,
            strategy=short_name(strategy),
            faults=list(storm.injected),
            hits=storm.hits,
            losses=len(storm.losses),
            seconds=time.monotonic() - started,
            problem=problem,
            difference=difference,
        )
        ended.append(job)
        print(f"  {', '.join(job.faults)}")
        same = "" if difference is None else f", parameters within {difference:.1g}"
        print(
            f"{job.part}, seed {seed}, {job.strategy}: {job.hits} faults, {job.losses} losses "
            f"seen, {job.seconds:.1f} s{same}: {problem or 'right'}",
            flush=True,
        )
    return ended


def band_between(alone: float, calm: float) -> tuple[float, float]:
    """The band of final losses, from one worker's on all rows to that of all without faults."""
    return min(alone, calm) * (1 - BAND), max(alone, calm) * (1 + BAND)


def short_name(strategy: Strategy) -> str:
    if isinstance(strategy, ParameterAveraging):
        own = "" if strategy.average_optimizer_state else ", own optimizer state"
        return f"averaging{own}"
    return "all-reduce" if isinstance(strategy, GradientAllReduce) else str(strategy)
