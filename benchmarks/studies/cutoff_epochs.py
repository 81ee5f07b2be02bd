"""How long an epoch takes with rounds that are cut off, on slow hosts: a replay.

The scenario of ``cutoff_hosts.py`` in virtual time, with the averager's own decisions: each worker
has rows of its own for a number of windows per epoch, and has to train on all of them; and a host
is slow for spells (``spells.py``), even in the middle of a window. Otherwise a window's time varies
by a twentieth. No clock is involved, so the same seed gives the same figures.

``nobody waits`` is the bound: each worker trains its own windows without a round, and an epoch is
as long as that of the unluckiest host. No cut-off can beat that, because rows are not moved.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import harness
import numpy as np
from spells import Spells

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.policies.cutoff import BackupWorkers, PredictedCutoff
from sparkdl.averager.policies.round_policy import All, RoundPolicy
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.planner.simulation.virtual_run import VirtualRun

EPOCHS = 2
VARIES = 0.05
POLICIES: dict[str, Callable[[], RoundPolicy]] = {
    "everyone": All,
    "one backup worker": partial(BackupWorkers, 1),
    "two backup workers": partial(BackupWorkers, 2),
    "predicted": PredictedCutoff,
}
BOUND = "nobody waits"


def main() -> None:
    """Replays all, and reports."""
    chosen = harness.arguments(__doc__, repeats=6)
    claims, measured = [], {}
    for workers, windows in ((4, 50), (4, 150), (8, 150), (16, 150)):
        name = f"{workers} workers, {windows} windows an epoch"
        runs: dict[str, list[float]] = {each: [] for each in (*POLICIES, BOUND)}
        for seed in range(chosen.repeats):
            for each, policy in POLICIES.items():
                runs[each] += Replay(policy(), workers, windows, seed).epochs()
            runs[BOUND] += without_waiting(workers, windows, seed)
        took = {
            each: harness.show(f"{name}, {each}: an epoch", epochs, unit="windows", digits=1)
            for each, epochs in runs.items()
        }
        measured[name] = took
        fixed = min(took["one backup worker"], took["two backup workers"])
        claims += [
            harness.Claim(
                name=f"{name}: predicted / everyone",
                ratio=took["predicted"] / took["everyone"],
                target=0.8,
            ),
            harness.Claim(
                name=f"{name}: predicted / the better fixed number",
                ratio=took["predicted"] / fixed,
                target=1.05,
            ),
        ]
    harness.report("cutoff_epochs", claims, measured)


def without_waiting(workers: int, windows: int, seed: int) -> list[float]:
    """Epochs of the unluckiest host, in units of the usual window."""
    spells, now, took = Spells(workers, seed, 1.0), 0.0, []
    for _ in range(EPOCHS):
        over = max(spells.done(host, now, windows) for host in range(workers))
        took.append(over - now)
        now = over
    return took


class Replay(VirtualRun):
    """One training in virtual time, whose unit is the usual window.

    Args:
        policy: decides who is waited for.
        workers: the number of workers, each on a host of its own.
        windows: windows of each worker per epoch.
        seed: determines the spells and how long windows take.
    """

    def __init__(self, policy: RoundPolicy, workers: int, windows: int, seed: int) -> None:
        super().__init__(policy, workers)
        self._spells = Spells(workers, seed, 1.0)
        self._draw = np.random.default_rng(seed)
        self._windows = windows
        self._ends = [0.0]

    def epochs(self) -> list[float]:
        """Returns how long each took."""
        for rank in self.windows():
            step = self.steps[rank]
            self.close(
                WindowReport(
                    rank=rank,
                    epoch=len(self._ends),
                    step=step,
                    examples=1,
                    loss_sum=0.0,
                    last=step == self._windows,
                )
            )
            if len(self._ends) > EPOCHS:
                break
        return [after - before for before, after in itertools.pairwise(self._ends)]

    def decided(self, decisions: Sequence[do.Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, do.Report) and isinstance(decision.event, EpochSummary):
                self._ends.append(self.now)
                self.steps = [0] * len(self.steps)

    def begun(self, rank: int) -> float:
        work = float(np.exp(VARIES * self._draw.normal()))
        return self._spells.done(rank, self.now, work)


if __name__ == "__main__":
    main()
