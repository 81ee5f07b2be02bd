"""Whole runs in which somebody is waited for: nobody waits for ever, and who is late is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
from misbehaving import (
    Marked,
    Sleeps,
    SleepsABit,
    late,
    marked,
    ranks,
)
from torch import Tensor
from toys import classification, make_job, mlp

from sparkdl.averager import Averager
from sparkdl.driver import run
from sparkdl.errors import (
    DeadlineError,
)
from sparkdl.testing import run_world
from sparkdl.transport.connection import Connection

pytestmark = pytest.mark.usefixtures("nobody_stays")


def test_a_rank_that_never_joins_is_named_within_the_deadline() -> None:
    job = make_job(mlp(), deadline_s=1.0)
    shards = classification([4, 4, 4]).shards()
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="rank 1"):
        run(job, 3, ranks(job, shards, {0: 0, 2: 2}))
    assert time.monotonic() - started < 10


@pytest.mark.slow_variants(fast=2)
@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_rank_that_goes_silent_is_named_within_the_deadline(silent: int) -> None:
    data = marked([8, 8, 8], 8 * silent + 6)  # in the second minibatch
    job = make_job(Sleeps(), deadline_s=1.0)
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=f"rank {silent}"):
        run_world(job, data.shards())
    assert time.monotonic() - started < 20


def test_start_up_and_the_first_window_have_the_deadline_each() -> None:
    """Workers that come late and then train for long are heard of in between: they join."""
    job = make_job(SleepsABit(), deadline_s=1.5)
    shards = marked([4, 4], 0, 4).shards()
    plain = ranks(job, shards, {0: 0, 1: 1})

    def launch(averager: Averager) -> Any:
        return late(plain(averager), 0.9)

    outcome = run(job, 2, launch)
    assert outcome.history[0].examples == 8


@pytest.mark.slow
def test_a_worker_without_rows_waits_for_a_long_epoch_of_the_others() -> None:
    """Progress is being made all the time, so no deadline is missed."""

    class Slow(Marked):
        def forward(self, features: Tensor) -> Tensor:
            time.sleep(0.4)
            return self.net(features)

    data = classification([0, 40])  # 10 windows of 0.4 s
    outcome = run_world(make_job(Slow(), deadline_s=1.5), data.shards())
    assert outcome.history[0].examples == 40


def slow_rows(shard: list[pa.RecordBatch], seconds: float) -> Iterator[pa.RecordBatch]:
    for batch in shard:
        time.sleep(seconds)
        yield batch


@pytest.mark.slow
def test_a_worker_that_reads_slowly_is_not_overdue_while_rows_arrive() -> None:
    """Its 10 record batches take 4 s, more than twice the deadline."""
    quick, slow = classification([4, 20]).shards(rows_a_batch=2)
    outcome = run_world(
        make_job(mlp(), deadline_s=1.8),
        [quick, slow_rows(slow, 0.4)],  # type: ignore[list-item]
    )
    assert outcome.history[0].examples == 24


@pytest.mark.parametrize("rows_before", [0, 2])
def test_a_worker_whose_rows_do_not_arrive_is_named_within_the_deadline(rows_before: int) -> None:
    released = threading.Event()

    def blocked(shard: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from shard[:rows_before]
        released.wait(10)

    quick, slow = classification([4, 4]).shards(rows_a_batch=1)
    job = make_job(mlp(), deadline_s=1.0)
    averagers: list[Averager] = []
    workers = ranks(job, [quick, blocked(slow)], {0: 0, 1: 1}, averagers)

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        with workers(averager):
            try:
                yield
            finally:
                released.set()

    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"^rank 1 on .* of its rows within 1 s"):
        run(job, 2, launch)
    assert time.monotonic() - started < 9


@pytest.mark.slow
def test_a_slow_upload_does_not_make_its_sender_look_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sends for 1.2 s of a deadline of 1.5 s; it is rank 1 who stays away."""
    send_values = Connection.send_values

    def slowly(
        connection: Connection, values: Tensor, header: dict[str, Any] | None = None
    ) -> None:
        if threading.current_thread().name.startswith("sparkdl-rank"):
            if header is not None:
                connection.send_header(header)
            time.sleep(1.2)
        send_values(connection, values)

    monkeypatch.setattr(Connection, "send_values", slowly)
    job = make_job(Sleeps(), deadline_s=1.5)
    with pytest.raises(DeadlineError, match="rank 1"):
        run_world(job, marked([4, 4], 5).shards())
