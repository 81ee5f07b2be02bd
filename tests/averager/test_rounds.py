"""Rounds without sockets: who takes part, what comes out, who is named when somebody is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdl.averager.codec import BFloat16Changes, Codec, FullPrecision
from sparkdl.averager.rounds import Rounds
from sparkdl.errors import DeadlineError, StoppedError, TrainingError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.protocols import Segment

LAYOUT = (Segment("parameters", torch.float32, 2),)


def make_rounds(world_size: int, *, deadline_s: float = 10.0, codec: Codec | None = None) -> Rounds:
    return Rounds(LAYOUT, [torch.zeros(2)], world_size, codec or FullPrecision(), deadline_s)


def report(rank: int, *, examples: int = 1, last: bool = False, epoch: int = 1) -> WindowReport:
    return WindowReport(rank=rank, epoch=epoch, step=1, examples=examples, loss_sum=0.0, last=last)


def contribute(rounds: Rounds, window: WindowReport, value: float) -> list[float]:
    """Contribute ``value`` twice, and take the reply as the server would."""
    chunks = [torch.full((2,), value)]
    reply = rounds.contribute(window, chunks)
    taken: list[float] = reply[0].tolist()
    rounds.release(window.rank)
    return taken


def together(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Run each call in a thread of its own; fails if one does not end."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        _, running = wait_for(futures, timeout=20)
    assert not running
    return futures


def join_all(rounds: Rounds) -> None:
    for future in together(
        *[lambda rank=rank: rounds.join(rank, f"host-{rank}") for rank in range(rounds.world_size)]
    ):
        future.result()


def test_a_round_gives_everyone_the_weighted_mean() -> None:
    rounds = make_rounds(2)
    join_all(rounds)

    replies = together(
        lambda: contribute(rounds, report(0, examples=3), 1.0),
        lambda: contribute(rounds, report(1, examples=1), 5.0),
    )

    assert [reply.result() for reply in replies] == [[2.0, 2.0], [2.0, 2.0]]
    assert rounds.center[0].tolist() == [2.0, 2.0]


def test_a_rank_whose_epoch_is_over_gets_the_epochs_last_center() -> None:
    rounds = make_rounds(2)
    join_all(rounds)

    def long_epoch() -> list[list[float]]:
        values = [contribute(rounds, report(1), 3.0), contribute(rounds, report(1), 10.0)]
        return [*values, contribute(rounds, report(1, last=True), 20.0)]

    short, long = together(lambda: contribute(rounds, report(0, last=True), 1.0), long_epoch)

    assert long.result() == [[2.0, 2.0], [10.0, 10.0], [20.0, 20.0]]
    assert short.result() == [20.0, 20.0]


def test_every_rank_is_active_again_in_the_next_epoch() -> None:
    rounds = make_rounds(2)
    join_all(rounds)
    for epoch, mean in [(1, 2.0), (2, 2.0), (3, 2.0)]:
        replies = together(
            lambda epoch=epoch: contribute(rounds, report(0, last=True, epoch=epoch), 1.0),
            lambda epoch=epoch: contribute(rounds, report(1, last=True, epoch=epoch), 3.0),
        )
        assert [reply.result() for reply in replies] == [[mean, mean]] * 2


def test_a_round_without_examples_leaves_the_center_as_it_is() -> None:
    rounds = make_rounds(1)
    join_all(rounds)
    assert contribute(rounds, report(0, examples=4), 1.0) == [1.0, 1.0]
    assert contribute(rounds, report(0, examples=0, last=True), 9.0) == [1.0, 1.0]
    assert rounds.center[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("codec", [FullPrecision(), BFloat16Changes()], ids=lambda c: c.name)
@pytest.mark.parametrize("world_size", [1, 4])
def test_memory_is_the_center_and_one_sum_whatever_the_world_size(
    world_size: int, codec: Codec
) -> None:
    rounds = make_rounds(world_size, codec=codec)
    join_all(rounds)
    before = storages(rounds)
    for _ in range(3):
        together(
            *[
                lambda rank=rank: contribute(rounds, report(rank), float(rank))
                for rank in range(world_size)
            ]
        )
        assert len(storages(rounds)) <= 2
    assert storages(rounds) == before


def storages(rounds: Rounds) -> set[int]:
    """Where the tensors live that a ``Rounds`` holds on to, directly or in lists."""
    held: list[Tensor] = []
    for value in vars(rounds).values():
        parts = value if isinstance(value, (list, tuple)) else [value]
        held += [part for part in parts if isinstance(part, Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in held}


def test_reports_and_epoch_summaries_are_events_in_order() -> None:
    rounds = make_rounds(1)
    join_all(rounds)
    windows = [report(0, examples=2), report(0, examples=3, last=True)]
    for window in windows:
        contribute(rounds, window, 1.0)
    rounds.finish(0)

    events = [rounds.events.get(timeout=5) for _ in range(4)]
    assert events[:2] == windows
    summary = events[2]
    assert isinstance(summary, EpochSummary)
    assert (summary.epoch, summary.examples, summary.rounds) == (1, 5, 2)
    assert events[3] is None


def test_a_rank_outside_the_world_is_refused() -> None:
    rounds = make_rounds(2)
    for rank in (2, -1):
        with pytest.raises(TrainingError, match=rf"rank {rank} on here joined a run of 2 workers"):
            rounds.join(rank, "here")


def test_a_rank_cannot_join_twice() -> None:
    rounds = make_rounds(1)
    rounds.join(0, "first-host")
    with pytest.raises(TrainingError, match=r"rank 0 joined from second-host.*from first-host"):
        rounds.join(0, "second-host")


def test_a_second_contribution_to_one_round_is_refused() -> None:
    rounds = make_rounds(2, deadline_s=5)
    join_all(rounds)

    def twice() -> None:
        time.sleep(0.1)
        with pytest.raises(TrainingError, match="rank 0 contributed out of turn"):
            contribute(rounds, report(0), 1.0)
        rounds.fail(TrainingError("enough"))

    first, second = together(lambda: contribute(rounds, report(0), 1.0), twice)
    second.result()
    assert isinstance(first.exception(), StoppedError)


def test_a_rank_that_never_joins_is_named() -> None:
    rounds = make_rounds(3, deadline_s=0.2)
    outcomes = together(lambda: rounds.join(0, "a"), lambda: rounds.join(2, "c"))
    for outcome in outcomes:
        error = outcome.exception()
        assert isinstance(error, DeadlineError)
        assert "rank 1 did not start" in str(error)
        assert "2 of 3 workers" in str(error)
        assert "rank 0" not in str(error)


def test_a_silent_rank_is_named_with_its_host_the_round_and_the_epoch() -> None:
    rounds = make_rounds(2, deadline_s=0.2)
    join_all(rounds)
    expected = r"rank 1 on host-1 did not contribute to round 1 \(epoch 1\) within 0.2 s"
    with pytest.raises(DeadlineError, match=expected):
        contribute(rounds, report(0), 1.0)


def test_a_rank_that_is_done_waits_as_long_as_the_others_make_progress() -> None:
    """Rank 0 has few rows; rank 1 goes on, each of its windows well within the deadline."""
    rounds = make_rounds(2, deadline_s=0.6)
    join_all(rounds)

    def many_windows() -> None:
        for number in range(8):
            time.sleep(0.2)
            contribute(rounds, report(1, last=number == 7), 2.0)

    short, long = together(lambda: contribute(rounds, report(0, last=True), 1.0), many_windows)

    assert long.exception() is None
    assert short.exception() is None
    assert short.result() == [2.0, 2.0]


def test_the_first_failure_is_the_one_that_counts() -> None:
    rounds = make_rounds(2)
    first = TrainingError("first")
    rounds.fail(first)
    rounds.fail(TrainingError("second"))
    assert rounds.failure is first
    assert rounds.events.get(timeout=1) is None


def test_a_failure_after_everyone_finished_is_none() -> None:
    rounds = make_rounds(1)
    join_all(rounds)
    rounds.finish(0)
    rounds.fail(TrainingError("late"))
    assert rounds.failure is None


def test_a_failure_wakes_whoever_waits_for_a_round() -> None:
    rounds = make_rounds(2, deadline_s=30)
    join_all(rounds)
    timer = threading.Timer(0.1, rounds.fail, [TrainingError("the reason")])
    timer.start()
    started = time.monotonic()
    with pytest.raises(StoppedError, match="the reason"):
        contribute(rounds, report(0), 1.0)
    timer.join(5)
    assert time.monotonic() - started < 10
