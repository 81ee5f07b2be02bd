"""What is kept of workers and of the run: of whom, when, and what is believed of it."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import WAIT_S, crew, eventually, window
from every_row import every

from sparkdl.averager.messages.progress import Progress
from sparkdl.averager.service.saving import CheckpointPlan, ResumedCheckpoint
from sparkdl.averager.values import packing
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.checkpoint.tensor_file import pieces_of
from sparkdl.errors import CheckpointError
from sparkdl.events import EpochSummary, WindowSums
from sparkdl.protocols import Segment
from sparkdl.transport.framing import values_prefix


@every("blocks", range(4))
def test_a_state_that_ends_early_is_not_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.setattr(packing, "MAX_CHUNK_BYTES", 16)
    state = bytes(range(40))
    store = CheckpointStore(str(tmp_path), keep_last=9)
    plan = CheckpointPlan(store=store, every_epochs=1, every_rounds=1, last_epoch=1, config={})
    with crew(2, plan=plan, options={"worker_state": lambda: state}) as workers:
        connection = workers.client(1)._own_connection

        def send_only_some(octets: bytes, block_bytes: int) -> None:
            whole = torch.frombuffer(bytearray(octets), dtype=torch.uint8).split(block_bytes)
            for block in whole[:blocks]:
                connection.send_values(block)
            if blocks < 3:  # and half of one
                cut = whole[blocks].numpy().tobytes()
                connection._send(bytes(values_prefix(len(cut))) + cut[: len(cut) // 2])
                workers.client(1).__exit__(None, None, None)
                raise ConnectionError

        monkeypatch.setattr(connection, "send_octets", send_only_some)
        rounds = [workers.exchange(window(rank)) for rank in (0, 1)]
        rounds[0].result(WAIT_S)
        assert (rounds[1].exception(WAIT_S) is None) is (blocks == 3)
        assert eventually(lambda: any(tmp_path.glob("checkpoint-*")))
        saved = store.newest()
        assert saved is not None
        states = [name for name in saved.contents if name.startswith("rank-")]
        assert states == ["rank-00000", "rank-00001"][: 2 if blocks == 3 else 1]


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


@every("blocks", [0, 1, 3])
def test_who_is_lost_as_it_reads_leaves_all_for_the_next_attempt(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MAX_CHUNK_BYTES", 64 << 10)
    octets = random.Random(0).randbytes((3 * 64 << 10) + 5)
    with crew(2, options={"restart_state": lambda: octets}) as workers:
        for one in [workers.exchange(window(rank)) for rank in (0, 1)]:
            one.result(WAIT_S)
        before = workers.averager.snapshot().restart
    with crew(2, progress=before.progress, kept=before.kept) as workers:
        connection = workers.client(1)._own_connection

        def receive_only_some(size: int, block_bytes: int) -> bytes:
            for _ in range(blocks):
                connection.receive_values(torch.empty(block_bytes, dtype=torch.uint8))
            raise ConnectionError

        monkeypatch.setattr(connection, "receive_octets", receive_only_some)
        lost = workers.call(workers.client(1).resume, [torch.zeros(3)])
        assert isinstance(lost.exception(WAIT_S), ConnectionError)
        workers.lose(1)
        workers.join(1, attempt=1).result(WAIT_S)
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


SUMS = WindowSums(rank=0, examples=2, loss_sum=0.5)
SUMMARY = EpochSummary(epoch=1, loss=0.5, examples=2, rounds=1, seconds=1.0)


@every(
    "progress",
    [
        {},
        {"epoch": "x"},
        {"epoch": 1, "positions": 7},
        {"positions": [{"epoch": []}]},
        {"positions": [[]]},
        {"sums": [{}]},
        {"sums": [{**asdict(SUMS), "rank": 1}]},
        {"epoch": -1},
        {"epoch": 1 << 63},
        {"rounds": 1.5},
        {"positions": [{"epoch": None}]},
        {"positions": [{"step": 2.0}]},
        {"sums": [{**asdict(SUMS), "last": 1}]},
        {"history": [{**asdict(SUMMARY), "loss": None}]},
    ],
)
def test_a_checkpoint_that_says_nothing_of_its_progress_is_refused_in_words(
    tmp_path: Path, progress: dict[str, Any]
) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    whole = Progress.start(1).as_json()
    said = progress and {**whole, **progress}
    store.write({}, {"config": {}, "data": None, "progress": said})
    saved = store.newest()
    assert saved is not None
    with pytest.raises(CheckpointError, match="does not say how far"):
        ResumedCheckpoint.of(saved)


def test_a_center_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    contents = pieces_of({"center.no number": torch.ones(3)})
    store.write(contents, {"config": {}, "data": None, "progress": Progress.start(1).as_json()})
    saved = store.newest()
    assert saved is not None
    with pytest.raises(CheckpointError, match="belongs to a different model"):
        ResumedCheckpoint.of(saved).read_center((Segment("parameters", torch.float32, 3),))


@every(("name", "epoch"), [("0", "two"), ("0", 10**4000), ("0", -1), ("1", 2), ("0", 2.5)])
def test_a_kept_model_of_another_training_is_refused_in_words(
    tmp_path: Path, name: str, epoch: Any
) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    description = {"config": {}, "data": None, "progress": Progress.start(1).as_json()}
    description["kept_model_epoch"] = epoch
    store.write(pieces_of({f"kept-model.{name}": torch.ones(3)}), description)
    saved = store.newest()
    assert saved is not None
    with pytest.raises(CheckpointError, match=r"a different model|keeps a model of epoch"):
        ResumedCheckpoint.of(saved).read_kept_model((Segment("parameters", torch.float32, 3),))
