"""Rounds without sockets: who takes part, what comes out, who is named when somebody is missing."""

from __future__ import annotations

import queue
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
from sparkdl.averager.members import Member
from sparkdl.averager.rounds import Rounds
from sparkdl.errors import DeadlineError, StoppedError, TrainingError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.facts import ColumnFacts, DataFacts, ShardFacts
from sparkdl.protocols import Segment

LAYOUT = (Segment("parameters", torch.float32, 2),)


def make_rounds(world_size: int, *, deadline_s: float = 10.0, codec: Codec | None = None) -> Rounds:
    return Rounds(LAYOUT, [torch.zeros(2)], world_size, codec or FullPrecision(), deadline_s)


def report(rank: int, *, examples: int = 1, last: bool = False, epoch: int = 1) -> WindowReport:
    return WindowReport(rank=rank, epoch=epoch, step=1, examples=examples, loss_sum=0.0, last=last)


def member(rounds: Rounds, rank: int) -> Member:
    """Who joined last for a rank."""
    return rounds._members.of(rank)


def contribute(rounds: Rounds, window: WindowReport, value: float) -> list[float]:
    """Contribute ``value`` twice, and take the reply as the server would."""
    scratch = torch.empty(rounds.chunk_bytes, dtype=torch.uint8)
    worker = member(rounds, window.rank)
    reply = rounds.contribute(worker, window, lambda into: into.fill_(value), scratch)
    taken: list[float] = reply[0].tolist()
    rounds.release(worker)
    return taken


def together(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Run each call in a thread of its own; fails if one does not end."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        _, running = wait_for(futures, timeout=20)
    assert not running
    return futures


def shard(rows: int = 1, **found: Any) -> ShardFacts:
    """A worker's rows, of one column."""
    return ShardFacts(rows, (ColumnFacts(**found),))


def ready(rounds: Rounds, rank: int, facts: ShardFacts | None = None) -> None:
    rounds.ready(member(rounds, rank), facts or shard(), lambda: None)


def start_all(rounds: Rounds) -> None:
    """Let every rank join, read its rows and start, as the driver would."""
    ranks = range(rounds.world_size)
    for rank in ranks:
        rounds.join(rank, f"host-{rank}")

    def drive() -> None:
        assert isinstance(rounds.events.get(timeout=10), DataFacts)
        rounds.start()

    for future in together(drive, *[lambda rank=rank: ready(rounds, rank) for rank in ranks]):
        future.result()


def test_a_round_gives_everyone_the_weighted_mean() -> None:
    rounds = make_rounds(2)
    start_all(rounds)

    replies = together(
        lambda: contribute(rounds, report(0, examples=3), 1.0),
        lambda: contribute(rounds, report(1, examples=1), 5.0),
    )

    assert [reply.result() for reply in replies] == [[2.0, 2.0], [2.0, 2.0]]
    assert rounds.center[0].tolist() == [2.0, 2.0]


def test_a_rank_whose_epoch_is_over_gets_the_epochs_last_center() -> None:
    rounds = make_rounds(2)
    start_all(rounds)

    def long_epoch() -> list[list[float]]:
        values = [contribute(rounds, report(1), 3.0), contribute(rounds, report(1), 10.0)]
        return [*values, contribute(rounds, report(1, last=True), 20.0)]

    short, long = together(lambda: contribute(rounds, report(0, last=True), 1.0), long_epoch)

    assert long.result() == [[2.0, 2.0], [10.0, 10.0], [20.0, 20.0]]
    assert short.result() == [20.0, 20.0]


def test_every_rank_is_active_again_in_the_next_epoch() -> None:
    rounds = make_rounds(2)
    start_all(rounds)
    for epoch, mean in [(1, 2.0), (2, 2.0), (3, 2.0)]:
        replies = together(
            lambda epoch=epoch: contribute(rounds, report(0, last=True, epoch=epoch), 1.0),
            lambda epoch=epoch: contribute(rounds, report(1, last=True, epoch=epoch), 3.0),
        )
        assert [reply.result() for reply in replies] == [[mean, mean]] * 2


def test_a_round_without_examples_leaves_the_center_as_it_is() -> None:
    rounds = make_rounds(1)
    start_all(rounds)
    assert contribute(rounds, report(0, examples=4), 1.0) == [1.0, 1.0]
    assert contribute(rounds, report(0, examples=0, last=True), 9.0) == [1.0, 1.0]
    assert rounds.center[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("codec", [FullPrecision(), BFloat16Changes()], ids=lambda c: c.name)
@pytest.mark.parametrize("world_size", [1, 4])
def test_memory_is_the_center_and_one_sum_whatever_the_world_size(
    world_size: int, codec: Codec
) -> None:
    rounds = make_rounds(world_size, codec=codec)
    start_all(rounds)
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
    start_all(rounds)
    windows = [report(0, examples=2), report(0, examples=3, last=True)]
    for window in windows:
        contribute(rounds, window, 1.0)
    rounds.finish(member(rounds, 0))

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
    start_all(rounds)

    def twice() -> None:
        time.sleep(0.1)
        with pytest.raises(TrainingError, match="rank 0 contributed out of turn"):
            contribute(rounds, report(0), 1.0)
        rounds.fail(TrainingError("enough"))

    first, second = together(lambda: contribute(rounds, report(0), 1.0), twice)
    second.result()
    assert isinstance(first.exception(), StoppedError)


def start(rounds: Rounds, after_s: float = 0.0) -> None:
    """What the driver does: take the data's facts, look at them for some time, let all start."""
    rounds.events.get(timeout=10)
    time.sleep(after_s)
    rounds.check_deadline()
    rounds.start()


class TestStart:
    """Nobody trains before all have read their rows and the driver has looked at what they are."""

    def test_nobody_is_let_go_before_the_driver_starts(self) -> None:
        rounds = make_rounds(2)
        released: list[float] = []
        started: list[float] = []

        def wait_for_start(rank: int) -> None:
            rounds.join(rank, "here")
            ready(rounds, rank)
            released.append(time.monotonic())

        def drive() -> None:
            rounds.events.get(timeout=10)
            time.sleep(0.2)
            started.append(time.monotonic())
            rounds.start()

        for future in together(lambda: wait_for_start(0), lambda: wait_for_start(1), drive):
            future.result()
        assert len(released) == 2
        assert min(released) >= started[0]

    def test_the_driver_is_told_nothing_before_all_have_read(self) -> None:
        rounds = make_rounds(2)
        rounds.join(0, "a")
        rounds.join(1, "b")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ready, rounds, 0)
            with pytest.raises(queue.Empty):
                rounds.events.get(timeout=0.3)
            rounds.fail(StoppedError("seen enough"))
            assert isinstance(waiting.exception(timeout=10), StoppedError)

    def test_the_first_event_has_the_rows_by_rank_and_the_columns_added(self) -> None:
        rounds = make_rounds(3)
        shards = {0: shard(5, nulls=1), 1: shard(0), 2: shard(7, nulls=2)}
        for rank in shards:
            rounds.join(rank, "here")

        def drive() -> object:
            event = rounds.events.get(timeout=10)
            rounds.start()
            return event

        # the last rank comes first: the order of arrival must not matter
        told, *others = together(
            drive, *[lambda r=rank: ready(rounds, r, shards[r]) for rank in (2, 0, 1)]
        )
        assert told.result() == DataFacts((5, 0, 7), (ColumnFacts(nulls=3),))
        assert [other.exception() for other in others] == [None] * 3

    def test_joining_does_not_wait_for_the_others(self) -> None:
        rounds = make_rounds(2, deadline_s=30)
        (joined,) = together(lambda: rounds.join(0, "here"))
        joined.result()

    def test_who_waits_for_the_start_is_told_now_and_then_that_it_goes_on(self) -> None:
        rounds = make_rounds(2, deadline_s=0.8)
        rounds.join(0, "a")
        rounds.join(1, "b")
        signs: list[float] = []

        def read_slowly() -> None:
            for _ in range(8):
                time.sleep(0.2)
                rounds.still_reading(member(rounds, 1))
            ready(rounds, 1)

        def drive() -> None:
            rounds.events.get(timeout=10)
            rounds.start()

        def wait_for_start() -> None:
            rounds.ready(member(rounds, 0), shard(), lambda: signs.append(time.monotonic()))

        for future in together(wait_for_start, read_slowly, drive):
            future.result()
        # 1.6 s in steps of a quarter of the deadline, with room for a busy machine
        assert len(signs) >= 4

    def test_a_rank_that_never_joins_is_named(self) -> None:
        rounds = make_rounds(3, deadline_s=0.2)
        rounds.join(0, "a")
        rounds.join(2, "c")
        for outcome in together(lambda: ready(rounds, 0), lambda: ready(rounds, 2)):
            error = outcome.exception()
            assert isinstance(error, DeadlineError)
            assert "rank 1 did not start" in str(error)
            assert "2 of 3 workers" in str(error)
            assert "rank 0" not in str(error)

    def test_a_rank_that_joined_but_reads_nothing_is_named_with_its_host(self) -> None:
        rounds = make_rounds(2, deadline_s=0.2)
        rounds.join(0, "host-0")
        rounds.join(1, "host-1")
        with pytest.raises(
            DeadlineError, match=r"^rank 1 on host-1 did not receive more of its rows within 0\.2 s"
        ):
            ready(rounds, 0)

    def test_the_driver_notices_a_silent_reader_on_its_own(self) -> None:
        rounds = make_rounds(1, deadline_s=0.2)
        rounds.join(0, "host-0")

        def look_often() -> None:
            for _ in range(200):
                time.sleep(rounds.look_s)
                rounds.check_deadline()

        with pytest.raises(
            DeadlineError, match="rank 0 on host-0 did not receive more of its rows"
        ):
            look_often()

    def test_of_several_that_are_late_those_that_did_not_start_are_named(self) -> None:
        rounds = make_rounds(3, deadline_s=0.2)
        rounds.join(0, "a")
        rounds.join(1, "b")
        with pytest.raises(DeadlineError, match=r"^rank 2 did not start"):
            ready(rounds, 0)

    def test_a_slow_reader_that_gives_signs_of_life_is_not_overdue(self) -> None:
        rounds = make_rounds(2, deadline_s=0.6)
        rounds.join(0, "a")
        rounds.join(1, "b")

        def read_slowly() -> None:
            for _ in range(8):
                time.sleep(0.2)
                rounds.still_reading(member(rounds, 1))
            ready(rounds, 1)

        for future in together(lambda: ready(rounds, 0), read_slowly, lambda: start(rounds)):
            future.result()

    def test_a_reader_learns_of_a_failure_elsewhere_before_its_rows_end(self) -> None:
        rounds = make_rounds(2)
        rounds.join(0, "a")
        rounds.still_reading(member(rounds, 0))
        rounds.fail(TrainingError("rank 1 is gone"))
        with pytest.raises(StoppedError, match="rank 1 is gone"):
            rounds.still_reading(member(rounds, 0))

    def test_a_driver_that_looks_at_the_data_for_long_makes_nobody_overdue(self) -> None:
        rounds = make_rounds(1, deadline_s=0.2)
        rounds.join(0, "a")

        for future in together(lambda: ready(rounds, 0), lambda: start(rounds, after_s=0.6)):
            future.result()

    def test_the_first_window_has_the_whole_deadline(self) -> None:
        rounds = make_rounds(1, deadline_s=0.4)
        rounds.join(0, "a")

        for future in together(lambda: ready(rounds, 0), lambda: start(rounds, after_s=0.5)):
            future.result()
        rounds.check_deadline()

    def test_a_failure_wakes_who_waits_for_the_start(self) -> None:
        rounds = make_rounds(1, deadline_s=30)
        rounds.join(0, "a")

        def refuse() -> None:
            rounds.events.get(timeout=10)
            rounds.fail(TrainingError("bad rows"))

        waiting, _ = together(lambda: ready(rounds, 0), refuse)
        assert isinstance(waiting.exception(), StoppedError)
        assert "bad rows" in str(waiting.exception())

    def test_ranks_that_see_different_columns_are_refused(self) -> None:
        rounds = make_rounds(2, deadline_s=5)
        rounds.join(0, "a")
        rounds.join(1, "b")

        def second() -> None:
            time.sleep(0.1)
            with pytest.raises(TrainingError, match="rank 1 has 2 columns, others do not"):
                ready(rounds, 1, ShardFacts(3, (ColumnFacts(), ColumnFacts())))
            rounds.fail(TrainingError("enough"))

        _, refused = together(lambda: ready(rounds, 0), second)
        refused.result()


def test_a_silent_rank_is_named_with_its_host_the_round_and_the_epoch() -> None:
    rounds = make_rounds(2, deadline_s=0.2)
    start_all(rounds)
    expected = r"rank 1 on host-1 did not contribute to round 1 \(epoch 1\) within 0.2 s"
    with pytest.raises(DeadlineError, match=expected):
        contribute(rounds, report(0), 1.0)


def test_a_rank_that_is_done_waits_as_long_as_the_others_make_progress() -> None:
    """Rank 0 has few rows; rank 1 goes on, each of its windows well within the deadline."""
    rounds = make_rounds(2, deadline_s=0.6)
    start_all(rounds)

    def many_windows() -> None:
        for number in range(8):
            time.sleep(0.2)
            contribute(rounds, report(1, last=number == 7), 2.0)

    short, long = together(lambda: contribute(rounds, report(0, last=True), 1.0), many_windows)

    assert long.exception() is None
    assert short.exception() is None
    assert short.result() == [2.0, 2.0]


class TestGather:
    """What the workers exchange among themselves."""

    @staticmethod
    def gather(rounds: Rounds, rank: int, *values: object) -> list[list[object]]:
        return [rounds.gather(member(rounds, rank), value, lambda: None) for value in values]

    def test_everyone_gets_all_values_by_rank_as_often_as_all_ask(self) -> None:
        rounds = make_rounds(3)
        start_all(rounds)

        # the last rank comes first: the order of arrival must not matter
        outcomes = together(
            *[lambda r=rank: self.gather(rounds, r, f"a{r}", f"b{r}") for rank in (2, 0, 1)]
        )

        for outcome in outcomes:
            assert outcome.result() == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]

    def test_nothing_is_kept_once_all_have_it(self) -> None:
        rounds = make_rounds(2)
        start_all(rounds)
        for _ in range(3):
            together(*[lambda r=rank: self.gather(rounds, r, r) for rank in range(2)])
        assert rounds._gathers == {}

    def test_a_rank_that_stays_away_is_named(self) -> None:
        rounds = make_rounds(2, deadline_s=0.2)
        start_all(rounds)
        expected = r"rank 1 on host-1 did not take part in what the workers exchange.* 0\.2 s"
        with pytest.raises(DeadlineError, match=expected):
            self.gather(rounds, 0, "here")

    def test_a_failure_wakes_who_waits(self) -> None:
        rounds = make_rounds(2, deadline_s=30)
        start_all(rounds)
        waiting, _ = together(
            lambda: self.gather(rounds, 0, "here"),
            lambda: rounds.fail(TrainingError("the reason")),
        )
        assert isinstance(waiting.exception(), StoppedError)

    def test_rounds_go_on_afterwards(self) -> None:
        rounds = make_rounds(1)
        start_all(rounds)
        assert self.gather(rounds, 0, 5) == [[5]]
        assert contribute(rounds, report(0, last=True), 1.0) == [1.0, 1.0]


def test_the_first_failure_is_the_one_that_counts() -> None:
    rounds = make_rounds(2)
    first = TrainingError("first")
    rounds.fail(first)
    rounds.fail(TrainingError("second"))
    assert rounds.failure is first
    assert rounds.events.get(timeout=1) is None


def test_a_failure_after_everyone_finished_is_none() -> None:
    rounds = make_rounds(1)
    start_all(rounds)
    rounds.finish(member(rounds, 0))
    rounds.fail(TrainingError("late"))
    assert rounds.failure is None


def test_a_failure_wakes_whoever_waits_for_a_round() -> None:
    rounds = make_rounds(2, deadline_s=30)
    start_all(rounds)
    timer = threading.Timer(0.1, rounds.fail, [TrainingError("the reason")])
    timer.start()
    started = time.monotonic()
    with pytest.raises(StoppedError, match="the reason"):
        contribute(rounds, report(0), 1.0)
    timer.join(5)
    assert time.monotonic() - started < 10
