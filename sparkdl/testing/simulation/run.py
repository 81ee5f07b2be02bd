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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.averager.coordination.actions import Decision
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.coordination.rank_states import RankState
from sparkdl.averager.coordination.run_state import Restart, RunSpec
from sparkdl.averager.messages.run_events import Position, Progress
from sparkdl.errors import PreemptedError, SparkDLError, WorkerLostError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.strategies import Strategy
from sparkdl.testing.simulation.averager import Averager
from sparkdl.testing.simulation.center import Center, Oracle
from sparkdl.testing.simulation.network import Clock
from sparkdl.testing.simulation.plan import Fault, Kind, Plan
from sparkdl.testing.simulation.workers import Worker

DEADLINE_S = 600.0
"""Far longer than a plan's faults can add up to: anyone waited for this long never comes."""
LONGEST_S = 20_000.0
MOST_EVENTS = 50_000


class Violation(AssertionError):
    """Something that must always hold did not; the message says what, and when."""


@dataclass(frozen=True)
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
    """

    failure: SparkDLError | None
    center: float
    events: int
    commits: int
    losses: int
    checkpoints: int
    given_up: int
    seconds: float
    ahead: int


def simulate(
    plan: Plan,
    coordinator: Callable[..., Coordinator] = Coordinator,
    averager: type[Averager] = Averager,
    center: Callable[[int], Center] = Center,
    *,
    most_ahead: int | None = None,
) -> Outcome:
    """Run a plan to its end.

    Args:
        plan: what happens.
        coordinator: the decisions; replaced by others to show that the simulation would find a
            fault in them.
        averager: what is around them, replaceable likewise.
        center: makes the center for a given number of messages per contribution.
        most_ahead: the most windows by which a worker beginning another may be ahead of the
            slowest one present that has not ended its epoch; None for any number. A worker that
            returns or is resumed may train at once; its window begins when it contributes.

    Raises:
        Violation: something that must always hold did not.
    """
    return Simulation(plan, coordinator, averager, center(plan.chunks), most_ahead).run()


def simulate_strategy(
    strategy: Strategy[Any],
    plan: Plan,
    oracle: Oracle,
    *,
    most_ahead: int | None = None,
) -> Outcome:
    """Run a plan with a strategy's center, wire format, update and policy; not its workers' part.

    Args:
        strategy: determines the rounds; a window of the plan counts as one step.
        plan: what happens.
        oracle: computes the center after each commit, with code other than the strategy's. It may
            have state, so each run needs an oracle of its own.
        most_ahead: as for ``simulate``.

    Raises:
        Violation: something that must always hold did not.
        AssertionError: the center is not what the oracle says.
    """

    def coordinator(spec: RunSpec, now: float, restart: Restart) -> Coordinator:
        return Coordinator(replace(spec, policy=strategy.round_policy), now, restart)

    def center(chunks: int) -> Center:
        update, fragments = strategy.center_update, strategy.fragments
        return Center(chunks, strategy.wire_format, update, fragments, oracle)

    return simulate(plan, coordinator, center=center, most_ahead=most_ahead)


class Simulation:
    """One run; ``center.py`` has its parameters, ``workers.py`` its workers."""

    def __init__(
        self,
        plan: Plan,
        coordinator: Callable[..., Coordinator],
        averager: type[Averager],
        center: Center,
        most_ahead: int | None,
    ) -> None:
        self._plan = plan
        self._most_ahead = most_ahead
        self._make = coordinator
        self._make_averager = averager
        self._center = center
        self._clock = Clock()
        self._draw = random.Random(plan.seed)
        self._faults = sorted(plan.faults, key=lambda fault: fault.after, reverse=True)
        self._struck: list[Fault] = []
        self._events = self._commits = self._losses = self._checkpoints = self._given_up = 0
        self._storage_s, self._storage_fails_until = 0.1, 0.0
        # How many commits went into the last checkpoint begun, and into the last one that exists.
        self._begun_after = self._saved_after = 0
        self._epoch_ended = False
        # What the commits reported, to compare with the end of each epoch.
        self._positions = [Position() for _ in plan.windows]
        self._examples = 0
        self._ahead = 0

    def run(self) -> Outcome:
        """Run the plan, as often as it allows."""
        restart, failures = Restart(), 0
        while True:
            failure, averager = self._submit(restart)
            self._losses += len(averager.coordinator.members.losses)
            if not isinstance(failure, WorkerLostError) or failures >= self._plan.resubmissions:
                break
            failures += 1
            self._center.sum = None
            restart = averager.coordinator.restart()
        self._check_end(failure, averager)
        return Outcome(
            failure,
            self._center.numbers[0],
            self._events,
            self._commits,
            self._losses,
            self._checkpoints,
            self._given_up,
            self._clock.now,
            self._ahead,
        )

    def _submit(self, restart: Restart) -> tuple[SparkDLError | None, Averager]:
        plan, world_size = self._plan, len(self._plan.windows)
        spec = RunSpec(
            world_size=world_size,
            deadline_s=DEADLINE_S,
            tolerance=Tolerance(plan.max_failures, plan.min_workers),
            checkpoints=_Schedule(plan) if plan.saves else None,
        )
        self._averager = averager = self._make_averager(
            self._make, spec, restart, self._center, plan.pass_s, self._clock, self
        )
        # Ranks whose last window of the epoch is committed; ranks training since they were let in.
        self._through: set[int] = set()
        self._newcomers: set[int] = set()
        self._started: list[Worker] = []
        self._workers = [self._worker(rank, 0) for rank in range(world_size)]
        try:
            while not averager.coordinator.ended:
                if not self._clock.step() or self._clock.now > LONGEST_S:
                    raise Violation(f"the run did not end in {self._clock.now:.0f} s of its time")
        finally:
            # Nothing of this submission reaches the next.
            for worker in self._started:
                worker.kill()
            averager.end_conversations()
            self._clock.forget()
        return averager.coordinator.failure, averager

    def _worker(self, rank: int, attempt: int) -> Worker:
        plan, accept = self._plan, self._averager.accept
        worker = Worker(rank, plan, self._center, self._clock, self._draw, accept, attempt)
        self._started.append(worker)
        return worker

    # What the averager reports.

    def before(self, event: str, *, saved: bool = False) -> None:
        """Count an event that is about to be decided on, and strike if it is time."""
        if event == "tick":
            return
        if saved:
            self._saved_after = self._begun_after
        self._events += 1
        if self._events > MOST_EVENTS:
            raise Violation(f"the run did not end in {MOST_EVENTS} events")
        while self._faults and self._faults[-1].after <= self._events:
            fault = self._faults.pop()
            self._struck.append(fault)
            self._clock.after(0.0, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _strike(self, fault: Fault) -> None:
        worker = self._workers[fault.rank]
        if fault.kind is Kind.BREAK:
            worker.strike(restart_s=None)
        elif fault.kind is Kind.HALF_OPEN:
            worker.strike(restart_s=None, noticed_after_s=fault.seconds)
        elif fault.kind is Kind.KILL:
            if self._plan.max_failures == 0 and not self._averager.knows(fault.rank):
                # Only Spark notices, and the job fails.
                self._averager.fail(WorkerLostError("a task has failed"))
            worker.strike(restart_s=fault.seconds)
        elif fault.kind is Kind.TWIN:
            if self._plan.max_failures:
                self._workers[fault.rank] = self._worker(fault.rank, worker.attempt + 1)
        elif fault.kind is Kind.PREEMPT:
            if self._plan.saves:
                self._averager.save_and_fail(PreemptedError("told to end"))
        elif fault.kind is Kind.STALL:
            worker.stall(fault.seconds)
        elif fault.kind is Kind.PAUSE:
            self._averager.pause(fault.seconds)
        elif fault.kind is Kind.FAILING_STORAGE:
            self._storage_fails_until = self._clock.now + fault.seconds
        else:
            self._storage_s = fault.seconds

    def decided(self, decisions: Sequence[Decision]) -> None:
        """Check decisions: they and what is remembered are few, and they keep the bound."""
        self._look_who_is_ahead(decisions)
        self._look_what_is_saved(decisions)
        world_size = len(self._plan.windows)
        if len(decisions) > 8 * world_size + 8:
            raise Violation(f"{len(decisions)} decisions on one event, {world_size} workers")
        own = {Kind.BREAK, Kind.HALF_OPEN, Kind.KILL, Kind.TWIN, Kind.STALL}
        struck = {fault.rank for fault in self._struck if fault.kind in own}
        if innocent := set(self._averager.coordinator.members.dropped) - struck:
            raise Violation(
                f"{innocent} were dropped for silence, though nothing was wrong with them"
            )
        this = self._averager.coordinator.round
        complete = this.ranks.of(RankState.CONTRIBUTED)
        if early := complete - this.entered.keys():
            raise Violation(f"{early} count as complete in a round that they have not entered")
        remembered = self._averager.remembered
        if remembered > 16 * world_size + 16:
            raise Violation(f"{remembered} things are remembered about {world_size} workers")

    def _look_what_is_saved(self, decisions: Sequence[Decision]) -> None:
        if not self._plan.saves:
            return
        begins = any(each.action == "begin_checkpoint" for each in decisions)
        if begins:
            self._begun_after = self._commits
        ended, self._epoch_ended = self._epoch_ended, False
        if ended and not begins:
            raise Violation("an epoch ended, and no checkpoint of it was begun")
        believed = self._averager.coordinator.checkpoints.has_last_commit
        if believed is not (self._saved_after == self._commits):
            raise Violation(
                f"after {self._commits} commits the last one is taken for "
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
            self._ahead = max(self._ahead, done[rank] - slowest)
            if self._most_ahead is not None and done[rank] - slowest > self._most_ahead:
                raise Violation(
                    f"rank {rank} continues after {done[rank]} windows, but the slowest has "
                    f"{slowest}"
                )

    def committed(self, windows: Sequence[WindowReport]) -> None:
        """Check a committed round: its windows continue what was committed before."""
        self._commits += 1
        for window in windows:
            before = self._positions[window.rank]
            trains = window.examples > 0
            expected = before.epoch, before.step_of_epoch + trains
            if (window.epoch, window.step_of_epoch) != expected:
                raise Violation(f"{window} was committed after {before}")
            self._positions[window.rank] = Position.after(window)
            self._examples += window.examples
            self._through |= {window.rank} if window.last else set()

    def epoch_ended(self, summary: EpochSummary) -> None:
        """Check an ended epoch: every row of it was counted once."""
        done = tuple(position.step_of_epoch for position in self._positions)
        if done != self._plan.windows:
            raise Violation(f"epoch {summary.epoch} ended after {done} of {self._plan.windows}")
        expected = sum((10 + rank) * count for rank, count in enumerate(self._plan.windows))
        if not expected == self._examples == summary.examples:
            raise Violation(
                f"{summary.examples} examples were summed up and {self._examples} committed of "
                f"{expected} in epoch {summary.epoch}"
            )
        self._examples = 0
        self._epoch_ended = True
        self._through = set()
        self._positions = [position.next_epoch() for position in self._positions]

    def statistics_known(self, statistics: DataStatistics) -> None:
        """Let the workers start, as the driver does once it has checked the rows."""
        self._clock.after(self._draw.random(), lambda: self._averager.start())

    def write(self, progress: Progress, states: Mapping[int, Position]) -> None:
        """Check a checkpoint that is written: its states belong to it."""
        for rank, state in states.items():
            stands = progress.positions[rank]
            # If the epoch ended with this commit, the position is that of the next epoch.
            if stands not in (state, state.next_epoch()):
                raise Violation(f"rank {rank} stands at {stands}, and saved its state of {state}")
        self._clock.after(self._storage_s, self._written)

    def _written(self) -> None:
        if self._clock.now < self._storage_fails_until:
            self._given_up += 1
            self._averager.post_event(self._averager.coordinator.checkpoint_ended, saved=False)
        else:
            self._checkpoints += 1
            self._averager.post_event(self._averager.coordinator.checkpoint_ended, saved=True)

    def _check_end(self, failure: SparkDLError | None, averager: Averager) -> None:
        if failure is None:
            if averager.coordinator.committed.epoch != self._plan.epochs + 1:
                raise Violation(f"the run ended in epoch {averager.coordinator.committed.epoch}")
            return
        if isinstance(failure, PreemptedError):
            return
        breaks = {Kind.BREAK, Kind.HALF_OPEN, Kind.KILL}
        lost = any(fault.kind in breaks for fault in self._struck)
        if isinstance(failure, WorkerLostError) and lost and self._plan.max_failures == 0:
            return
        raise Violation(f"the run ended with {failure!r}, which its faults do not explain")


class _Schedule:
    """Which commits become checkpoints."""

    def __init__(self, plan: Plan) -> None:
        self._every_rounds = plan.every_rounds

    def due(self, epoch: int) -> bool:
        return True

    def due_within(self, rounds: int) -> bool:
        return self._every_rounds is not None and rounds >= self._every_rounds
