"""Rounds that are cut off: contributions per second, error, and how long an epoch takes.

After Teng & Wood 2018, "High Throughput Synchronous Distributed Stochastic Gradient Descent". First
their scheme, in which all workers begin each round together, and late contributions are thrown away
and their times imputed: the model and the choice alone. Then the averager's own decisions in
virtual time, which move late contributions to the next round, training a linear model. Each window
takes 1 s plus a time drawn from an exponential distribution of mean 1 s; or hosts of four workers
are four times as slow for spells of 20 s, a quarter of the time.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import astuple, dataclass
from functools import partial

import harness
import numpy as np

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.policies.cutoff import BackupWorkers, PredictedCutoff, RunTimes, best_cutoff
from sparkdl.averager.policies.round_policy import All, RoundPolicy
from sparkdl.events import WindowReport
from sparkdl.planner.simulation.virtual_run import VirtualRun

WORKERS, HOST = 160, 4
SPELL_S, BETWEEN_S, SLOWNESS = 20.0, 60.0, 4.0
ROUNDS, FIRST = 180, 30
"""Rounds of the paper's scheme, and how many are not counted because times are still unknown."""
FEW, MANY = 6, 40
"""Backup workers: 4 % as in Chen et al. 2016, and as many as there are slow workers on average."""
SECONDS = 100.0
WIDTH, ROWS, LEARNING_RATE, NOISE = 20, 40, 0.05, 0.5


def main() -> None:
    """Runs all parts, and reports."""
    chosen = harness.arguments(__doc__, repeats=3)
    thrown = {noise: throughputs(noise, chosen.repeats) for noise in ("exponential", "spells")}
    for noise, rates in thrown.items():
        told = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
        print(f"late thrown away, {noise}: contributions a second: {told}", flush=True)
    policies = {
        "everyone": All,
        f"all but {FEW}": partial(BackupWorkers, FEW),
        f"all but {MANY}": partial(BackupWorkers, MANY),
        "predicted": PredictedCutoff,
    }
    folded: dict[str, dict[str, Outcome]] = {"exponential": {}, "spells": {}}
    for noise, outcomes in folded.items():
        for name, policy in policies.items():
            runs = [train(policy(), noise, seed) for seed in range(chosen.repeats)]
            outcomes[name] = outcome = Outcome.median(runs)
            errors = ", ".join(f"{run.error:.4f}" for run in runs)
            print(f"late in the next round, {noise}, {name}: {outcome}; {errors}", flush=True)
    claims = claims_of(thrown, folded)
    figures = {
        noise: {name: vars(outcome) for name, outcome in outcomes.items()}
        for noise, outcomes in folded.items()
    }
    measured = {"thrown_away": thrown, "in_the_next_round": figures}
    harness.report("cutoff", claims, measured)


def claims_of(
    thrown: dict[str, dict[str, float]],
    folded: dict[str, dict[str, "Outcome"]],
) -> list[harness.Claim]:
    """The bounds that the figures, by noise, are held to."""
    exponential, spells = thrown["exponential"], thrown["spells"]
    more = partial(harness.Claim, at_least=True)
    return [
        more(
            name="exponential times, late thrown away: contributions/s, predicted / everyone",
            ratio=exponential["predicted"] / exponential["everyone"],
            target=2.0,
        ),
        more(
            name="predicted / the best fixed number, known only afterwards",
            ratio=exponential["predicted"] / exponential["best fixed"],
            target=0.97,
        ),
        more(
            name="hosts slow for spells: predicted / the best fixed number",
            ratio=spells["predicted"] / spells["best fixed"],
            target=1.0,
        ),
        more(
            name=f"predicted / all but {FEW}",
            ratio=spells["predicted"] / spells[f"all but {FEW}"],
            target=1.5,
        ),
        *(
            harness.Claim(
                name=f"{noise}, late in the next round: error after {SECONDS:g} s, "
                "predicted / everyone",
                ratio=outcomes["predicted"].error / outcomes["everyone"].error,
                target=0.7,
            )
            for noise, outcomes in folded.items()
        ),
    ]


class Times:
    """How long workers take.

    Args:
        noise: ``exponential`` or ``spells``.
        seed: determines what is drawn.
    """

    def __init__(self, noise: str, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._has_spells = noise == "spells"
        hosts = WORKERS // HOST
        self._slow = self._draw.random(hosts) < SPELL_S / (SPELL_S + BETWEEN_S)
        self._changes = np.where(
            self._slow,
            self._draw.exponential(SPELL_S, hosts),
            self._draw.exponential(BETWEEN_S, hosts),
        )

    def window(self, rank: int, now: float) -> float:
        """Seconds taken by a window that begins now."""
        if not self._has_spells:
            return 1 + float(self._draw.exponential())
        host = rank // HOST
        while self._changes[host] <= now:
            self._slow[host] = not self._slow[host]
            lasts = SPELL_S if self._slow[host] else BETWEEN_S
            self._changes[host] += self._draw.exponential(lasts)
        usual = float(np.exp(0.15 * self._draw.normal()))
        return usual * (SLOWNESS if self._slow[host] else 1.0)


def throughputs(noise: str, repeats: int) -> dict[str, float]:
    """Contributions per second in the paper's scheme, by who is waited for; medians."""
    runs = [throughput(noise, seed) for seed in range(repeats)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def throughput(noise: str, seed: int) -> dict[str, float]:
    """One run of the paper's scheme."""
    fixed = {c: _Rounds(noise, seed).run(lambda *_, c=c: c) for c in range(8, WORKERS + 1, 8)}
    return {
        "everyone": fixed[WORKERS],
        f"all but {FEW}": _Rounds(noise, seed).run(lambda *_: WORKERS - FEW),
        "best fixed": max(fixed.values()),
        "predicted": _Rounds(noise, seed).run(_Predicted(seed)),
        "known before": _Rounds(noise, seed).run(
            lambda _, times: int(np.argmax(np.arange(1, WORKERS + 1) / np.sort(times))) + 1
        ),
    }


class _Rounds:
    """Rounds that all begin together, where late contributions are thrown away."""

    def __init__(self, noise: str, seed: int) -> None:
        self._times = Times(noise, seed)

    def run(self, choose: Callable[[int, np.ndarray], int]) -> float:
        """Returns contributions per second."""
        now, counted, began = 0.0, 0, 0.0
        for round in range(ROUNDS):
            if round == FIRST:
                counted, began = 0, now
            times = np.array([self._times.window(rank, now) for rank in range(WORKERS)])
            enough = choose(round, times)
            now += np.sort(times)[enough - 1]
            counted += enough
        return float(counted / (now - began))


class _Predicted:
    """Chooses by the model, which sees no time beyond the cut-off."""

    def __init__(self, seed: int) -> None:
        self._model = RunTimes(WORKERS, seed)

    def __call__(self, round: int, times: np.ndarray) -> int:
        ranks, model = range(WORKERS), self._model
        model.fit()
        enough = WORKERS
        if model.knows(ranks):
            drawn = model.draw(ranks, np.zeros(WORKERS))
            enough = best_cutoff(drawn, np.empty((len(drawn), 0)))
        cut = np.sort(times)[enough - 1]
        if enough < WORKERS:
            imputed = model.draw(ranks, np.full(WORKERS, cut))[0]
            times = np.where(times <= cut, times, imputed)
        for rank in ranks:
            model.note(rank, round, times[rank])
        return enough


@dataclass(frozen=True)
class Outcome:
    """The results of a simulated run.

    Attributes:
        rounds: the total number of rounds.
        contributions: contributions per second.
        fresh: the same, counting only those that began with their round's center.
        error: distance of the center from the model that made the rows, relative to the first.
        policy_ms: milliseconds of processor time per round that the policy took to choose.
    """

    rounds: float
    contributions: float
    fresh: float
    error: float
    policy_ms: float

    @classmethod
    def median(cls, runs: "Sequence[Outcome]") -> "Outcome":
        """The median of each figure."""
        return cls(*map(statistics.median, zip(*map(astuple, runs), strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, {self.contributions:.1f} contributions a second of which "
            f"{self.fresh:.1f} fresh, error {self.error:.4f}, policy {self.policy_ms:.2f} ms each"
        )


def train(policy: RoundPolicy, noise: str, seed: int) -> Outcome:
    """Train for some seconds of virtual time with the averager's decisions."""
    run = _Run(Timed(policy), Times(noise, seed), seed)
    run.train()
    return Outcome(
        rounds=run.rounds,
        contributions=run.contributions / SECONDS,
        fresh=run.fresh / SECONDS,
        error=float(np.linalg.norm(run.center - run.target) / np.linalg.norm(run.target)),
        policy_ms=1e3 * run.policy.seconds / run.rounds,
    )


class Timed(All):
    """Wraps another policy, and times how long that takes to open rounds.

    Args:
        policy: the policy to time.
    """

    def __init__(self, policy: RoundPolicy) -> None:
        self.seconds = 0.0
        self.in_step = policy.in_step
        self._policy = policy
        self.begin, self.began, self.closed = policy.begin, policy.began, policy.closed
        self.is_enough = policy.is_enough

    def opened(self, group: Set[int], late: Set[int]) -> None:
        """Ask the other policy."""
        began = time.process_time()
        self._policy.opened(group, late)
        self.seconds += time.process_time() - began

    def committed(self, windows: Iterable[WindowReport], active: Set[int]) -> Iterable[int]:
        """Ask the other policy."""
        return self._policy.committed(windows, active)


class _Run(VirtualRun):
    def __init__(self, policy: Timed, times: Times, seed: int) -> None:
        super().__init__(policy, WORKERS)
        self.policy = policy
        self.rounds = self.contributions = self.fresh = 0
        self._draw = np.random.default_rng(seed)
        self.target = self._draw.normal(size=WIDTH)
        self.center = np.zeros(WIDTH)
        self._times = times
        self._begun = [self.center] * WORKERS

    def train(self) -> None:
        """Let the workers train until it is so late."""
        for rank in self.windows(SECONDS):
            step = self.steps[rank]
            self.close(
                WindowReport(rank=rank, epoch=1, step=step, examples=ROWS, loss_sum=0.0, last=False)
            )

    def decided(self, decisions: Sequence[do.Decision]) -> None:
        told = [decision.event for decision in decisions if isinstance(decision, do.Report)]
        if reports := [each for each in told if isinstance(each, WindowReport)]:
            self.rounds += 1
            self.contributions += len(reports)
            self.fresh += sum(not report.staleness for report in reports)
            (commit,) = (each for each in decisions if isinstance(each, do.Commit))
            change = np.mean([self._change(report.rank) for report in reports], axis=0)
            self.center = self.center + commit.contributions.share * change

    def begun(self, rank: int) -> float:
        self._begun[rank] = self.center
        return self.now + self._times.window(rank, self.now)

    def _change(self, rank: int) -> np.ndarray:
        """A step on rows made by the model with ``target``."""
        rows = self._draw.normal(size=(ROWS, WIDTH))
        residual = rows @ (self._begun[rank] - self.target) - NOISE * self._draw.normal(size=ROWS)
        return -LEARNING_RATE * (residual @ rows) / ROWS


if __name__ == "__main__":
    main()
