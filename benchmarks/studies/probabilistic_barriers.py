"""Barriers that look at a sample of the workers: steps, spread and error against its size.

The averager's own decisions and round policies in virtual time, without links or values that
travel, after Wang, Catterall & Mortier 2017, "Probabilistic Synchronous Parallel" (arXiv
1709.07772). First their figure of 200 workers in 200 s, whose steps take 1 s plus a time drawn from
an exponential distribution of mean 1 s; then 1,000 workers, one in twenty of them four times as
slow, training a linear model with a small learning rate and with a bold one. "Missing" are the
windows that a worker's center lacks that it would have if all waited for all, per other worker.
``barriers_plot.py`` draws the second part.
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

import harness
import numpy as np

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.messages.progress import Position
from sparkdl.averager.policies.round_policy import RoundPolicy
from sparkdl.events import WindowReport
from sparkdl.planner.simulation.virtual_run import VirtualRun
from sparkdl.strategies import ASP, BSP, PBSP, PSSP, SSP, Barrier

FIGURE = {
    BSP(): 29.5,
    SSP(4): 82.6,
    ASP(): 99.9,
    PBSP(10): 41.0,
    PBSP(1): 60.1,
    PSSP(10, 4): 87.0,
}
"""Median steps of 200 workers in 200 s. The paper gives 30 and 100 for the first and third, and the
order of all; the other numbers are from its model, computed independently of this code."""
SAMPLES = (0, 1, 2, 4, 10, 50, 200)
WORKERS, SECONDS, SLOW_SHARE, SLOWNESS = 1000, 60.0, 0.05, 4.0
CLAIMED = (PBSP(0), PBSP(10), BSP())
RATIOS = {
    "1,000 workers, 5 % of them slow: steps with samples of 1 % / of everyone": 1.5,
    "windows that a center misses, with samples of 1 % / without": 0.5,
    "error after 60 s, with samples of 1 % / with everyone": 1.0,
    "with a bold learning rate, samples of 1 % / the better of none and everyone": 1.0,
}
"""The claims and their targets; the first is a lower bound."""
Answer = TypeVar("Answer")
WIDTH, ROWS, NOISE = 20, 40, 0.5
SMALL, BOLD = 0.3, 1.3
"""Learning rates; with everyone in each step and no noise, 1 would give the solution at once."""


@dataclass(frozen=True)
class Outcome:
    """The results of a simulated run.

    Attributes:
        steps: median of the workers' steps.
        spread: the range of steps that holds half of the workers.
        error: distance of the center from the model that made the rows, relative to the first.
        missing: mean over all windows.
        policy_us: microseconds of processor time per contribution in which the policy answered.
    """

    steps: float
    spread: float
    error: float
    missing: float
    policy_us: float

    def __str__(self) -> str:
        return (
            f"{self.steps:6.1f} steps, spread {self.spread:5.1f}, missing {self.missing:6.3f}, "
            f"error {self.error:.4f}, policy {self.policy_us:6.2f} us a contribution"
        )


def main() -> None:
    """Runs both parts, and reports."""
    chosen = harness.arguments(__doc__, repeats=3)
    figure = {}
    for barrier in FIGURE:
        runs = [simulate(barrier, 200, 200.0, seed) for seed in range(chosen.repeats)]
        figure[str(barrier)] = statistics.median(run.steps for run in runs)
        print(f"200 workers, {barrier}: {figure[str(barrier)]:.1f} steps", flush=True)
    found: dict[str, Outcome] = {}
    bold: dict[str, float] = {}
    for barrier in (BSP(), SSP(4), *map(PBSP, SAMPLES), PSSP(10, 4)):
        found[str(barrier)] = outcome = slowed(barrier, WORKERS)
        bold[str(barrier)] = error = slowed(barrier, WORKERS, BOLD).error
        print(f"{WORKERS:,} workers, {barrier}: {outcome}, bold {error:.4f}", flush=True)
    ratios, policy_us = [_ratios(found, bold)], [found[str(PBSP(10))].policy_us]
    for seed in range(1, chosen.repeats):
        again = {str(each): slowed(each, WORKERS, seed=seed) for each in CLAIMED}
        errors = {str(each): slowed(each, WORKERS, BOLD, seed).error for each in CLAIMED}
        ratios.append(_ratios(again, errors))
        policy_us.append(again[str(PBSP(10))].policy_us)
    few_us = [slowed(PBSP(10), 100, seed=seed).policy_us for seed in range(chosen.repeats)]
    costs = [
        harness.show(
            f"{workers} workers, {PBSP(10)}: what the policy's answers take", each, unit="us"
        )
        for workers, each in ((WORKERS, policy_us), (100, few_us))
    ]
    by_name = dict(zip(RATIOS, zip(*ratios, strict=True), strict=True))
    middle = {name: harness.show(name, each, unit="") for name, each in by_name.items()}
    claims = [
        harness.Claim(
            name="200 workers, 200 s: the farthest that steps are off the paper's model",
            ratio=max(abs(figure[str(each)] / steps - 1) for each, steps in FIGURE.items()),
            target=0.05,
        ),
        *(
            harness.Claim(name=name, ratio=middle[name], target=target, at_least=target > 1)
            for name, target in RATIOS.items()
        ),
        harness.Claim(
            name="what the policy's answers take a contribution, 1,000 workers / 100",
            ratio=costs[0] / costs[1],
            target=1.5,
        ),
    ]
    measured = {name: vars(out) | {"bold_error": bold[name]} for name, out in found.items()}
    figures = {"figure": figure, "slowed": measured, "ratios_by_seed": by_name}
    harness.report("probabilistic_barriers", claims, figures)


def _ratios(found: dict[str, Outcome], bold: dict[str, float]) -> tuple[float, ...]:
    """The values of ``RATIOS``, from the results by barrier and the errors with the bold rate."""
    none, some, everyone = (found[str(barrier)] for barrier in CLAIMED)
    boldest = [bold[str(barrier)] for barrier in CLAIMED]
    return (
        some.steps / everyone.steps,
        some.missing / none.missing,
        some.error / everyone.error,
        boldest[1] / min(boldest[0], boldest[2]),
    )


def slowed(barrier: Barrier, workers: int, rate: float = SMALL, seed: int = 0) -> Outcome:
    """Simulates a run in which some workers are slow."""
    slow = [SLOWNESS if rank < SLOW_SHARE * workers else 1.0 for rank in range(workers)]
    return simulate(barrier, workers, SECONDS, seed=seed, slowness=slow, rate=rate)


class Timed(RoundPolicy):
    """Another policy, and the processor time that its answers take.

    Args:
        policy: the policy to time.
    """

    def __init__(self, policy: RoundPolicy) -> None:
        self._policy = policy
        self.seconds = 0.0
        self.in_step = policy.in_step

    def begin(self, positions: Sequence[Position]) -> None:
        """Ask the other policy."""
        self._policy.begin(positions)

    def group(self, rank: int, active: Set[int]) -> Collection[int]:
        """Ask the other policy; not timed, because this is asked once per round."""
        return self._policy.group(rank, active)

    def is_enough(self, entered: int, late: int, group: int) -> bool:
        """Ask the other policy."""
        return self._policy.is_enough(entered, late, group)

    def goes_on(self, rank: int, active: Set[int]) -> bool:
        """Ask the other policy."""
        return self._measure(lambda: self._policy.goes_on(rank, active))

    def committed(self, windows: Iterable[WindowReport], active: Set[int]) -> Iterable[int]:
        """Ask the other policy."""
        told = list(windows)
        return self._measure(lambda: self._policy.committed(told, active))

    def _measure(self, ask: Callable[[], Answer]) -> Answer:
        began = time.thread_time()
        answer = ask()
        self.seconds += time.thread_time() - began
        return answer


def simulate(
    barrier: Barrier,
    workers: int,
    seconds: float,
    seed: int,
    slowness: Sequence[float] | None = None,
    rate: float = SMALL,
) -> Outcome:
    """Train for some seconds of virtual time.

    Args:
        barrier: decides who waits for whom.
        workers: the number of workers.
        seconds: length of the run; what is not contributed by then does not count.
        seed: determines how long steps take, and the rows.
        slowness: the factor by which each worker's steps take longer.
        rate: the learning rate.
    """
    run = _Run(barrier, workers, seed, slowness or [1.0] * workers, rate)
    run.train(seconds)
    steps = np.array(run.steps)
    low, high = np.percentile(steps, [25, 75])
    return Outcome(
        steps=float(np.median(steps)),
        spread=float(high - low),
        error=float(np.linalg.norm(run.center - run.target) / np.linalg.norm(run.target)),
        missing=float(np.mean(run.missing)),
        policy_us=1e6 * run.policy.seconds / sum(run.steps),
    )


class _Run(VirtualRun):
    def __init__(
        self, barrier: Barrier, workers: int, seed: int, slowness: Sequence[float], rate: float
    ) -> None:
        self.policy = Timed(barrier.policy(1))
        super().__init__(self.policy, workers)
        self.missing: list[float] = []
        self._draw = np.random.default_rng(seed)
        self.target = self._draw.normal(size=WIDTH)
        self.center = np.zeros(WIDTH)
        self._slowness = slowness
        self._rate = rate
        self._begun = [self.center] * workers
        self._changes: list[np.ndarray] = []
        # The number of workers by how many steps they have taken.
        self._at = np.zeros(10_000)
        self._at[0] = workers

    def train(self, seconds: float) -> None:
        """Let the workers train until it is so late."""
        for rank in self.windows(seconds):
            step = self.steps[rank]
            self._at[step - 1 : step + 1] += (-1, 1)
            self._changes.append(self._change(self._begun[rank]))
            self.close(
                WindowReport(
                    rank=rank,
                    epoch=1,
                    step=step,
                    examples=ROWS,
                    loss_sum=0.0,
                    last=False,
                    step_of_epoch=step,
                )
            )

    def decided(self, decisions: Sequence[do.Decision]) -> None:
        if any(isinstance(decision, do.Commit) for decision in decisions):
            # Each change counts the same, however many make up an update.
            self.center = self.center + sum(self._changes) / len(self.steps)
            self._changes = []

    def begun(self, rank: int) -> float:
        step = self.steps[rank]
        behind = np.arange(step, 0, -1) @ self._at[:step]
        self.missing.append(float(behind) / len(self.steps))
        self._begun[rank] = self.center
        return self.now + self._slowness[rank] * (1 + self._draw.exponential())

    def _change(self, begun: np.ndarray) -> np.ndarray:
        """A step on rows made by the model with ``target``."""
        rows = self._draw.normal(size=(ROWS, WIDTH))
        residual = rows @ (begun - self.target) - NOISE * self._draw.normal(size=ROWS)
        return -self._rate * (residual @ rows) / ROWS


if __name__ == "__main__":
    main()
