"""A driver that stood still (garbage collection, swap, a laptop asleep) judges nobody by that."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from crew import LAYOUT, WAIT_S, crew, window
from toys import drive

from sparkdl.averager import Averager, AveragerClient
from sparkdl.averager.coordination import membership
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.service.saving import CheckpointPlan
from sparkdl.averager.values.wire_format import FullPrecision
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import SparkDLError
from sparkdl.feed.statistics.shards import ShardStatistics

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["sparkdl.testing"])
DEADLINE_S = 1.2
PAUSE_S = 1.7


def serve(told: Pipe, max_failures: int) -> None:
    """A driver of two workers; says at the end whom it took for lost, or why the run failed."""
    averager = Averager(
        LAYOUT,
        [torch.zeros(3)],
        2,
        FullPrecision(),
        deadline_s=DEADLINE_S,
        tolerance=Tolerance(max_failures),
    )
    with averager:
        told.send(averager.address)
        try:
            drive(averager)
            told.send(averager.losses)
        except SparkDLError as error:
            told.send(str(error))


@contextmanager
def driver(max_failures: int) -> Iterator[tuple[BaseProcess, Pipe, list[AveragerClient]]]:
    """A driver in a process of its own, and two workers here that have exchanged once."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=serve, args=(theirs, max_failures))
    process.start()
    theirs.close()
    try:
        with ExitStack() as stack:
            assert ours.poll(WAIT_S)
            address = ours.recv()
            clients = [
                stack.enter_context(AveragerClient(address, rank, FullPrecision()))
                for rank in range(2)
            ]
            pool = stack.enter_context(ThreadPoolExecutor(2))
            starts = [
                pool.submit(client.start, ShardStatistics(2, ()), [torch.zeros(3)], LAYOUT)
                for client in clients
            ]
            for start in starts:
                start.result(WAIT_S)
            exchange(clients, step=1)
            yield process, ours, clients
    finally:
        process.kill()
        process.join(WAIT_S)
        ours.close()


def exchange(clients: list[AveragerClient], step: int, last: bool = False) -> None:
    with ThreadPoolExecutor(2) as pool:
        for done in [
            pool.submit(client.exchange, [torch.ones(3)], window(rank, step, last=last))
            for rank, client in enumerate(clients)
        ]:
            done.result(WAIT_S)


def pause(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    os.kill(process.pid, signal.SIGCONT)


def said(pipe: Pipe) -> object:
    assert pipe.poll(WAIT_S)
    return pipe.recv()


@pytest.mark.slow_variants
@pytest.mark.parametrize("max_failures", [0, 5])
def test_workers_survive_a_pause_of_the_driver(max_failures: int) -> None:
    with driver(max_failures) as (process, pipe, clients), ThreadPoolExecutor(1) as pool:
        early = pool.submit(clients[0].exchange, [torch.ones(3)], window(0, 2))
        pause(process)
        time.sleep(0.2)  # longer than the driver takes to look at its clock
        clients[1].exchange([torch.ones(3)], window(1, 2))
        early.result(WAIT_S)
        exchange(clients, step=3, last=True)
        for client in clients:
            client.finish()
        assert said(pipe) == []


def test_who_stays_silent_after_a_pause_is_still_found_out() -> None:
    with driver(0) as (process, pipe, clients), ThreadPoolExecutor(1) as pool:
        early = pool.submit(clients[0].exchange, [torch.ones(3)], window(0, 2))
        pause(process)
        assert "did not contribute to round 2 (epoch 1) within 1.2 s" in str(said(pipe))
        assert isinstance(early.exception(WAIT_S), SparkDLError)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which the clock is ahead, to be set."""
    monotonic, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead[0])
    return ahead


def test_a_pause_is_no_long_window_by_which_patience_is_measured(
    passed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "STRAGGLER_S", 0.5)
    with crew(2, deadline_s=60.0) as workers:
        first = [workers.exchange(window(rank)) for rank in range(2)]
        assert [reply.result(WAIT_S) for reply in first] == [[1.0] * 3] * 2
        passed[0] = 40.0
        later = [workers.exchange(window(rank, 2)) for rank in range(2)]
        assert [reply.result(WAIT_S) for reply in later] == [[1.0] * 3] * 2
        workers.exchange(window(0, 3)).result(WAIT_S)
        assert workers.averager.dropped == [1]


def test_a_pause_is_not_the_storages_fault(passed: list[float], tmp_path: Path) -> None:
    def worker_state() -> bytes:
        passed[0] = 100.0
        time.sleep(0.8)  # longer than the driver takes to look at its clock
        return b"state"

    store = CheckpointStore(str(tmp_path), keep_last=1)
    plan = CheckpointPlan(store=store, every_epochs=1, every_rounds=None, last_epoch=1, config={})
    with crew(1, deadline_s=2.0, plan=plan, options={"worker_state": worker_state}) as workers:
        workers.exchange(window(0, last=True)).result(WAIT_S)
        workers.client(0).finish()
        workers.outcome.result(WAIT_S)
    assert store.newest() is not None
