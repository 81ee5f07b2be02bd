"""Whole runs in which somebody is waited for: nobody waits for ever, and who is late is named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
from by_keyword import run
from misbehaving import Marked, marked, ranks
from torch import Tensor
from toys import classification, make_job, mlp
from virtual_time import VirtualClock, coordinator_of
from waiting import WAIT_S, eventually

from sparkdl.averager import Averager
from sparkdl.errors import DeadlineError
from sparkdl.transport.connection import Connection
from sparkdl.worker import Job

pytestmark = pytest.mark.usefixtures("nobody_stays")

DEADLINE_S = 60.0


class Acts(Marked):
    """Does at the mark what the test has told its class."""

    deed: Callable[[], object]

    def at_mark(self) -> None:
        type(self).deed()


class Blocked:
    """Somebody who gets no further until the run has ended.

    Attributes:
        there: set once somebody has come to this point.
    """

    def __init__(self) -> None:
        self.there, released = threading.Event(), threading.Event()
        self.release, self._wait = released.set, released.wait

    def __call__(self) -> None:
        self.there.set()
        assert self._wait(10 * WAIT_S)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Blocked:
    """What happens at marked rows."""
    blocked = Blocked()
    monkeypatch.setattr(Acts, "deed", blocked, raising=False)
    return blocked


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def require_named_in_time(
    named: str,
    job: Job,
    shards: Any,
    wanted: list[int],
    clock: VirtualClock,
    once: Callable[[Averager], bool],
    release: Callable[[], None] = lambda: None,
) -> None:
    """Run these ranks, and let time pass once all but the late one wait: it is named.

    Args:
        named: what the error says.
        job: what they train.
        shards: the rows of all ranks.
        wanted: the ranks.
        clock: the averager's.
        once: whether it is time.
        release: called when the run has ended.
    """
    start = ranks(job, shards, {rank: rank for rank in wanted})

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        with start(averager):
            try:
                with clock.running_once(averager, lambda: once(averager)):
                    yield
            finally:
                release()

    with pytest.raises(DeadlineError, match=named):
        run(job, len(shards), launch, now=clock)
    assert DEADLINE_S <= clock.passed <= DEADLINE_S + 2


def wait_in_round(averager: Averager, waiting: set[int]) -> bool:
    return set(coordinator_of(averager).round.waiting) == waiting


def test_a_rank_that_never_joins_is_named_at_the_deadline(clock: VirtualClock) -> None:
    job = make_job(mlp(), deadline_s=DEADLINE_S)
    shards = classification([4, 4, 4]).shards()

    def others_are_ready(averager: Averager) -> bool:
        return all(rank in coordinator_of(averager).shards for rank in (0, 2))

    require_named_in_time("rank 1", job, shards, [0, 2], clock, others_are_ready)


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_rank_that_goes_silent_is_named_at_the_deadline(
    clock: VirtualClock, blocked: Blocked, silent: int
) -> None:
    shards = marked([8, 8, 8], 8 * silent + 6).shards()  # in the second minibatch
    job = make_job(Acts(), deadline_s=DEADLINE_S)

    def others_wait(averager: Averager) -> bool:
        return blocked.there.is_set() and wait_in_round(averager, {0, 1, 2} - {silent})

    named = f"rank {silent}"
    require_named_in_time(named, job, shards, [0, 1, 2], clock, others_wait, blocked.release)


def test_a_worker_without_rows_waits_for_a_long_epoch_of_the_others(clock: VirtualClock) -> None:
    """Progress is being made all the time, so no deadline is missed."""
    averagers: list[Averager] = []

    class Slow(Marked):
        def forward(self, features: Tensor) -> Tensor:
            assert eventually(lambda: wait_in_round(averagers[0], {0}))
            clock.run(averagers[0], DEADLINE_S / 4)
            return self.net(features)

    job = make_job(Slow(), deadline_s=DEADLINE_S)
    shards = classification([0, 40]).shards()  # 10 windows
    outcome = run(job, 2, ranks(job, shards, {0: 0, 1: 1}, averagers), now=clock)
    assert clock.passed == 2.5 * DEADLINE_S
    assert outcome.history[0].examples == 40


@pytest.mark.parametrize("rows_before", [0, 2])
def test_a_worker_whose_rows_do_not_arrive_is_named_at_the_deadline(
    clock: VirtualClock, blocked: Blocked, rows_before: int
) -> None:
    def stuck(shard: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from shard[:rows_before]
        blocked()

    quick, slow = classification([4, 4]).shards(rows_a_batch=1)
    job = make_job(mlp(), deadline_s=DEADLINE_S)

    def other_waits(averager: Averager) -> bool:
        found = coordinator_of(averager)
        return blocked.there.is_set() and 0 in found.shards and found.members.there == {0, 1}

    named, shards = r"^rank 1 on .* of its rows within 60 s", [quick, stuck(slow)]
    require_named_in_time(named, job, shards, [0, 1], clock, other_waits, blocked.release)


def test_a_slow_upload_does_not_make_its_sender_look_lost(
    clock: VirtualClock, blocked: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 sends for most of the deadline; it is rank 1 who stays away."""
    averagers: list[Averager] = []
    sent = threading.Event()
    send_values = Connection.send_values

    def slowly(connection: Connection, values: Tensor, header: Any = None) -> None:
        if threading.current_thread().name == "sparkdl-rank-0" and not sent.is_set():
            if header is not None:
                connection.send_header(header)
            assert blocked.there.wait(WAIT_S)
            clock.run(averagers[0], 0.8 * DEADLINE_S)
            sent.set()
            header = None
        send_values(connection, values, header)

    monkeypatch.setattr(Connection, "send_values", slowly)
    job = make_job(Acts(), deadline_s=DEADLINE_S)
    shards = marked([4, 4], 5).shards()

    def has_sent(averager: Averager) -> bool:
        averagers[:] = [averager]
        return sent.is_set() and wait_in_round(averager, {0})

    require_named_in_time("rank 1", job, shards, [0, 1], clock, has_sent, blocked.release)
