"""Simulate one run and check, after every event, what must always hold.

Each row is counted at most once per epoch, and exactly once by its end.
The center is what a replay of the committed windows gives.
Nobody waits for something that nobody will do: no wait ends at its deadline.
No healthy worker is dropped. What is remembered does not grow with time.
A checkpoint has the states of those workers whose state is that of its commit, and no others.
One that could not be written does not count; the run goes on, and the next is tried when due.
Where there is a bound, no worker begins a window farther ahead of the slowest than it allows.
Every run ends, either with its model or with an error that its faults explain.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from support.simulation.averager import Averager
from support.simulation.plan import Fault, Kind, Plan
from support.simulation.workers import Worker

from sparkdl.averager.coordination.actions import Decision
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.coordination.rank_states import RankState
from sparkdl.averager.coordination.run_state import Restart, RunSpec
from sparkdl.averager.round_policy import All, RoundPolicy
from sparkdl.averager.run_events import EpochValidated, Position, Progress, RunEvent
from sparkdl.averager.values.center import Center, CenterSpec
from sparkdl.averager.values.center_update import CenterUpdate, Contributions, ReplaceByMean
from sparkdl.averager.values.wire_format import FULL_PRECISION, WireFormat
from sparkdl.errors import PreemptedError, SparkDLError, WorkerLostError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.planner.simulation.engine import Clock
from sparkdl.protocols import Segment
from sparkdl.strategies import Strategy

DEADLINE_S = 600.0
"""Far longer than a plan's faults can add up to: anyone waited for this long never comes."""
LONGEST_S = 20_000.0
MOST_EVENTS = 50_000
BREAKS = {Kind.BREAK, Kind.HALF_OPEN, Kind.KILL}

Values = Mapping[int, float]
"""By rank."""
Oracle = Callable[[float, Contributions, Values, Values], float]
"""(center before, contributions, what ranks trained, what they began with) -> center after"""


class Violation(AssertionError):
    """Something that must always hold did not; the message says what, and when."""


@dataclass
class Outcome:
    """How a simulated run ended.

    Attributes:
        failure: why it failed; None if it has a model.
        center: its parameters.
        events: how many events were decided on.
        commits: rounds that were committed.
        losses: workers that were lost.
        checkpoints: checkpoints that were written.
        given_up: checkpoints that could not be written.
        seconds: how long it took, in virtual time.
        ahead: the most windows by which a worker beginning another was ahead of the slowest.
        deals: how often other workers went on.
    """

    failure: SparkDLError | None = None
    center: float = 0.0
    events: int = 0
    commits: int = 0
    losses: int = 0
    checkpoints: int = 0
    given_up: int = 0
    seconds: float = 0.0
    ahead: int = 0
    deals: int = 0


@dataclass(frozen=True)
class _Mean(ReplaceByMean):
    """The mean of a round's contributions is the center, whoever else is late."""

    by_share = False


def weighted(contributions: Contributions, terms: Iterable[float]) -> float:
    """Their mean by rows."""
    pairs = zip(contributions.weights, terms, strict=True)
    return sum(weight * term for weight, term in pairs) / sum(contributions.weights)


def mean(center: float, contributions: Contributions, values: Values, begun: Values) -> float:
    """Where everybody sends values: parameter averaging, and the end of an epoch of gossip."""
    return weighted(contributions, values.values())


def simulate(plan: Plan, *arguments: Any, **options: Any) -> Outcome:
    """Run a plan to its end; further arguments are those of ``Simulation``.

    Raises:
        Violation: something that must always hold did not.
        AssertionError: the center is not what the oracle says.
    """
    return Simulation(plan, *arguments, **options).run()


def simulate_strategy(
    strategy: Strategy[Any], plan: Plan, oracle: Oracle, *, most_ahead: int | None = None
) -> Outcome:
    """Run a plan with a strategy's center, wire format, update and policy; not its workers' part.

    A window of the plan counts as one step.
    """
    return simulate(
        plan,
        policy=lambda: strategy.round_policy,
        wire_format=strategy.wire_format,
        update=strategy.center_update,
        fragments=strategy.fragments,
        oracle=oracle,
        most_ahead=most_ahead,
    )


@dataclass(eq=False)
class Simulation:
    """One run, of which the averager tells.

    Attributes:
        plan: what happens.
        decides: makes the decisions; replaced by others to show that the simulation would find a
            fault in them.
        averager: what is around them, replaceable likewise.
        policy: makes the round policy.
        wire_format: how values travel.
        update: what contributions do to the center.
        fragments: how many parts the rounds exchange in turn, each of one number.
        oracle: computes the center after each commit, with code other than the strategy's. It may
            have state, so each run needs an oracle of its own.
        most_ahead: the most windows by which a worker beginning another may be ahead of the
            slowest one present that has not ended its epoch; None for any number. A worker that
            returns or is resumed may train at once; its window begins when it contributes.
    """

    plan: Plan
    decides: Callable[..., Coordinator] = Coordinator
    averager: type[Averager] = Averager
    policy: Callable[[], RoundPolicy] = All
    wire_format: WireFormat = FULL_PRECISION
    update: CenterUpdate = _Mean()
    fragments: int = 1
    oracle: Oracle = mean
    most_ahead: int | None = None

    def __post_init__(self) -> None:
        # Each segment, which has a number for each fragment, travels in a message of its own.
        self.spec = CenterSpec(
            layout=(Segment("parameters", torch.float64, self.fragments),) * self.plan.chunks,
            wire_format=self.wire_format,
            update=self.update,
            fragments=self.fragments,
        )
        ones = [torch.ones(self.fragments, dtype=torch.float64) for _ in self.spec.layout]
        self.center = Center(self.spec, ones, 1)
        self.clock = Clock()
        self._draw = random.Random(self.plan.seed)
        self._faults = sorted(self.plan.faults, key=lambda fault: fault.after, reverse=True)
        self._struck: list[Fault] = []
        self._found = Outcome()
        self._storage_s, self._storage_fails_until = 0.1, 0.0
        # How many commits went into the last checkpoint begun, and into the last one that exists.
        self._begun_after = self._saved_after = 0
        self._epoch_ended = False
        # What the commits reported, to compare with the end of each epoch.
        self._windows = self.plan.windows
        self._positions = [Position() for _ in self._windows]
        self._examples = 0

    def run(self) -> Outcome:
        """Run the plan, as often as it allows."""
        found, restart, resubmissions = self._found, Restart(), self.plan.resubmissions
        while True:
            averager = self._submit(restart)
            found.failure = averager.coordinator.failure
            found.losses += len(averager.coordinator.members.losses)
            restart = averager.coordinator.restart()
            self.center.sum = None
            if averager.coordinator.stopped is not None:
                found.deals += 1
                self._windows = self.plan.windows_in(averager.coordinator.committed.epoch)
                restart = replace(restart, validated=True).resized(len(self._windows))
                assert restart.progress is not None
                self._positions = list(restart.progress.positions)
            elif isinstance(found.failure, WorkerLostError) and resubmissions:
                resubmissions -= 1
            else:
                break
        self._check_end(found.failure, averager.coordinator.committed.epoch)
        found.center, found.seconds = averager.numbers[0], self.clock.now
        return found

    def _submit(self, restart: Restart) -> Averager:
        plan, world_size = self.plan, len(self._windows)
        schedule = SimpleNamespace(
            due=lambda epoch: True,
            due_within=lambda rounds: plan.every_rounds is not None and rounds >= plan.every_rounds,
        )
        spec = RunSpec(
            world_size=world_size,
            deadline_s=DEADLINE_S,
            tolerance=Tolerance(plan.max_failures, plan.min_workers),
            policy=self.policy(),
            checkpoints=schedule if plan.saves else None,
            followed=bool(plan.deals),
        )
        self._averager = averager = self.averager(self, spec, restart)
        # Ranks whose last window of the epoch is committed; ranks training since they were let in.
        self._through: set[int] = set()
        self._newcomers: set[int] = set()
        self._started: list[Worker] = []
        self._workers = [self._worker(rank) for rank in range(world_size)]
        try:
            while not averager.coordinator.ended:
                if not self.clock.step() or self.clock.now > LONGEST_S:
                    raise Violation(f"the run did not end in {self.clock.now:.0f} s of its time")
        finally:
            # Nothing of this submission reaches the next.
            for worker in self._started:
                worker.kill()
            averager._close_all()
            self.clock.forget()
        return averager

    def _worker(self, rank: int, attempt: int = 0) -> Worker:
        accept = self._averager.accept
        worker = Worker(rank, self.plan, self.spec, self.clock, self._draw, accept, attempt)
        self._started.append(worker)
        return worker

    # What the averager reports.

    def before(self, event: str, *, saved: bool = False) -> None:
        """Count an event that is about to be decided on, and strike if it is time."""
        if event == "tick":
            return
        if saved:
            self._saved_after = self._begun_after
        self._found.events += 1
        if self._found.events > MOST_EVENTS:
            raise Violation(f"the run did not end in {MOST_EVENTS} events")
        while self._faults and self._faults[-1].after <= self._found.events:
            fault = self._faults.pop()
            self.clock.after(0.0, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _strike(self, fault: Fault) -> None:
        # There may be fewer workers than when the plan was made.
        fault = replace(fault, rank=fault.rank % len(self._windows))
        self._struck.append(fault)
        worker, seconds = self._workers[fault.rank], fault.seconds
        match fault.kind:
            case Kind.BREAK:
                worker.strike()
            case Kind.HALF_OPEN:
                worker.strike(noticed_after_s=seconds)
            case Kind.KILL:
                known = {member.rank for member in self._averager.by_member}
                if self.plan.max_failures == 0 and fault.rank not in known:
                    # Only Spark notices, and the job fails.
                    self._averager.fail(WorkerLostError("a task has failed"))
                worker.strike(restart_s=seconds)
            case Kind.TWIN if self.plan.max_failures:
                self._workers[fault.rank] = self._worker(fault.rank, worker.attempt + 1)
            case Kind.PREEMPT if self.plan.saves:
                self._averager.save_and_fail(PreemptedError("told to end"))
            case Kind.STALL:
                worker.stall(seconds)
            case Kind.PAUSE:
                self._averager.pause(seconds)
            case Kind.FAILING_STORAGE:
                self._storage_fails_until = self.clock.now + seconds
            case Kind.SLOW_STORAGE:
                self._storage_s = seconds

    def decided(self, decisions: Sequence[Decision]) -> None:
        """Check decisions: they and what is remembered are few, and they keep the bound."""
        self._look_who_is_ahead(decisions)
        self._look_what_is_saved(decisions)
        this, workers = self._averager.coordinator.round, len(self._windows)
        if len(decisions) > 8 * workers + 8:
            raise Violation(f"{len(decisions)} decisions on one event, {workers} workers")
        own = {*BREAKS, Kind.TWIN, Kind.STALL}
        struck = {fault.rank for fault in self._struck if fault.kind in own}
        if innocent := set(self._averager.coordinator.members.dropped) - struck:
            raise Violation(
                f"{innocent} were dropped for silence, though nothing was wrong with them"
            )
        if early := this.ranks.of(RankState.CONTRIBUTED) - this.entered.keys():
            raise Violation(f"{early} count as complete in a round that they have not entered")
        waiting = this.entered, this.late, this.queue, this.ranks.windows
        remembered = len(self._averager.by_member) + sum(map(len, waiting))
        if remembered > 16 * workers + 16:
            raise Violation(f"{remembered} things are remembered about {workers} workers")

    def _look_what_is_saved(self, decisions: Sequence[Decision]) -> None:
        if not self.plan.saves:
            return
        commits = self._found.commits
        begins = any(each.action == "begin_checkpoint" for each in decisions)
        if begins:
            self._begun_after = commits
        ended, self._epoch_ended = self._epoch_ended, False
        if ended and not begins:
            raise Violation("an epoch ended, and no checkpoint of it was begun")
        believed = self._averager.coordinator.checkpoints.has_last_commit
        if believed is not (self._saved_after == commits):
            raise Violation(
                f"after {commits} commits the last one is taken for "
                f"{'saved' if believed else 'lost'}, and the last checkpoint that there is was "
                f"written after {self._saved_after}"
            )

    def _look_who_is_ahead(self, decisions: Sequence[Decision]) -> None:
        admitted, received, begins = (
            {each.arguments[0].rank for each in decisions if each.action == action}
            for action in ("welcome", "receive", "reply")
        )
        self._newcomers |= admitted
        begins |= self._newcomers & received
        self._newcomers -= received
        done = [position.step_of_epoch for position in self._positions]
        slowest = min(
            (done[rank] for rank in self._averager.coordinator.round.ranks.active - self._through),
            default=max(done),
        )
        for rank in begins - self._through:
            self._found.ahead = max(self._found.ahead, done[rank] - slowest)
            if self.most_ahead is not None and done[rank] - slowest > self.most_ahead:
                raise Violation(
                    f"rank {rank} continues after {done[rank]} windows, but the slowest has "
                    f"{slowest}"
                )

    def committed(self, windows: Sequence[WindowReport]) -> None:
        """Check a committed round: its windows continue what was committed before."""
        self._found.commits += 1
        for window in windows:
            before = self._positions[window.rank]
            expected = before.epoch, before.step_of_epoch + (window.examples > 0)
            if (window.epoch, window.step_of_epoch) != expected:
                raise Violation(f"{window} was committed after {before}")
            self._positions[window.rank] = Position.after(window)
            self._examples += window.examples
            self._through |= {window.rank} if window.last else set()

    def reported(self, event: RunEvent) -> None:
        """Let the workers start, as the driver does; check an ended epoch."""
        if isinstance(event, DataStatistics):
            self.clock.after(self._draw.random(), lambda: self._averager.start())
        if isinstance(event, EpochValidated):
            self._decide_on_workers(event.summary)
        if not isinstance(event, EpochSummary):
            return
        done = tuple(position.step_of_epoch for position in self._positions)
        if done != self._windows:
            raise Violation(f"epoch {event.epoch} ended after {done} of {self._windows}")
        expected = sum((10 + rank) * count for rank, count in enumerate(self._windows))
        if not expected == self._examples == event.examples:
            raise Violation(
                f"{event.examples} examples were summed up and {self._examples} committed of "
                f"{expected} in epoch {event.epoch}"
            )
        self._examples = 0
        self._epoch_ended = True
        self._through = set()
        self._positions = [position.next_epoch() for position in self._positions]

    def _decide_on_workers(self, ended: EpochSummary) -> None:
        """Let the same workers begin another epoch, or others."""
        if ended.workers != len(self._windows):
            raise Violation(f"{ended} is not of the {len(self._windows)} workers that there are")
        averager, epoch, delay_s = self._averager, ended.epoch, self._draw.random()
        others = self.plan.windows_in(epoch + 1) != self._windows and epoch < self.plan.epochs
        if others:
            self.clock.after(delay_s, lambda: averager.stop("others go on"))
        else:
            self.clock.after(delay_s, lambda: averager.approve_epoch(epoch))

    def write(self, progress: Progress, states: Mapping[int, Position]) -> None:
        """Check a checkpoint that is written: its states belong to it."""
        for rank, state in states.items():
            stands = progress.positions[rank]
            # If the epoch ended with this commit, the position is that of the next epoch.
            if stands not in (state, state.next_epoch()):
                raise Violation(f"rank {rank} stands at {stands}, and saved its state of {state}")
        self.clock.after(self._storage_s, self._written)

    def _written(self) -> None:
        saved = self.clock.now >= self._storage_fails_until
        self._found.checkpoints += saved
        self._found.given_up += not saved
        self._averager.post_event(self._averager.coordinator.checkpoint_ended, saved=saved)

    def _check_end(self, failure: SparkDLError | None, epoch: int) -> None:
        lost = any(fault.kind in BREAKS for fault in self._struck) and not self.plan.max_failures
        if failure is None and epoch != self.plan.epochs + 1:
            raise Violation(f"the run ended in epoch {epoch}")
        explained = (PreemptedError, *([WorkerLostError] if lost else []))
        if failure is not None and not isinstance(failure, explained):
            raise Violation(f"the run ended with {failure!r}, which its faults do not explain")
