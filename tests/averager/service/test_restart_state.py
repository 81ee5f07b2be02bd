"""What is kept of a worker comes back to it, however much, when all start again."""

from __future__ import annotations

import os
import random
import signal

import pytest
import torch
from crew import LAYOUT, WAIT_S, crew, window
from every_row import every
from forked import FORKED

from sparkdl.averager import AveragerClient
from sparkdl.averager.values import packing
from sparkdl.averager.values.wire_format import FullPrecision
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.transport.connecting import ServiceAddress


@every("size", [1, 64 << 10, (64 << 10) + 1, (3 << 20) + 5])
@every("chunk", [1 << 20, 64 << 10])
def test_it_is_the_same_bytes_in_the_next_attempt(
    size: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MAX_CHUNK_BYTES", chunk)
    octets = random.Random(size).randbytes(size)
    with crew(1, options={"restart_state": lambda: octets}) as workers:
        workers.exchange(window(0)).result(WAIT_S)
        before = workers.averager.snapshot().restart
    with crew(1, progress=before.progress, kept=before.kept) as workers:
        client = workers.client(0)
        assert client.resumes
        assert workers.call(client.resume, [torch.zeros(3)]).result(WAIT_S) == octets


def is_killed_as_it_reads(address: ServiceAddress, blocks: int) -> None:
    """The process of rank 1, which comes back, and ends after so many blocks of what was kept."""
    state = [torch.zeros(3)]
    client = AveragerClient(address, 1, FullPrecision(), attempt=1)
    channel = client._own_channel

    def receive_only_some(size: int, block_bytes: int) -> bytes:
        for _ in range(blocks):
            channel.receive_values(torch.empty(block_bytes, dtype=torch.uint8))
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    channel.receive_octets = receive_only_some  # type: ignore[method-assign]
    client.start(ShardStatistics(2, ()), state, LAYOUT)
    client.resume(state)


@every("blocks", [0, 1, 3])
def test_a_process_that_is_killed_as_it_reads_leaves_all_for_the_next(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MAX_CHUNK_BYTES", 64 << 10)
    octets = random.Random(0).randbytes((3 * 64 << 10) + 5)
    with crew(2, options={"restart_state": lambda: octets}) as workers:
        for one in [workers.exchange(window(rank)) for rank in (0, 1)]:
            one.result(WAIT_S)
        before = workers.averager.snapshot().restart
    with crew(2, progress=before.progress, kept=before.kept) as workers:
        workers.lose(1)
        arguments = workers.averager.address, blocks
        process = FORKED.Process(target=is_killed_as_it_reads, args=arguments)
        process.start()
        process.join(WAIT_S)
        assert process.exitcode == -signal.SIGKILL
        workers.join(1, attempt=2).result(WAIT_S)
        resume = workers.call(workers.client(1).resume, [torch.zeros(3)])
        assert resume.result(WAIT_S) == octets


def test_only_the_last_commits_is_kept() -> None:
    given = [b"first", bytes(2 << 20), b"third"]
    with crew(1, options={"restart_state": iter(given).__next__}) as workers:
        for step in (1, 2, 3):
            workers.exchange(window(0, step)).result(WAIT_S)
        before = workers.averager.snapshot().restart
    with crew(1, progress=before.progress, kept=before.kept) as workers:
        resume = workers.call(workers.client(0).resume, [torch.zeros(3)])
        assert resume.result(WAIT_S) == b"third"
