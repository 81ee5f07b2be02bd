"""Who leaves, what pauses do, and whose turn it is, over connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from by_keyword import open_averager
from crew import LAYOUT, WAIT_S, Crew, crew, eventually, sent_values, window
from decided import Told, do
from decisions import Run, only, report, started
from every_row import every, every_row

from sparkdl.averager import Averager
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.round_policy import RoundRobin
from sparkdl.averager.run_events import Position, Progress
from sparkdl.averager.service.saving import CheckpointPlan
from sparkdl.averager.values.center import Center
from sparkdl.averager.values.wire_format import CHANGES, FULL_PRECISION
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import DeadlineError, DisconnectedError, StoppedError, TrainingError
from sparkdl.strategies import SSP


def finish(workers: Crew, rank: int) -> None:
    """Leave; one that may not is told that the run ends."""
    with contextlib.suppress(StoppedError):
        workers.client(rank).finish()


@every("max_failures", [0, 5])
def test_the_run_ends_at_once_and_says_why(max_failures: int) -> None:
    with crew(2, max_failures=max_failures) as workers:
        for one in [workers.exchange(window(rank)) for rank in range(2)]:
            one.result(WAIT_S)
        waiting = workers.exchange(window(0, 2))
        finish(workers, 1)
        error = workers.outcome.exception(WAIT_S)
        assert isinstance(waiting.exception(WAIT_S), StoppedError)
    with pytest.raises(TrainingError, match=r"rank 1 on .* left the run before the end of epoch 1"):
        raise error or AssertionError("it goes on")


def test_who_exchanges_something_in_an_epoch_that_the_other_has_ended_does_not_wait_for_ever() -> (
    None
):
    """Each waits for the other, and is told now and then that it still has to."""
    with crew(2, deadline_s=60.0) as workers:
        workers.exchange(window(1, last=True))
        workers.exchange(window(0)).result(WAIT_S)
        workers.call(workers.client(0).gather, {})
        workers.wait_for("gave", 0)
        workers.wait(59.0)
        assert not workers.outcome.done()
        told = [each for each in workers.heard.decisions if isinstance(each, do.say_waiting)]
        assert [[member.rank for member in each.members] for each in told] == [[0, 1]] * 3
        workers.wait(62.0)  # it is dropped, and does not come back
        error = workers.outcome.exception(WAIT_S)
    with pytest.raises(DeadlineError, match=r"rank 1 .*in an exchange among the workers"):
        raise error or AssertionError("it goes on")


def test_who_has_finished_may_leave_before_the_others_have() -> None:
    with crew(2) as workers:
        rounds = [workers.exchange(window(rank, last=True)) for rank in range(2)]
        for one in rounds:
            one.result(WAIT_S)
        finish(workers, 1)
        workers.wait(30.0)
        assert not workers.outcome.done()
        finish(workers, 0)
        assert eventually(workers.outcome.done)
        assert workers.outcome.exception() is None


def test_who_comes_when_the_run_has_ended_hears_it_whatever_it_has_to_say() -> None:
    with open_averager(LAYOUT, [torch.zeros(3)], 1, FULL_PRECISION) as averager:
        averager.fail(TrainingError("it was enough"))
        with pytest.raises(TrainingError):
            list(averager.events())
        late = averager.address.connect(0, "the averager", 2.0)
        late.send_header({"failure": "of no interest any more"})
        assert late.receive_header() == {"stopped": "the run ended: it was enough"}
        late.close()


def mistake(*_: Any, **__: Any) -> Any:
    raise KeyError("a mistake")


def failure_of(workers: Crew) -> BaseException:
    error = workers.outcome.exception(WAIT_S)
    assert error is not None
    return error


def spoil_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on also what a failure leads to fails."""
    monkeypatch.setattr(Coordinator, "_enter_held", mistake)
    monkeypatch.setattr(Coordinator, "_end", mistake)


def spoil_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run fails, and then so does telling everyone."""
    monkeypatch.setattr(Center, "commit", mistake)
    monkeypatch.setattr(Averager, "part", mistake)


def spoil_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Center, "commit", mistake)


@every("spoil", [spoil_commits, spoil_decisions, spoil_the_end])
def test_the_driver_is_told(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with crew(1) as workers:
        spoil(monkeypatch)
        given = workers.exchange(window(0))
        error = failure_of(workers)
        assert isinstance(error, TrainingError)
        assert "KeyError('a mistake')" in str(error)
        assert given.exception(WAIT_S) is not None


def test_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with crew(2) as workers:
        spoil_commits(monkeypatch)
        given = [workers.exchange(window(rank)) for rank in range(2)]
        for each in given:
            error = each.exception(WAIT_S)
            assert isinstance(error, StoppedError)
            assert not isinstance(error, DisconnectedError)
            assert "KeyError('a mistake')" in str(error)


def exchange(workers: Crew, step: int, last: bool = False) -> None:
    for done in [workers.exchange(window(rank, step, last=last)) for rank in range(2)]:
        done.result(WAIT_S)


def pause(workers: Crew, seconds: float) -> None:
    workers.clock.step(workers.averager, seconds)


@every("max_failures", [0, 5])
def test_workers_survive_a_pause_of_the_driver(max_failures: int) -> None:
    with crew(2, deadline_s=60.0, max_failures=max_failures) as workers:
        exchange(workers, step=1)
        early = workers.exchange(window(0, 2))
        workers.wait_for("contributed", 0, 2)
        pause(workers, 85.0)
        workers.wait(2.0)  # longer than the driver takes to look at its clock
        workers.exchange(window(1, 2)).result(WAIT_S)
        early.result(WAIT_S)
        exchange(workers, step=3, last=True)
        for rank in range(2):
            workers.client(rank).finish()
        workers.outcome.result(WAIT_S)
        assert workers.averager.losses == []


def test_a_pause_is_no_long_window_by_which_patience_is_measured() -> None:
    with crew(2, deadline_s=600.0) as workers:
        workers.wait(1.0)
        exchange(workers, step=1)
        pause(workers, 40.0)
        exchange(workers, step=2)
        goes_on = workers.exchange(window(0, 3))
        workers.wait_for("contributed", 0, 3)
        workers.wait(14.0)
        assert workers.averager.dropped == []
        workers.wait(2.0)
        goes_on.result(WAIT_S)
        assert workers.averager.dropped == [1]


def test_a_pause_is_not_the_storages_fault(tmp_path: Path) -> None:
    def worker_state() -> bytes:
        pause(workers, 100.0)
        workers.wait(2.0)
        return b"state"

    store = CheckpointStore(str(tmp_path), keep_last=1)
    policy = CheckpointPolicy(path="")
    plan = CheckpointPlan(store=store, policy=policy, last_epoch=1, config={})
    with crew(1, plan=plan, options={"worker_state": worker_state}) as workers:
        workers.exchange(window(0, last=True)).result(WAIT_S)
        workers.client(0).finish()
        workers.outcome.result(WAIT_S)
    assert store.newest() is not None


AHEAD = 11
PROGRESS = replace(
    Progress.start(2), positions=(Position(step=AHEAD, step_of_epoch=AHEAD), Position())
)


def test_who_is_held_sends_nothing_and_is_not_lost_though_others_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values that nobody reads would fill the connection, and their sender's deadline pass."""
    sent = sent_values(monkeypatch)
    settings = {"policy": SSP(0).policy(1), "progress": PROGRESS, "wire_format": CHANGES}
    with crew(2, deadline_s=60.0, max_failures=1, **settings) as workers:
        ahead = workers.exchange(window(0, AHEAD + 1))
        workers.wait_for("window_closed", 0)
        for step in range(1, AHEAD + 1):
            workers.wait(25.0)
            assert not ahead.done()
            assert len(sent) == step - 1  # by the other
            workers.exchange(window(1, step)).result(WAIT_S)
        told = [each for each in workers.heard.decisions if isinstance(each, do.say_waiting)]
        assert [[member.rank for member in each.members] for each in told] == [[0]] * 18
        through = workers.exchange(window(1, AHEAD + 1, last=True))
        ahead.result(WAIT_S)
        workers.exchange(window(0, AHEAD + 2, last=True)).result(WAIT_S)
        through.result(WAIT_S)
        for rank in range(2):
            workers.client(rank).finish()
        workers.outcome.result(WAIT_S)
        assert workers.averager.losses == []


def run_of(world_size: int, **options: Any) -> Run:
    return started(world_size, policy=RoundRobin(1), **options)


def close(run: Run, rank: int, steps: int = 1, **fields: Any) -> list[int]:
    """A rank has trained a window; returns who may contribute then."""
    told = replace(report(rank, step=steps, **fields), step_of_epoch=steps)
    return received(run.tell("window_closed", run.members[rank], told))


def add(run: Run, rank: int) -> list[int]:
    """A rank's contribution is whole, and it takes the reply; returns who may contribute then."""
    return received(run.add(rank) + run.take(rank))


def received(decisions: list[Told]) -> list[int]:
    return [each.member.rank for each in only(do.receive, decisions)]


def test_a_turn_of_who_is_lost_is_skipped_and_it_has_one_when_it_is_back() -> None:
    run = run_of(3, max_failures=1)
    close(run, 1)
    close(run, 2)
    assert received(run.lose(0)) == [1]
    assert [add(run, rank) for rank in (1, 2)] == [[2], []]
    run.come_back(0)
    run.take()
    assert close(run, 1, 2) == []
    assert close(run, 0) == [0]
    assert add(run, 0) == [1]


@every_row(
    ((0, 0, 0), 2, 0), ((4, 2, 2), 2, 1), ((4, 4, 2), 2, 2), ((5, 4, 4), 2, 1), ((5, 6, 6), 2, 0)
)
def test_a_resumed_run_goes_on_with_who_has_had_the_fewest(
    steps: tuple[int, ...], period: int, first: int
) -> None:
    policy = RoundRobin(period)
    policy.begin([Position(step=n, step_of_epoch=n) for n in steps])
    assert [rank for rank in range(3) if policy.may_contribute(rank, {0, 1, 2})] == [first]


def test_others_may_train_longer_than_who_waits_could_go_on_sending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every window, not only in the first, for which late comers wait anyway.

    So whoever waits for its turn sends no values, which nobody would read.
    """
    sent = sent_values(monkeypatch)
    with crew(
        2, policy=RoundRobin(1), wire_format=CHANGES, deadline_s=60.0, max_failures=1
    ) as workers:
        for step in (1, 2):
            waits = workers.exchange(window(1, step))
            workers.wait_for("window_closed", 1, step)
            for _ in range(250 * (step - 1)):
                workers.client(0).heartbeat()
                workers.wait(1.0)
            assert not waits.done()
            assert len(sent) == 2 * (step - 1)
            workers.exchange(window(0, step)).result(WAIT_S)
            waits.result(WAIT_S)
        assert workers.averager.losses == []
