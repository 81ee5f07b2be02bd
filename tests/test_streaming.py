"""A first epoch that trains on rows as they arrive: none is left out, or not looked at."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from by_keyword import run
from every_row import every
from interruptions import die_after, policy, same_bits, save_and_stop
from misbehaving import Misbehaves, kill, run_with_breaks
from support.replay import recorded_commits, relative_difference, replay
from torch import Tensor, nn
from toys import Data, classification, make_job, mlp, schema
from virtual_time import VirtualClock, coordinator_of
from waiting import eventually

from sparkdl.averager import Averager
from sparkdl.averager.coordination.membership import STRAGGLER_S
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import ConfigError, DataError, WorkerError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed import order
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world
from sparkdl.testing.world import _threads
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("nobody_stays")

SIZES = [70, 43, 21]
BLOCK = 8
"""Rows; with record batches of 7, all but a small part arrives after the first step."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "BLOCK_BYTES", BLOCK * (6 + 1) * 8)


def streamed(model: Any = None, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "strategy": ParameterAveraging(period=2),
        "feed": FeedOptions(stream_first_epoch=True),
        "epochs": 3,
    }
    return make_job(mlp() if model is None else model, **{**settings, **changes})


def with_values(data: Data, rank: int, column: str, values: dict[int, float]) -> list[Any]:
    """The shards of ``data``, some values of one rank replaced."""
    features, targets = data.features.copy(), data.targets.copy()
    for row, value in values.items():
        where = sum(data.sizes[:rank]) + row
        (features if column == "features" else targets)[where] = value
    return Data(features, targets, data.sizes).shards()


def test_workers_train_and_average_before_their_last_rows_are_there() -> None:
    """Each source gives its later rows only when windows were committed that need the first."""
    committed = threading.Event()

    def patient(shard: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for index, batch in enumerate(shard):
            if index == 4:
                assert committed.wait(60), "no window was committed"
            yield batch

    def note(event: object) -> None:
        if isinstance(event, WindowReport):
            committed.set()

    data = classification([70, 70])
    sources: list[Any] = [patient(shard) for shard in data.shards()]
    outcome = run_world(streamed(epochs=2), sources, on_event=note)
    assert [row.examples for row in outcome.history] == [140, 140]


@every("optimizer", [torch.optim.SGD, torch.optim.Adam])
@every("drop_last", [False, True])
def test_what_comes_out_is_what_one_process_trains_in_the_same_order(
    optimizer: Any, drop_last: bool
) -> None:
    options = FeedOptions(stream_first_epoch=True, drop_last=drop_last)
    job = streamed(optimizer=partial(optimizer, lr=0.02), feed=options)
    shards = classification(SIZES).shards()
    with recorded_commits() as commits:
        outcome = run_world(job, shards)
    assert relative_difference(outcome.module, replay(job, shards, commits)) < 1e-6
    rows = sum(size - size % 4 if drop_last else size for size in SIZES)
    assert [row.examples for row in outcome.history] == [rows] * 3


def test_the_epochs_after_the_first_are_those_of_a_run_that_reads_first() -> None:
    """With a learning rate of 0 in the first epoch, its order makes no difference."""

    def later(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: float(epoch > 0))

    shards = classification(SIZES).shards()
    job = streamed(scheduler=later)
    read_first = replace(job, feed=FeedOptions())
    assert same_bits(run_world(job, shards), run_world(read_first, shards))


def test_a_schedule_by_steps_knows_the_steps_of_an_epoch_after_the_first() -> None:
    """The worker with most rows takes 18 steps; all begin the second epoch at the 18th."""
    rates: set[float] = set()

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates.add(round(self.param_groups[0]["lr"], 6))
            return super().step(closure)

    def linear(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)

    job = streamed(
        optimizer=partial(Watching, lr=1e-3), scheduler=linear, scheduler_every="step", epochs=2
    )
    run_world(job, classification([70, 10]).shards())
    expected = {round(1e-3 * (1 - step / 100), 6) for step in range(36)}
    assert rates == expected


@every("sizes", [[1, 60], [0, 30], [3, 2], [8, 16], [9, 1]])
def test_workers_with_few_rows_or_none_end_the_epoch_with_the_others(sizes: list[int]) -> None:
    outcome = run_world(streamed(), classification(sizes).shards())
    assert [row.examples for row in outcome.history] == [sum(sizes)] * 3


def test_rows_are_validated_with_after_the_first_epoch_too() -> None:
    data = classification([60, 30])
    marked = replace(schema(), validation=ColumnSpec("held", torch.bool))
    shards = [
        [batch.append_column("held", pa.array(np.arange(len(batch)) % 7 == 0)) for batch in shard]
        for shard in data.shards()
    ]
    outcome = run_world(streamed(schema=marked), shards)
    # Record batches of 7 rows, the first of each held out.
    assert [row.examples for row in outcome.history] == [90 - 9 - 5] * 3
    assert all(row.validation_loss is not None for row in outcome.history)


def test_rows_are_reshuffled_after_a_streamed_epoch() -> None:
    options = FeedOptions(stream_first_epoch=True, reshuffle_every=1)
    outcome = run_world(streamed(feed=options), classification(SIZES).shards())
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3


def test_a_null_behind_the_first_rows_ends_the_run_and_is_named_with_its_place() -> None:
    shards = classification([60, 60]).shards()
    broken = shards[1][5].to_pydict()
    broken["label"][3] = None
    shards[1][5] = pa.record_batch(broken, schema=shards[1][5].schema)
    with pytest.raises(DataError, match=r"column 'label' has 1 null .*row 38 of partition 1"):
        run_world(streamed(), shards)


def test_numbers_beyond_a_dtype_behind_the_first_rows_are_refused() -> None:
    narrow = schema(dtype=torch.float16)
    shards = with_values(classification([60, 60]), 0, "features", {44: 1e9})
    with pytest.raises(DataError, match=r"out of the range of float16.*row 44 of partition 0"):
        run_world(streamed(mlp().half(), schema=narrow), shards)


def test_what_a_caller_refuses_behind_the_first_rows_ends_the_run() -> None:
    """The estimator refuses classes that the model does not have."""
    looks: list[tuple[bool, float]] = []

    def check(statistics: DataStatistics) -> None:
        looks.append((statistics.complete, statistics.columns[1].largest or 0))
        if looks[-1][1] > 2:
            raise DataError("class 5 of 3")

    shards = with_values(classification([60, 60]), 1, "label", {50: 5})
    with pytest.raises(DataError, match="class 5 of 3"):
        run(streamed(), 2, _threads(streamed(), shards, Path("/tmp")), check=check)
    assert looks == [(False, 2), (False, 5)]


def test_an_empty_frame_and_fewer_rows_than_workers_are_refused() -> None:
    with pytest.raises(DataError, match="the DataFrame is empty"):
        run_world(streamed(), [[], []])
    with pytest.raises(DataError, match="2 rows, fewer than the 3 workers"):
        run_world(streamed(), classification([2, 0, 0]).shards())


def test_an_error_of_the_source_ends_the_run() -> None:
    def failing(shard: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from shard[:5]
        raise OSError("a block of the file is missing")

    shards: list[Any] = classification([70, 70]).shards()
    with pytest.raises(WorkerError, match=r"rank 1, epoch 1, .*a block of the file is missing"):
        run_world(streamed(), [shards[0], failing(shards[1])])


class RaisesAtStep(nn.Module):
    """Raises in its third pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.passes = mlp(), 0

    def forward(self, features: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == 3:
            raise ZeroDivisionError("the user's own mistake")
        return self.net(features)


def test_an_error_in_the_middle_of_it_is_told_though_the_source_is_stuck_and_leaves_no_file(
    tmp_path: Path,
) -> None:
    told, in_time = threading.Event(), []

    def stuck(shard: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for index, batch in enumerate(shard):
            if index == 6:
                in_time.append(told.wait(60))
            yield batch

    shards: list[Any] = [stuck(classification([70]).shards()[0])]
    job = streamed(RaisesAtStep())
    start = _threads(job, shards, tmp_path)
    try:
        with pytest.raises(WorkerError, match="rank 0, epoch 1, step 3: ZeroDivisionError"):
            run(job, 1, start)
    finally:
        told.set()
    assert list(tmp_path.iterdir()) == []
    assert eventually(lambda: bool(in_time))
    assert in_time == [True], "the error waited for the source"


def test_who_waits_for_rows_in_the_first_epoch_is_no_straggler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1's rows stay away for four times as long as anybody else may be silent."""
    clock, averagers = VirtualClock(), list[Averager]()

    def stay_away(averager: Averager) -> None:
        coordinator = coordinator_of(averager)
        assert eventually(lambda: set(coordinator.round.waiting) == {0})
        coordinator.members._longest_window = 1.0  # nobody is late before a window has been seen
        clock.run(averager.service, 4 * STRAGGLER_S)

    def slow(shard: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for index, batch in enumerate(shard):
            if index == 6:
                stay_away(averagers[0])
            yield batch

    shards: list[Any] = classification([20, 70]).shards()
    job = streamed(max_failures=5, deadline_s=1000.0)
    start = _threads(job, [shards[0], slow(shards[1])], tmp_path)

    def launch(averager: Averager) -> Any:
        averagers.append(averager)
        return start(averager)

    outcome = run(job, 2, launch, now=clock)
    assert clock.passed == 4 * STRAGGLER_S
    assert [row.examples for row in outcome.history] == [90] * 3
    assert "continuing with the others" not in caplog.text


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_connections_that_break_in_the_first_epoch_cost_no_row(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    limits = [generator.randrange(1, 12_000) for _ in range(6)]
    job = streamed(optimizer=partial(torch.optim.Adam, lr=0.01), max_failures=40)
    shards = classification(SIZES).shards()
    with recorded_commits() as commits:
        outcome, proxy = run_with_breaks(job, shards, tmp_path, limits)
    assert proxy.breaks >= 2
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    assert relative_difference(outcome.module, replay(job, shards, commits)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 3, 8])
def test_a_worker_killed_in_the_first_epoch_comes_back_and_no_row_is_lost(
    tmp_path: Path, after: int
) -> None:
    job = streamed(Misbehaves(tmp_path, kill, after), max_failures=1)
    outcome = run_world(job, classification(SIZES).shards(), ranks_as="processes")
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("stop", [die_after, save_and_stop])
@pytest.mark.parametrize("windows", [3, 9, 16, 30])
def test_a_resumed_training_ends_in_the_same_bits(tmp_path: Path, stop: Any, windows: int) -> None:
    """Of 18 windows in the first epoch, which nobody has read to its end when it is interrupted."""
    job = streamed(optimizer=partial(torch.optim.Adam, lr=0.01))
    data = classification(SIZES)
    whole = run_world(job, data.shards())
    assert stop(job, data, tmp_path / "c", windows, every_rounds=1)
    saved = CheckpointStore(str(tmp_path / "c"), keep_last=2).newest()
    assert saved is not None
    resumed = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert same_bits(resumed, whole)
    assert [row.examples for row in resumed.history] == [sum(SIZES)] * 3


def test_a_first_epoch_that_was_streamed_is_not_resumed_in_another_order(tmp_path: Path) -> None:
    job, data = streamed(), classification(SIZES)
    assert die_after(job, data, tmp_path / "c", 9, every_rounds=1)
    with pytest.raises(ConfigError, match="first epoch: was streamed, is now read first"):
        run_world(
            replace(job, feed=FeedOptions()), data.shards(), checkpoints=policy(tmp_path / "c")
        )


def test_the_statistics_of_all_rows_are_told_when_they_are_known() -> None:
    told: list[object] = []
    run_world(streamed(), classification(SIZES).shards(), on_event=told.append)
    statistics = [event for event in told if isinstance(event, DataStatistics)]
    assert [each.complete for each in statistics] == [False, True]
    assert statistics[1].shard_rows == tuple(SIZES)
    ends = [index for index, event in enumerate(told) if isinstance(event, EpochSummary)]
    assert told.index(statistics[1]) < ends[0]
