"""The averager's decisions under thousands of schedules of losses, silence, pauses and delays."""

from __future__ import annotations

import inspect
from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulation.averager import Averager
from support.simulation.plan import Fault, Kind, Plan, random_deals, random_plan, shrink
from support.simulation.run import Violation, simulate

from sparkdl.averager.coordination.actions import event
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.coordination.membership import FencedError, Member
from sparkdl.averager.coordination.rank_states import RankState, Window

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize(
    "seeds",
    [
        range(150),
        *(
            pytest.param(range(first, first + 20_000), marks=pytest.mark.nightly)
            for first in range(0, 100_000, 20_000)
        ),
    ],
    ids=str,
)
def test_every_schedule_ends_as_its_faults_allow(seeds: range) -> None:
    counted: Counter[str] = Counter()
    for seed in seeds:
        outcome = simulate(random_plan(seed))
        counted["ends"] += outcome.failure is None
        counted["losses"] += outcome.losses
        counted["checkpoints"] += outcome.checkpoints
        counted["given up"] += outcome.given_up
    # The schedules are worth something only if much of each happens in them.
    assert counted["ends"] > len(seeds) / 2
    assert counted["losses"] > len(seeds) / 5
    assert counted["checkpoints"] > len(seeds) / 2
    assert counted["given up"] > len(seeds) / 50


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 20_000), marks=pytest.mark.nightly)], ids=str
)
def test_every_schedule_ends_with_other_workers_in_each_epoch(seeds: range) -> None:
    """Each row is counted once an epoch, whoever has it; checkpoints belong to their commits."""
    counted: Counter[str] = Counter()
    for seed in seeds:
        plan = random_deals(seed)
        outcome = simulate(plan)
        preempted = any(fault.kind is Kind.PREEMPT for fault in plan.faults)
        assert outcome.failure is None or preempted
        counted["deals"] += outcome.deals
        counted["losses"] += outcome.losses
        counted["checkpoints"] += outcome.checkpoints
    assert min(counted.values()) > len(seeds) / 2


def test_a_seed_gives_the_same_run_every_time() -> None:
    for seed in range(15):
        plan = random_plan(seed)
        outcomes = [simulate(plan) for _ in range(2)]
        assert repr(outcomes[0]) == repr(outcomes[1])


FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(Kind),
    after=st.integers(1, 100),
    rank=st.integers(0, 2),
    seconds=st.sampled_from([0.1, 2.0, 20.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Plan,
        seed=st.integers(0, 1000),
        windows=st.tuples(*[st.integers(0, 3)] * 3),
        saves=st.booleans(),
        every_rounds=st.sampled_from([None, 1, 2]),
        min_workers=st.integers(1, 3),
        delay_s=st.sampled_from([0.01, 2.0]),
        faults=st.lists(FAULTS, max_size=6).map(tuple),
    )
)
def test_no_list_of_faults_that_a_run_survives_ends_it(plan: Plan) -> None:
    outcome = simulate(plan)
    preempted = any(fault.kind is Kind.PREEMPT for fault in plan.faults)
    assert outcome.failure is None or preempted


# What the events below come down to, without what is the same for all.
join: Any = inspect.unwrap(Coordinator.joined)
finish: Any = inspect.unwrap(Coordinator.finished)
end_checkpoint: Any = inspect.unwrap(Coordinator.checkpoint_ended)


class AsksWhoComesBack(Coordinator):
    """Waits for the worker state of who is let in after a checkpoint's commit, and asks nobody."""

    def _save_if_due(self) -> bool:
        begun = super()._save_if_due()
        if begun:
            self.checkpoints.awaited.update(self.to_let_in)
        return begun


class HearsTheDropped(Averager):
    """Goes through what has arrived on a connection although it was dropped.

    And takes what a member says that has lost its place for its successor's word.
    """

    def drop(self, member: Member, why: str) -> None:
        self._do(member, lambda worker: worker.channel.receive())
        super().drop(member, why)

    def _decide(self, event: Any, *arguments: Any, **options: Any) -> None:
        if arguments and isinstance(arguments[0], Member):
            member, *others = arguments
            if member.gone and event.__name__ != "lost":
                arguments = self.coordinator.members.of(member.rank), *others
        super()._decide(event, *arguments, **options)


class JudgesByItsOwnPause(Averager):
    """Takes silence for a worker's although it has itself not listened.

    It looks at the clock before it looks at what has arrived during a pause.
    """

    def _decide(self, event: Any, *arguments: Any, **options: Any) -> None:
        self.coordinator.members.now = self.now()
        super()._decide(event, *arguments, **options)

    def _iterate(self) -> None:
        if self.now() >= self._tick_at:
            self._tick_at = self.now() + self.tick()
            self._settle()
        super()._iterate()


class CountsHalfAContribution(Coordinator):
    """Goes on with a sum of which a part came from a worker that was lost."""

    def _lost(self: Any, member: Member, why: str) -> None:
        if self.ranks[member.rank] is RankState.CONTRIBUTING:
            self.round.finish(member.rank)
        Coordinator._lost(self, member, why)

    lost = event(_lost)


class CountsWhatWasStartedOver(Coordinator):
    """Takes a contribution for complete that became whole as its sum was forgotten."""

    @event
    def contributed(self: Any, member: Member) -> None:
        self.round.finish(member.rank)
        self.members.pass_turn()
        self._commit_if_complete()


class EndsAnEpochWithoutTheLost(Coordinator):
    """Takes who is lost for through with the epoch."""

    def _lost(self: Any, member: Member, why: str) -> None:
        self.round.pending.discard(member.rank)
        Coordinator._lost(self, member, why)

    lost = event(_lost)


class CountsAFailedCheckpoint(Coordinator):
    """Takes a checkpoint that could not be written for one."""

    @event
    def checkpoint_ended(self: Any, *, saved: bool) -> None:
        end_checkpoint(self, saved=True)


class TriesNoneAfterAFailedOne(Coordinator):
    """Leaves the storage alone once it has failed."""

    @event
    def checkpoint_ended(self: Any, *, saved: bool) -> None:
        end_checkpoint(self, saved=saved)
        if not saved:
            self.checkpoints.end_epoch = lambda epoch: None


class AsksTwiceForOneState(Coordinator):
    """Asks whoever it waits for once more at the next commit."""

    _commits = False

    def _commit(self) -> None:
        self._commits = True
        super()._commit()
        self._commits = False

    def _admit(self, *, saves: bool = False, **options: Any) -> None:
        asks = self._commits and bool(self.checkpoints.awaited)
        super()._admit(saves=saves or asks, **options)


class LetsFinishedRanksJoin(Coordinator):
    """Lets another attempt of a rank in that has finished."""

    @event
    def joined(self: Any, member: Member) -> None:
        if self.ranks[member.rank] is RankState.FINISHED:
            self.members.join(member)
        else:
            join(self, member)


class FencesFinish(Coordinator):
    """Refuses the last word of who was dropped with it on its way, and so does not come back."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sent_away: set[int] = set()

    @event
    def finished(self: Any, member: Member) -> None:
        if member.gone:
            self._sent_away.add(member.rank)
        else:
            finish(self, member)

    @event
    def joined(self: Any, member: Member) -> None:
        if member.rank in self._sent_away:
            raise FencedError("it has lost its place, and leaves")
        join(self, member)


class HearsLastWordsLate(Averager):
    """Decides on what a worker says last when it may have been dropped meanwhile."""

    def tell(self, event: Any, *arguments: Any, **options: Any) -> None:
        decide = partial(super().tell, event, *arguments, **options)
        if event.__name__ == "finished":
            self._clock.after(1.0, lambda: self.post(decide))
        else:
            decide()


class LetsTheLostStandForOthers(Coordinator):
    """Goes on without one who has yet to contribute, for another that had, and was lost."""

    def _enter(self, window: Window) -> None:
        super()._enter(window)
        this = self.round
        if len(this.entered) >= len(this.group):
            left = sorted(this.group - this.entered.keys())
            this.group.difference_update(left)
            for rank in left:
                self.do.skip(rank)


PUT_BACK: dict[str, tuple[type[Coordinator], type[Averager]]] = {
    "asks who comes back": (AsksWhoComesBack, Averager),
    "acts in a successor's name": (Coordinator, HearsTheDropped),
    "judges by its own pause": (Coordinator, JudgesByItsOwnPause),
    "counts half a contribution": (CountsHalfAContribution, Averager),
    "counts what was started over": (CountsWhatWasStartedOver, Averager),
    "ends an epoch without the lost": (EndsAnEpochWithoutTheLost, Averager),
    "asks twice for one state": (AsksTwiceForOneState, Averager),
    "counts a failed checkpoint": (CountsAFailedCheckpoint, Averager),
    "tries none after a failed one": (TriesNoneAfterAFailedOne, Averager),
    "fences finish": (FencesFinish, HearsLastWordsLate),
    "lets finished ranks join": (LetsFinishedRanksJoin, Averager),
    "lets the lost stand for others": (LetsTheLostStandForOthers, Averager),
}
"""Faults that there were, or nearly."""
FOUND_WITHIN = 2000


@pytest.mark.nightly_variants
@pytest.mark.parametrize("fault", PUT_BACK)
def test_a_fault_that_is_put_back_is_found(fault: str) -> None:
    coordinator, averager = PUT_BACK[fault]

    def fails(plan: Plan) -> bool:
        try:
            simulate(plan, coordinator, averager)
        except (AssertionError, KeyError):
            return True
        return False

    plans = map(random_plan, range(FOUND_WITHIN))
    found = next((plan for plan in plans if fails(plan)), None)
    assert found is not None
    smallest = shrink(found, fails)
    assert len(smallest.faults) <= 3
    assert fails(smallest)
    simulate(smallest)


def test_a_worker_may_leave_while_the_averager_pauses() -> None:
    """Of what was decided about it before its loss is known nothing is asked."""
    killed, paused = Fault(Kind.KILL, 25, 0, 2.0), Fault(Kind.PAUSE, 29, 0, 0.1)
    plan = Plan(
        seed=169791,
        windows=(3, 3, 0),
        epochs=1,
        chunks=1,
        every_rounds=2,
        saves=True,
        max_failures=100,
        min_workers=3,
        gathers=False,
        validates=True,
        exchanges_rows=True,
        resubmissions=0,
        window_s=0.1,
        delay_s=0.5,
        faults=(killed, paused),
    )
    assert simulate(plan).failure is None


def test_a_violation_says_what_was_wrong() -> None:
    kill = Fault(Kind.KILL, after=12, rank=1, seconds=1.0)
    plan = Plan(seed=1, windows=(1, 1), faults=(kill,))
    with pytest.raises(Violation, match=r"epoch \d ended after \(1, 0\) of \(1, 1\)"):
        simulate(plan, EndsAnEpochWithoutTheLost)
