"""How a run ends: with who leaves too early, in words, and with a mistake of the averager's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_keyword import open_averager
from crew import LAYOUT, WAIT_S, Crew, crew, eventually, window
from decided import do
from every_row import every

from sparkdl.averager import Averager
from sparkdl.averager.coordination.coordinator import Coordinator
from sparkdl.averager.values.center import Center
from sparkdl.averager.values.wire_format import FULL_PRECISION
from sparkdl.errors import DeadlineError, DisconnectedError, StoppedError, TrainingError


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
