"""What is kept of a worker comes back to it, however much, when all start again."""

from __future__ import annotations

import random

import pytest
import torch
from crew import WAIT_S, crew, window
from every_row import every

from sparkdl.averager.values import packing


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


def test_only_the_last_commits_is_kept() -> None:
    given = [b"first", bytes(2 << 20), b"third"]
    with crew(1, options={"restart_state": iter(given).__next__}) as workers:
        for step in (1, 2, 3):
            workers.exchange(window(0, step)).result(WAIT_S)
        before = workers.averager.snapshot().restart
    with crew(1, progress=before.progress, kept=before.kept) as workers:
        resume = workers.call(workers.client(0).resume, [torch.zeros(3)])
        assert resume.result(WAIT_S) == b"third"
