"""How long an epoch takes with rounds that are cut off, on slow hosts: a replay.

The scenario of ``cutoff_hosts.py`` in virtual time, with the averager's own decisions: each worker
has rows of its own for a number of windows per epoch, and has to train on all of them; and a host
is slow for spells (``spells.py``), even in the middle of a window. Otherwise a window's time varies
by a twentieth. No clock is involved, so the same seed gives the same figures.

``nobody waits`` is the bound: each worker trains its own windows without a round, and an epoch is
as long as that of the unluckiest host. No cut-off can beat that, because rows are not moved.
"""

import heapq
import itertools
from collections.abc import Callable
from functools import partial

import harness
import numpy as np
from spells import Spells

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.policies.cutoff import BackupWorkers, PredictedCutoff
from sparkdl.averager.policies.round_policy import All, RoundPolicy
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics import ShardStatistics

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


class Replay:
    """One training in virtual time, whose unit is the usual window.

    Args:
        policy: decides who is waited for.
        workers: the number of workers, each on a host of its own.
        windows: windows of each worker per epoch.
        seed: determines the spells and how long windows take.
    """

    def __init__(self, policy: RoundPolicy, workers: int, windows: int, seed: int) -> None:
        self._coordinator = Coordinator(workers, 1e9, 0.0, policy=policy)
        self._members = [on.Member(rank, "host") for rank in range(workers)]
        self._spells = Spells(workers, seed, 1.0)
        self._draw = np.random.default_rng(seed)
        self._windows = windows
        self._steps = [0] * workers
        self._now = 0.0
        self._ends = [0.0]
        self._due: list[tuple[float, int]] = []

    def epochs(self) -> list[float]:
        """Returns how long each epoch took."""
        for member in self._members:
            self._tell(on.Joined(member))
            self._tell(on.RowsFound(member, ShardStatistics(1, ())))
        self._tell(on.Started())
        while len(self._ends) <= EPOCHS:
            self._now, rank = heapq.heappop(self._due)
            self._steps[rank] = step = self._steps[rank] + 1
            report = WindowReport(
                rank=rank,
                epoch=len(self._ends),
                step=step,
                examples=1,
                loss_sum=0.0,
                last=step == self._windows,
            )
            self._tell(on.WindowClosed(self._members[rank], report))
        return [after - before for before, after in itertools.pairwise(self._ends)]

    def _tell(self, event: on.Event) -> None:
        decisions = self._coordinator.handle(event, self._now)
        for decision in decisions:
            if isinstance(decision, do.Report) and isinstance(decision.event, EpochSummary):
                self._ends.append(self._now)
                self._steps = [0] * len(self._steps)
        for decision in decisions:
            if isinstance(decision, do.Receive):
                self._tell(on.Contributed(decision.member))
            elif isinstance(decision, (do.Reply, do.Welcome)):
                self._begin(decision.member)

    def _begin(self, member: on.Member) -> None:
        work = float(np.exp(VARIES * self._draw.normal()))
        heapq.heappush(self._due, (self._spells.done(member.rank, self._now, work), member.rank))
        self._tell(on.Taken(member))


if __name__ == "__main__":
    main()
