"""Who leaves, or goes on to the next epoch, before an epoch is over for it is refused in words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from by_keyword import open_averager
from crew import LAYOUT, WAIT_S, Crew, crew, eventually, window
from every_row import every

from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.values.wire_format import FullPrecision
from sparkdl.errors import DeadlineError, StoppedError, TrainingError
from sparkdl.transport.connecting import dial

Deed = Callable[[Crew], "Future[Any] | None"]


def finish(workers: Crew, rank: int) -> None:
    """Leave; one that may not is told that the run ends."""
    with contextlib.suppress(StoppedError):
        workers.client(rank).finish()


def leave_in_the_middle(workers: Crew) -> Future[Any]:
    rounds = [workers.exchange(window(rank)) for rank in range(2)]
    for one in rounds:
        one.result(WAIT_S)
    waiting = workers.exchange(window(0, 2))
    finish(workers, 1)
    return waiting


def leave_before_the_first_window(workers: Crew) -> Future[Any]:
    waiting = workers.exchange(window(0))
    workers.wait_for(on.Contributed, 0)
    finish(workers, 1)
    return waiting


def leave_an_epoch_early(workers: Crew) -> Future[Any]:
    rounds = [workers.exchange(window(rank, last=True)) for rank in range(2)]
    for one in rounds:
        one.result(WAIT_S)
    finish(workers, 1)
    return workers.exchange(window(0, 2, epoch=2))


def leave_after_a_window_that_was_not_the_last(workers: Crew) -> Future[Any]:
    done = workers.exchange(window(0, last=True))
    workers.exchange(window(1)).result(WAIT_S)
    finish(workers, 1)
    return done


def leave_while_the_other_gathers(workers: Crew) -> Future[Any]:
    waiting = workers.call(workers.client(0).gather, {})
    workers.wait_for(on.Gave, 0)
    finish(workers, 1)
    return waiting


def gather_after_the_other_has_left(workers: Crew) -> Future[Any]:
    finish(workers, 1)
    return workers.call(workers.client(0).gather, {})


def go_on_to_the_next_epoch(workers: Crew) -> Future[Any]:
    done = workers.exchange(window(0, last=True))
    workers.exchange(window(1)).result(WAIT_S)
    workers.exchange(window(1, 2, epoch=2))
    return done


def close_an_epoch_twice(workers: Crew) -> Future[Any]:
    rounds = [workers.exchange(window(rank, last=True)) for rank in range(2)]
    for one in rounds:
        one.result(WAIT_S)
    waiting = workers.exchange(window(0, 2, epoch=2))
    workers.exchange(window(1, last=True))
    return waiting


DEEDS: dict[Deed, str] = {
    leave_in_the_middle: "rank 1 on .* left the run before the end of epoch 1",
    leave_before_the_first_window: "rank 1 on .* left the run before the end of epoch 1",
    leave_an_epoch_early: "rank 0 on .* epoch 2, .*rank 1 on .* left the run",
    leave_after_a_window_that_was_not_the_last: "rank 1 on .* before the end of epoch 1",
    leave_while_the_other_gathers: "rank 1 on .* left the run .*exchange among the workers",
    gather_after_the_other_has_left: "rank 0 on .* exchange.*, .*rank 1 on .* left the run",
    go_on_to_the_next_epoch: "rank 1 on .* window of epoch 2, but the run is in epoch 1",
    close_an_epoch_twice: "rank 1 on .* window of epoch 1, but the run is in epoch 2",
}


@every("max_failures", [0, 5])
@every("deed", DEEDS)
def test_the_run_ends_at_once_and_says_why(deed: Deed, max_failures: int) -> None:
    with crew(2, max_failures=max_failures) as workers:
        waiting = deed(workers)
        error = workers.outcome.exception(WAIT_S)
        assert isinstance(error, TrainingError)
        assert waiting is not None
        assert isinstance(waiting.exception(WAIT_S), StoppedError)
    with pytest.raises(TrainingError, match=DEEDS[deed]):
        raise error


def test_who_exchanges_something_in_an_epoch_that_the_other_has_ended_does_not_wait_for_ever() -> (
    None
):
    """Each waits for the other, and is told now and then that it still has to."""
    with crew(2, deadline_s=60.0) as workers:
        workers.exchange(window(1, last=True))
        workers.exchange(window(0)).result(WAIT_S)
        workers.call(workers.client(0).gather, {})
        workers.wait_for(on.Gave, 0)
        workers.wait(59.0)
        assert not workers.outcome.done()
        told = [each for each in workers.heard.decisions if isinstance(each, do.SayWaiting)]
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
    with open_averager(LAYOUT, [torch.zeros(3)], 1, FullPrecision()) as averager:
        averager.fail(TrainingError("it was enough"))
        with pytest.raises(TrainingError):
            list(averager.events())
        address = averager.address
        late = dial(address.host_and_port, address.token, None, WAIT_S, 2.0)
        late.send_header({"failure": "of no interest any more"})
        assert late.receive_header() == {"stopped": "the run ended: it was enough"}
        late.close()
