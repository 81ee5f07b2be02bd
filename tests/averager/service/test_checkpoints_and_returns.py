"""Contributions, checkpoints and returns over connections."""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from by_keyword import open_averager
from crew import LAYOUT, WAIT_S, crew, eventually, window
from every_row import every, every_row
from toys import drive

from sparkdl.averager import AveragerClient, headers
from sparkdl.averager.client import _Again
from sparkdl.averager.headers import shard_header, window_header
from sparkdl.averager.run_events import Progress
from sparkdl.averager.service.saving import CheckpointPlan, ResumedCheckpoint
from sparkdl.averager.values import replica_codec, wire_format
from sparkdl.averager.values.wire_format import BFLOAT16_CHANGES, FULL_PRECISION, WireFormat
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.checkpoint.tensor_file import pieces_of
from sparkdl.errors import CheckpointError, DataError, NonFiniteError
from sparkdl.events import EpochSummary, WindowReport, WindowSums
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.shards import ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.transport.framing import octets_of, values_prefix


def test_a_contribution_weighs_what_it_stands_for_and_rows_count_where_they_were() -> None:
    stand_for: list[dict[str, int]] = [{"group_weight": 6, "examples": 1}, {"group_weight": 0}, {}]
    with crew(3) as workers:
        rounds = [
            workers.exchange(window(rank, last=True, **fields), rank + 1.0)
            for rank, fields in enumerate(stand_for)
        ]
        # (6 * 1 + 2 * 3) / 8
        assert [one.result(WAIT_S) for one in rounds] == [[1.5] * 3] * 3
        for rank in range(3):
            workers.client(rank).finish()
        events = workers.outcome.result(WAIT_S)
    assert [each.examples for each in events if isinstance(each, WindowReport)] == [1, 2, 2]
    (summary,) = (each for each in events if isinstance(each, EpochSummary))
    assert (summary.examples, summary.loss) == (5, 0.6)


@every("wire_format", [FULL_PRECISION, BFLOAT16_CHANGES])
def test_rounds_without_any_weight_change_nothing(wire_format: WireFormat) -> None:
    def exchanged(step: int, value: float, **fields: object) -> list[list[float]]:
        rounds = [
            workers.exchange(window(rank, step, **fields), value)  # type: ignore[arg-type]
            for rank in range(2)
        ]
        return [reply.result(WAIT_S) for reply in rounds]

    with crew(2, wire_format=wire_format, center=1.0) as workers:
        assert exchanged(1, 7.0, examples=0) == [[1.0] * 3] * 2
        assert exchanged(2, 3.0) == [[3.0] * 3] * 2
        assert exchanged(3, 7.0, examples=0) == [[3.0] * 3] * 2
        assert exchanged(4, 7.0, group_weight=0) == [[3.0] * 3] * 2
        assert exchanged(5, 4.0, last=True) == [[4.0] * 3] * 2


@every("bad", [math.nan, -math.inf])
@every("rank", [0, 1])
@every("wire_format", [FULL_PRECISION, BFLOAT16_CHANGES])
def test_what_is_not_finite_never_reaches_the_center_and_is_said_whose_it_is(
    wire_format: WireFormat, rank: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker looks at what it sends; one that does not know how to still has the token."""
    monkeypatch.setattr(replica_codec, "require_finite", lambda values, report: None)
    with crew(2, wire_format=wire_format, center=1.0) as workers:
        workers.exchange(window(rank, 4), bad)
        workers.exchange(window(1 - rank, 4), 2.0)
        error = workers.outcome.exception(WAIT_S)
        assert isinstance(error, NonFiniteError)
        assert (error.rank, error.epoch, error.step) == (rank, 1, 4)
        assert f"rank {rank} has 3 NaN or infinite values" in str(error)
        assert workers.averager.center.values[0].tolist() == [1.0] * 3


def test_what_is_on_its_way_into_a_sum_that_is_forgotten_goes_nowhere() -> None:
    with crew(2, max_failures=5) as workers:
        for segment in workers.averager.center._spare:
            segment.fill_(float("nan"))  # what lies there is nobody's contribution
        octets = bytes(octets_of(torch.full((3,), 7.0)))
        for rank in (0, 1):
            connection = workers.client(rank)._own_connection
            connection.send_header(window_header(window(rank)))
            connection._send(bytes(values_prefix(len(octets))) + octets[:5])
        entered = workers.averager.coordinator.round.entered
        assert eventually(lambda: len(entered) == 2)
        workers.client(1)._own_connection.close()
        first = workers.client(0)._own_connection
        with pytest.raises(_Again):
            first.receive_header()
        first._send(octets[5:])
        assert workers.exchange(window(0), 7.0).result(WAIT_S) == [7.0] * 3


@every("blocks", range(4))
def test_a_state_that_ends_early_is_not_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.setattr(wire_format, "MAX_CHUNK_BYTES", 16)
    state = bytes(range(40))
    store = CheckpointStore(str(tmp_path), keep_last=9)
    policy = CheckpointPolicy(path="", every_rounds=1)
    plan = CheckpointPlan(store=store, policy=policy, last_epoch=1, config={})
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
    monkeypatch.setattr(wire_format, "MAX_CHUNK_BYTES", chunk)
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
    monkeypatch.setattr(wire_format, "MAX_CHUNK_BYTES", 64 << 10)
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


def resumed_from(path: Path, contents: dict[str, Any], **said: Any) -> ResumedCheckpoint:
    """A checkpoint as it was read, which has the contents, and says that or what is usual."""
    store = CheckpointStore(str(path), keep_last=1)
    usual = {"config": {}, "data": None, "progress": Progress.start(1).as_json()}
    store.write(pieces_of(contents), {**usual, **said})
    saved = store.newest()
    assert saved is not None
    return ResumedCheckpoint.of(saved)


@every_row(
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
)
def test_a_checkpoint_that_says_nothing_of_its_progress_is_refused_in_words(
    tmp_path: Path, progress: dict[str, Any]
) -> None:
    said = progress and {**Progress.start(1).as_json(), **progress}
    with pytest.raises(CheckpointError, match="does not say how far"):
        resumed_from(tmp_path, {}, progress=said)


def test_a_center_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    resumed = resumed_from(tmp_path, {"center.no number": torch.ones(3)})
    with pytest.raises(CheckpointError, match="belongs to a different model"):
        resumed.read_center((Segment("parameters", torch.float32, 3),))


@every_row(("0", "two"), ("0", 10**4000), ("0", -1), ("1", 2), ("0", 2.5))
def test_a_kept_model_of_another_training_is_refused_in_words(
    tmp_path: Path, name: str, epoch: Any
) -> None:
    contents = {f"kept-model.{name}": torch.ones(3)}
    resumed = resumed_from(tmp_path, contents, kept_model_epoch=epoch)
    with pytest.raises(CheckpointError, match=r"a different model|keeps a model of epoch"):
        resumed.read_kept_model((Segment("parameters", torch.float32, 3),))


WORKERS, COLUMNS = 8, 50


def test_the_statistics_about_columns_are_added_up_once_however_many_workers_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added, add = [0], ColumnStatistics.__add__

    def counted(one: ColumnStatistics, other: ColumnStatistics) -> ColumnStatistics:
        added[0] += 1
        return add(one, other)

    monkeypatch.setattr(ColumnStatistics, "__add__", counted)
    shard = ShardStatistics(2, (ColumnStatistics(),) * COLUMNS)
    with (
        ExitStack() as stack,
        ThreadPoolExecutor(WORKERS + 1) as pool,
        open_averager(LAYOUT, [torch.zeros(3)], WORKERS, FULL_PRECISION, deadline_s=10) as averager,
    ):
        pool.submit(drive, averager)
        clients = [
            stack.enter_context(AveragerClient(averager.address, rank, FULL_PRECISION))
            for rank in range(WORKERS)
        ]
        starts = [pool.submit(one.start, shard, [torch.zeros(3)], LAYOUT) for one in clients]
        for start in starts:
            start.result(WAIT_S)
        assert clients[-1].shard_rows == [2] * WORKERS
    assert added[0] <= 2 * WORKERS * COLUMNS


def test_more_columns_than_a_header_holds_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By who has read them, before the driver is told of them."""
    shard = ShardStatistics(2, (ColumnStatistics(smallest=-1.5, largest=2.5),) * 2000)
    size = len(json.dumps(shard_header(shard)))
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", size)
    shard_header(shard)
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", size - 1)
    with pytest.raises(DataError, match=rf"2000 columns take {size} bytes.*for about 1999\. Put"):
        shard_header(shard)


def test_more_than_all_may_tell_each_other_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is sent what all have told; so a part of one header is all that each may tell."""
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", 1000)
    with crew(2) as workers:
        fits = [workers.call(workers.client(rank).gather, {"a": "x" * 481}) for rank in range(2)]
        assert [len(one.result(WAIT_S)) for one in fits] == [2, 2]
        workers.call(workers.client(0).gather, {"a": "x" * 482})
        error = workers.outcome.exception(WAIT_S)
    assert "rank 0 would share 491 bytes with all 2 workers, but each may share 490" in str(error)
