"""A checkpoint is of those who took part in its commit, not of who comes back meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import LAYOUT, WAIT_S, Crew, crew, eventually, window
from every_row import every
from forked import FORKED

from sparkdl.averager import AveragerClient
from sparkdl.averager.client.worker_channel import blocks as blocks_of
from sparkdl.averager.coordination import events as on
from sparkdl.averager.service.saving import CheckpointPlan, worker_state_file
from sparkdl.averager.values import packing
from sparkdl.averager.values.wire_format import FullPrecision
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.transport.connecting import ServiceAddress
from sparkdl.transport.framing import values_prefix


def plan(path: Path, every_rounds: int) -> CheckpointPlan:
    store = CheckpointStore(str(path), keep_last=9)
    return CheckpointPlan(
        store=store, every_epochs=1, every_rounds=every_rounds, last_epoch=1, config={}
    )


def exchanged(workers: Crew, ranks: Sequence[int], step: int, **fields: Any) -> None:
    rounds = [workers.exchange(window(rank, step, **fields)) for rank in ranks]
    for one in rounds:
        one.result(WAIT_S)


def saved_ranks(path: Path) -> dict[tuple[int, ...], list[int]]:
    """By the steps that the ranks had taken: whose worker states are in each checkpoint."""
    found = {}
    store = CheckpointStore(str(path), keep_last=9)
    while (saved := store.newest()) is not None:
        steps = tuple(position["step"] for position in saved.description["progress"]["positions"])
        found[steps] = [rank for rank in range(3) if saved.has(worker_state_file(rank))]
        (Path(saved.directory) / "manifest.json").unlink()
    return found


@every("blocks", range(4))
def test_a_state_that_ends_early_is_not_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.setattr(packing, "MAX_CHUNK_BYTES", 16)
    state = bytes(range(40))
    options = {"worker_state": lambda: state}
    with crew(2, plan=plan(tmp_path, 1), options=options) as workers:
        channel = workers.client(1)._own_channel

        def send_only_some(octets: bytes, block_bytes: int) -> None:
            for block in blocks_of(octets, block_bytes)[:blocks]:
                channel.send_values(block)
            if blocks < 3:
                workers.client(1).__exit__(None, None, None)
                raise ConnectionError

        monkeypatch.setattr(channel, "send_octets", send_only_some)
        rounds = [workers.exchange(window(rank)) for rank in (0, 1)]
        rounds[0].result(WAIT_S)
        assert (rounds[1].exception(WAIT_S) is None) is (blocks == 3)
        assert eventually(lambda: any(tmp_path.glob("*/manifest.json")))
        assert saved_ranks(tmp_path) == {(1, 1): [0, 1] if blocks == 3 else [0]}


def is_killed_within_its_state(address: ServiceAddress, blocks: int) -> None:
    """The process of rank 1, which comes back, and ends after so many blocks and half of one."""
    state = [torch.zeros(3)]
    client = AveragerClient(
        address, 1, FullPrecision(), attempt=1, worker_state=lambda: bytes(range(40))
    )
    channel = client._own_channel

    def send_only_some(octets: bytes, block_bytes: int) -> None:
        whole = blocks_of(octets, block_bytes)
        for block in whole[:blocks]:
            channel.send_values(block)
        cut = whole[blocks].numpy().tobytes()
        channel._connection._send(bytes(values_prefix(len(cut))) + cut[: len(cut) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    channel.send_octets = send_only_some  # type: ignore[method-assign]
    client.start(ShardStatistics(2, ()), state, LAYOUT)
    client.exchange(state, window(1))


@every("blocks", range(3))
def test_a_process_that_is_killed_within_its_state_leaves_none_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.setattr(packing, "MAX_CHUNK_BYTES", 16)
    with crew(2, plan=plan(tmp_path, 1)) as workers:
        workers.lose(1)
        arguments = workers.averager.address, blocks
        process = FORKED.Process(target=is_killed_within_its_state, args=arguments)
        process.start()
        workers.wait_for(on.RowsFound, 1, 2)
        exchanged(workers, [0], 1)
        process.join(WAIT_S)
        assert process.exitcode == -signal.SIGKILL
        assert eventually(lambda: any(tmp_path.glob("*/manifest.json")))
        assert saved_ranks(tmp_path) == {(1, 1): [0]}


@every("every_rounds", [1, 2])
def test_who_is_let_in_behind_a_commit_is_not_asked_for_its_state(
    tmp_path: Path, every_rounds: int
) -> None:
    """Its next round may be due for a checkpoint too, which would wait for the one before."""
    with crew(3, plan=plan(tmp_path, every_rounds)) as workers:
        for step in range(1, every_rounds):
            exchanged(workers, [0, 1, 2], step)
        workers.lose(1)
        first = workers.exchange(window(0, every_rounds))
        workers.wait_for(on.Contributed, 0, every_rounds)
        back = workers.join(1, attempt=1)
        # It knocks in the middle of the round, and is let in at its end.
        workers.wait_for(on.RowsFound, 1, 2)
        exchanged(workers, [2], every_rounds)
        first.result(WAIT_S)
        position = back.result(WAIT_S)
        assert position.step == every_rounds - 1
        for step in range(every_rounds + 1, 2 * every_rounds + 1):
            exchanged(workers, [0, 1, 2], step)
        exchanged(workers, [0, 1, 2], 2 * every_rounds + 1, last=True)
        for rank in range(3):
            workers.client(rank).finish()
        workers.outcome.result(WAIT_S)
    states = saved_ranks(tmp_path)
    assert states[every_rounds, every_rounds - 1, every_rounds] == [0, 2]
    assert [0, 1, 2] in states.values()


def test_who_was_lost_behind_its_contribution_and_came_back_is_not_asked(tmp_path: Path) -> None:
    """Its contribution counts, but what its process knew at that commit is lost."""
    with crew(3, plan=plan(tmp_path, 1)) as workers:
        first = workers.exchange(window(0))
        lost = workers.exchange(window(1))
        workers.wait_for(on.Contributed, 0)
        workers.wait_for(on.Contributed, 1)
        back = workers.join(1, attempt=1)
        assert lost.exception(WAIT_S) is not None
        workers.wait_for(on.RowsFound, 1, 2)
        exchanged(workers, [2], 1)
        first.result(WAIT_S)
        assert back.result(WAIT_S).step == 1
        exchanged(workers, [0, 1, 2], 2, last=True)
        for rank in range(3):
            workers.client(rank).finish()
        workers.outcome.result(WAIT_S)
    assert eventually(lambda: len(list(tmp_path.iterdir())) == 2)
    assert saved_ranks(tmp_path) == {(1, 1, 1): [0, 2], (2, 2, 2): [0, 1, 2]}
