"""Who comes back too far ahead is held before its first contribution, for as long as that takes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from crew import WAIT_S, window
from toys import drive

from sparkdl.averager import Averager, AveragerClient
from sparkdl.averager.coordination.membership import Tolerance
from sparkdl.averager.messages.progress import Position, Progress
from sparkdl.averager.values.wire_format import Changes
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.strategies import SSP

VALUES = 4 << 20
"""Of a contribution, more than connections take that nobody reads."""
LAYOUT = (Segment("parameters", torch.float32, VALUES),)
DEADLINE_S = 0.8
AHEAD = 11
WINDOW_S = 0.4


@pytest.mark.slow
def test_it_is_not_lost_though_others_take_longer_than_twice_the_deadline() -> None:
    # Of a send that has begun the kernel waits once for room, and once more for what is left.
    assert AHEAD * WINDOW_S > 2 * 2 * DEADLINE_S
    positions = (Position(step=AHEAD, step_of_epoch=AHEAD), Position())
    with ExitStack() as stack:
        averager = Averager(
            LAYOUT,
            [torch.zeros(VALUES)],
            2,
            Changes(),
            deadline_s=DEADLINE_S,
            tolerance=Tolerance(1),
            policy=SSP(0).policy(1),
            progress=replace(Progress.start(2), positions=positions),
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
        assert torch.equal(states[0], torch.full_like(states[0], 1.0))
