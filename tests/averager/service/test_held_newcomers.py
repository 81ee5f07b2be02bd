"""Who comes back too far ahead is held before its first contribution, for as long as that takes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from by_keyword import open_averager
from crew import WAIT_S, crew, sent_values, window
from toys import drive

from sparkdl.averager import AveragerClient
from sparkdl.averager.coordination import decisions as do
from sparkdl.averager.coordination import events as on
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.messages.progress import Position, Progress
from sparkdl.averager.values.wire_format import Changes
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.strategies import SSP

AHEAD = 11
PROGRESS = replace(
    Progress.start(2), positions=(Position(step=AHEAD, step_of_epoch=AHEAD), Position())
)


def test_it_sends_nothing_and_is_not_lost_though_others_take_longer_than_twice_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values that nobody reads would fill the connection, and their sender's deadline pass."""
    sent = sent_values(monkeypatch)
    settings = {"policy": SSP(0).policy(1), "progress": PROGRESS, "wire_format": Changes()}
    with crew(2, deadline_s=60.0, max_failures=1, **settings) as workers:
        ahead = workers.exchange(window(0, AHEAD + 1))
        workers.wait_for(on.WindowClosed, 0)
        for step in range(1, AHEAD + 1):
            workers.wait(25.0)
            assert not ahead.done()
            assert len(sent) == step - 1  # by the other
            workers.exchange(window(1, step)).result(WAIT_S)
        told = [each for each in workers.heard.decisions if isinstance(each, do.SayWaiting)]
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
LAYOUT = (Segment("parameters", torch.float32, VALUES),)
DEADLINE_S = 20.0
WINDOW_S = 8.0


@pytest.mark.slow
@pytest.mark.nightly
def test_it_is_not_lost_though_its_values_would_not_fit_into_the_connection() -> None:
    # Of a send that has begun the kernel waits once for room, and once more for what is left.
    assert AHEAD * WINDOW_S > 2 * 2 * DEADLINE_S
    with ExitStack() as stack:
        averager = open_averager(
            LAYOUT,
            [torch.zeros(VALUES)],
            2,
            Changes(),
            deadline_s=DEADLINE_S,
            tolerance=Tolerance(1),
            policy=SSP(0).policy(1),
            progress=PROGRESS,
        )
        stack.enter_context(averager)
        clients = [
            stack.enter_context(
                AveragerClient(averager.address, rank, Changes(), deadline_s=DEADLINE_S)
            )
            for rank in range(2)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(3))
        outcome = pool.submit(drive, averager)
        states = [torch.zeros(VALUES), torch.zeros(VALUES)]
        for started in [
            pool.submit(client.start, ShardStatistics(2, ()), [state], LAYOUT)
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
