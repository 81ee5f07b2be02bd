"""A driver that stood still (garbage collection, swap, a laptop asleep) judges nobody by that."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest
import torch
from by_keyword import open_averager
from crew import LAYOUT, SILENCE_S, WAIT_S, Crew, crew, window
from every_row import every
from toys import drive

from sparkdl.averager import AveragerClient
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.service.saving import CheckpointPlan
from sparkdl.averager.values.wire_format import FullPrecision
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import DeadlineError, StoppedError
from sparkdl.feed.statistics.shards import ShardStatistics


def exchange(workers: Crew, step: int, last: bool = False) -> None:
    for done in [workers.exchange(window(rank, step, last=last)) for rank in range(2)]:
        done.result(WAIT_S)


def pause(workers: Crew, seconds: float) -> None:
    workers.clock.step(workers.averager.service, seconds)


@every("max_failures", [0, 5])
def test_workers_survive_a_pause_of_the_driver(max_failures: int) -> None:
    with crew(2, deadline_s=60.0, max_failures=max_failures) as workers:
        exchange(workers, step=1)
        early = workers.exchange(window(0, 2))
        workers.wait_for(on.Contributed, 0, 2)
        pause(workers, 85.0)
        workers.wait(2.0)  # longer than the driver takes to look at its clock
        workers.exchange(window(1, 2)).result(WAIT_S)
        early.result(WAIT_S)
        exchange(workers, step=3, last=True)
        for rank in range(2):
            workers.client(rank).finish()
        workers.outcome.result(WAIT_S)
        assert workers.averager.losses == []


def test_who_stays_silent_after_a_pause_is_still_found_out() -> None:
    with crew(2, deadline_s=60.0, max_failures=0) as workers:
        exchange(workers, step=1)
        early = workers.exchange(window(0, 2))
        workers.wait_for(on.Contributed, 0, 2)
        pause(workers, 85.0)
        workers.wait(59.0)
        assert not workers.outcome.done()
        workers.wait(2.0)
        error = workers.outcome.exception(WAIT_S)
        assert isinstance(error, DeadlineError)
        assert "did not contribute to round 2 (epoch 1) within 60 s" in str(error)
        assert isinstance(early.exception(WAIT_S), StoppedError)


def test_a_pause_is_no_long_window_by_which_patience_is_measured() -> None:
    with crew(2, deadline_s=600.0) as workers:
        workers.wait(1.0)
        exchange(workers, step=1)
        pause(workers, 40.0)
        exchange(workers, step=2)
        goes_on = workers.exchange(window(0, 3))
        workers.wait_for(on.Contributed, 0, 3)
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
    plan = CheckpointPlan(store=store, every_epochs=1, every_rounds=None, last_epoch=1, config={})
    with crew(1, plan=plan, options={"worker_state": worker_state}) as workers:
        workers.exchange(window(0, last=True)).result(WAIT_S)
        workers.client(0).finish()
        workers.outcome.result(WAIT_S)
    assert store.newest() is not None


DEADLINE_S = 20.0


def serve(told: Pipe) -> None:
    """A driver of two workers; says at the end whom it took for lost."""
    averager = open_averager(
        LAYOUT,
        [torch.zeros(3)],
        2,
        FullPrecision(),
        deadline_s=DEADLINE_S,
        tolerance=Tolerance(5),
    )
    with averager:
        told.send(averager.address)
        drive(averager)
        told.send(averager.losses)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_driver_whose_process_was_stopped_takes_nobody_for_lost() -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()
    with ExitStack() as stack:
        stack.callback(ours.close)
        stack.callback(process.join, WAIT_S)
        stack.callback(process.kill)
        assert ours.poll(WAIT_S)
        address = ours.recv()
        clients = [
            stack.enter_context(
                AveragerClient(address, rank, FullPrecision(), deadline_s=SILENCE_S)
            )
            for rank in range(2)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        shard, state = ShardStatistics(2, ()), [torch.zeros(3)]
        for started in [pool.submit(each.start, shard, state, LAYOUT) for each in clients]:
            started.result(WAIT_S)
        early = pool.submit(clients[0].exchange, [torch.ones(3)], window(0, last=True))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5 * DEADLINE_S)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(2.0)  # longer than the driver takes to look at its clock
        clients[1].exchange([torch.ones(3)], window(1, last=True))
        early.result(WAIT_S)
        for client in clients:
            client.finish()
        assert ours.poll(WAIT_S)
        assert ours.recv() == []
