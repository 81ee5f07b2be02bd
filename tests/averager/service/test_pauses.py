"""Nobody is judged by a pause of the driver, nor who is held before its first contribution.

A driver stands still for garbage collection, swap, or on a laptop that is asleep.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest
import torch
from by_keyword import open_averager
from crew import LAYOUT, SILENCE_S, WAIT_S, Crew, crew, sent_values, window
from decided import do
from every_row import every
from toys import drive

from sparkdl.averager import AveragerClient
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.messages.progress import Position, Progress
from sparkdl.averager.service.saving import CheckpointPlan
from sparkdl.averager.values.wire_format import CHANGES, FULL_PRECISION
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.strategies import SSP


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
        FULL_PRECISION,
        deadline_s=DEADLINE_S,
        tolerance=Tolerance(5),
    )
    with averager:
        told.send(averager.address)
        drive(averager)
        told.send(averager.losses)


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
            stack.enter_context(AveragerClient(address, rank, FULL_PRECISION, deadline_s=SILENCE_S))
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


VALUES = 4 << 20
"""Of a contribution, more than connections take that nobody reads."""
LARGE = (Segment("parameters", torch.float32, VALUES),)
WINDOW_S = 8.0


@pytest.mark.nightly
def test_who_is_held_is_not_lost_though_its_values_would_not_fit_into_the_connection() -> None:
    # Of a send that has begun the kernel waits once for room, and once more for what is left.
    assert AHEAD * WINDOW_S > 2 * 2 * DEADLINE_S
    with ExitStack() as stack:
        averager = open_averager(
            LARGE,
            [torch.zeros(VALUES)],
            2,
            CHANGES,
            deadline_s=DEADLINE_S,
            tolerance=Tolerance(1),
            policy=SSP(0).policy(1),
            progress=PROGRESS,
        )
        stack.enter_context(averager)
        clients = [
            stack.enter_context(
                AveragerClient(averager.address, rank, CHANGES, deadline_s=DEADLINE_S)
            )
            for rank in range(2)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(3))
        outcome = pool.submit(drive, averager)
        states = [torch.zeros(VALUES), torch.zeros(VALUES)]
        for started in [
            pool.submit(client.start, ShardStatistics(2, ()), [state], LARGE)
            for client, state in zip(clients, states, strict=True)
        ]:
            started.result(WAIT_S)
        states[0] += 1
        first = window(0, AHEAD + 1)
        ahead = pool.submit(clients[0].exchange, [states[0]], first)
        for step in range(1, AHEAD + 1):
            time.sleep(WINDOW_S)
            assert not ahead.done()
            clients[1].exchange([states[1]], window(1, step))
        through = pool.submit(clients[1].exchange, [states[1]], window(1, AHEAD + 1, last=True))
        ahead.result(WAIT_S)
        last = window(0, AHEAD + 2, last=True)
        clients[0].exchange([states[0]], last)
        through.result(WAIT_S)
        for client in clients:
            client.finish()
        outcome.result(WAIT_S)
        assert averager.losses == []
        # Its change of 1 had half of the rows of a round of both.
        assert torch.equal(states[0], torch.full_like(states[0], 0.5))
