"""A training that was interrupted and resumed ends in the same bits as one that never was."""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import signal
import sys
import threading
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from toys import Data, classification, cnn, make_job, mlp, schema

from sparkdl.averager import Averager
from sparkdl.averager.checkpointing import Checkpointing
from sparkdl.averager.progress import Progress
from sparkdl.averager.saving import Resumed
from sparkdl.checkpoint.identity import describe
from sparkdl.checkpoint.local_files import LocalFiles
from sparkdl.checkpoint.policy import CheckpointPolicy, require_same
from sparkdl.checkpoint.state_files import save_state
from sparkdl.checkpoint.storage import CheckpointStore, PendingCheckpoint
from sparkdl.checkpoint.tensor_file import write_tensors
from sparkdl.driver import Outcome, as_builder, run
from sparkdl.errors import CheckpointError, ConfigError, TrainingError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.facts import DataFacts
from sparkdl.feed.feed import FeedOptions
from sparkdl.protocols import Segment
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import run_world
from sparkdl.testing.world import _processes, _threads
from sparkdl.training import require_progress, require_same_rows
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])

REPORT = WindowReport(rank=0, epoch=1, step=1, examples=2, loss_sum=0.5, last=False)
SUMMARY = EpochSummary(epoch=1, loss=0.5, examples=2, rounds=1, seconds=1.0)


class Interrupted(Exception):
    """The driver dies."""


class AskedToStop(TrainingError):
    """The driver is told to stop."""


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.01),
}
SIZES = [22, 14, 5]
"""Of batches of 4 in windows of 2, so 3, 2 and 1 windows an epoch."""


def policy(path: Path, **changes: Any) -> CheckpointPolicy:
    return CheckpointPolicy(path=str(path), **changes)


def bits(outcome: Outcome) -> list[torch.Tensor]:
    return list(outcome.module.state_dict().values())


def same_bits(first: Outcome, second: Outcome) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(first), bits(second), strict=True))


def die_after(
    job: Job, data: Data, path: Path, windows: int, launch: Any = _threads, **changes: Any
) -> bool:
    """Run until so many windows were committed; returns whether it came that far."""
    seen = 0

    def on_event(event: object) -> None:
        nonlocal seen
        seen += isinstance(event, WindowReport)
        if seen > windows:
            raise Interrupted

    shards = data.shards()
    try:
        run(
            job,
            len(shards),
            launch(job, shards, path.parent),
            checkpoints=policy(path, **changes),
            on_event=on_event,
        )
    except Interrupted:
        return True
    return False


def save_and_stop(
    job: Job, data: Data, path: Path, windows: int, launch: Any = _threads, **changes: Any
) -> bool:
    """Run until so many windows were committed, then ask for a checkpoint behind the next."""
    seen = 0
    averagers: list[Averager] = []
    shards = data.shards()
    start = launch(job, shards, path.parent)

    def noting(averager: Averager) -> Any:
        averagers.append(averager)
        return start(averager)

    def on_event(event: object) -> None:
        nonlocal seen
        seen += isinstance(event, WindowReport)
        if seen == windows + 1:
            averagers[0].save_and_fail(AskedToStop())

    try:
        run(job, len(shards), noting, checkpoints=policy(path, **changes), on_event=on_event)
    except AskedToStop:
        return True
    return False


@pytest.mark.parametrize("stop", [die_after, save_and_stop])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("average_optimizer_state", [True, False])
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_a_resumed_training_ends_in_the_same_bits(
    tmp_path: Path, stop: Any, optimizer: Any, average_optimizer_state: bool, wire_dtype: Any
) -> None:
    strategy = ParameterAveraging(
        period=2, average_optimizer_state=average_optimizer_state, wire_dtype=wire_dtype
    )
    job = make_job(mlp(), optimizer=optimizer, strategy=strategy, epochs=4)
    data = classification(SIZES)
    whole = run_world(job, data.shards())
    assert stop(job, data, tmp_path / "c", 14)
    resumed = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert same_bits(resumed, whole)


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("stop", [die_after, save_and_stop])
def test_the_learning_rate_goes_on_where_it_was(tmp_path: Path, stop: Any, every: Any) -> None:
    total = 4 * 6 if every == "step" else 4
    scheduler = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=total + 1)
    job = make_job(
        mlp(),
        optimizer=OPTIMIZERS["momentum"],
        epochs=4,
        scheduler=scheduler,
        scheduler_every=every,
    )
    data = classification(SIZES)
    whole = run_world(job, data.shards())
    assert stop(job, data, tmp_path / "c", 20, every_rounds=2)
    resumed = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert same_bits(resumed, whole)


@pytest.mark.parametrize("every", ["step", "epoch"])
def test_the_learning_rate_goes_on_behind_the_end_of_an_epoch(tmp_path: Path, every: Any) -> None:
    """Workers stood where the epoch ended, those with fewer rows some steps behind the others."""
    scheduler = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=25)
    job = make_job(
        mlp(),
        optimizer=OPTIMIZERS["momentum"],
        epochs=4,
        scheduler=scheduler,
        scheduler_every=every,
    )
    data = classification(SIZES)
    whole = run_world(job, data.shards())
    assert die_after(job, data, tmp_path / "c", 26)
    resumed = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert same_bits(resumed, whole)


@settings(max_examples=20, deadline=None)
@given(
    windows=st.integers(0, 23),
    stop=st.sampled_from([die_after, save_and_stop]),
    every_rounds=st.sampled_from([None, 1, 2]),
)
@pytest.mark.slow
def test_at_whatever_commit_it_was_interrupted(
    tmp_path_factory: pytest.TempPathFactory, windows: int, stop: Any, every_rounds: int | None
) -> None:
    path = tmp_path_factory.mktemp("checkpoints") / "c"
    job = make_job(mlp(), optimizer=OPTIMIZERS["Adam"], epochs=4)
    data = classification(SIZES)
    whole = run_world(job, data.shards())
    stop(job, data, path, windows, every_rounds=every_rounds)
    if every_rounds and stop is die_after:
        assert_saved_at_least(path, windows - len(SIZES) * (1 + every_rounds))
    resumed = run_world(job, data.shards(), checkpoints=policy(path))
    assert same_bits(resumed, whole)
    assert [row.examples for row in resumed.history] == [41] * 4
    assert [row.loss for row in resumed.history] == [row.loss for row in whole.history]
    assert [row.rounds for row in resumed.history] == [row.rounds for row in whole.history]


def assert_saved_at_least(path: Path, windows: int) -> None:
    """The newest checkpoint holds at least so many windows, of 12 an epoch."""
    saved = CheckpointStore(str(path), keep_last=2).newest()
    if saved is None:
        assert windows <= 0
        return
    progress = saved.description["progress"]
    assert 12 * len(progress["history"]) + len(progress["reports"]) >= windows


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, data = make_job(mlp(), epochs=3), classification([40, 40])
    whole = run_world(job, data.shards())
    published, windows_before = threading.Event(), list[bool]()
    publish = PendingCheckpoint.publish

    def wait_for_the_next_epoch(self: PendingCheckpoint, description: dict[str, Any]) -> None:
        if description["progress"]["epoch"] == 2:
            assert published.wait(20)
        publish(self, description)

    def on_event(event: object) -> None:
        if isinstance(event, WindowReport) and (event.epoch, event.step) == (2, 15):
            saved = CheckpointStore(str(tmp_path), keep_last=2).newest()
            windows_before.append(saved is None)
            published.set()

    monkeypatch.setattr(PendingCheckpoint, "publish", wait_for_the_next_epoch)
    outcome = run_world(job, data.shards(), checkpoints=policy(tmp_path), on_event=on_event)
    assert windows_before[0]
    assert same_bits(outcome, whole)
    saved = CheckpointStore(str(tmp_path), keep_last=2).newest()
    assert saved is not None
    assert len(saved.description["progress"]["history"]) == 3


class Noise(nn.Module):
    """Draws from torch, from numpy and from Python."""

    def forward(self, features: Tensor) -> Tensor:
        dropped = nn.functional.dropout(features, 0.5)
        return dropped * np.random.normal(1.0, 0.1) * random.gauss(1.0, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [die_after, save_and_stop])
def test_a_model_draws_the_numbers_that_it_would_have_drawn(tmp_path: Path, stop: Any) -> None:
    """In processes, for a rank's random numbers are its process's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), Noise(), nn.Linear(16, 3)).double()
    job = make_job(model, epochs=4, optimizer=OPTIMIZERS["Adam"])
    data = classification([13, 9])
    whole = run_world(job, data.shards(), ranks_as="processes")
    assert stop(job, data, tmp_path / "c", 10, _processes)
    resumed = run_world(
        job, data.shards(), ranks_as="processes", checkpoints=policy(tmp_path / "c")
    )
    assert same_bits(resumed, whole)


class LateLayer(nn.Module):
    """Uses its second layer from the 13th minibatch on: the third epoch of the first worker."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = mlp(), mlp(seed=4)
        self.register_buffer("minibatches", torch.zeros((), dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        self.minibatches += self.training
        outputs: Tensor = self.first(features)
        return outputs + self.late(features) if self.minibatches > 12 else outputs


@pytest.mark.parametrize("windows", [5, 16], ids=["before", "after"])
@pytest.mark.parametrize("optimizer", ["momentum", "Adam"])
def test_a_layer_that_is_first_used_late_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, optimizer: str, windows: int
) -> None:
    job = make_job(
        LateLayer(), optimizer=OPTIMIZERS[optimizer], strategy=ParameterAveraging(2), epochs=4
    )
    data = classification(SIZES)
    whole = run_world(job, data.shards())
    assert not torch.equal(
        whole.module.get_parameter("late.0.weight"), LateLayer().late.get_parameter("0.weight")
    )
    assert die_after(job, data, tmp_path / "c", windows, every_rounds=1)
    resumed = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert same_bits(resumed, whole)


def test_batch_norm_goes_on_from_its_statistics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    job, data = make_job(model, epochs=3), classification([16, 8])
    whole = run_world(job, data.shards())
    assert die_after(job, data, tmp_path / "c", 8)
    assert same_bits(run_world(job, data.shards(), checkpoints=policy(tmp_path / "c")), whole)


def test_a_damaged_checkpoint_is_skipped_and_the_bits_are_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, data = make_job(mlp(), epochs=4), classification([12, 8])
    whole = run_world(job, data.shards())
    assert die_after(job, data, tmp_path / "c", 13)
    newest = max((tmp_path / "c").iterdir())
    center = bytearray((newest / "center.safetensors").read_bytes())
    center[-1] ^= 1
    (newest / "center.safetensors").write_bytes(center)
    with caplog.at_level(logging.WARNING):
        resumed = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert "is damaged" in caplog.text
    assert same_bits(resumed, whole)


def test_checkpoints_do_not_change_the_bits(tmp_path: Path) -> None:
    job, data = make_job(mlp(), epochs=3, optimizer=OPTIMIZERS["Adam"]), classification([12, 8])
    with_checkpoints = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert same_bits(with_checkpoints, run_world(job, data.shards()))


def test_a_training_that_has_ended_gives_its_model_again(tmp_path: Path) -> None:
    job, data = make_job(mlp(), epochs=3), classification([12, 8])
    whole = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    windows: list[object] = []
    again = run_world(
        job,
        data.shards(),
        checkpoints=policy(tmp_path / "c"),
        on_event=lambda event: windows.append(event) if isinstance(event, WindowReport) else None,
    )
    assert windows == []
    assert same_bits(again, whole)
    assert again.history == whole.history


@pytest.mark.parametrize("stop", [die_after, save_and_stop])
@pytest.mark.parametrize(
    "options",
    [
        FeedOptions(reshuffle_every=1),
        FeedOptions(exchange_rows=True),
        FeedOptions(exchange_rows=True, stream_first_epoch=True),
    ],
    ids=["again and again", "once", "once, after a streamed epoch"],
)
def test_rows_that_were_exchanged_are_exchanged_the_same_way_again(
    tmp_path: Path, stop: Any, options: FeedOptions
) -> None:
    job, data = make_job(mlp(), epochs=4, feed=options), classification(SIZES)
    whole = run_world(job, data.shards())
    assert stop(job, data, tmp_path / "c", 14)
    resumed = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert same_bits(resumed, whole)


def test_more_epochs_go_on_from_the_last(tmp_path: Path) -> None:
    data = classification([12, 8])
    run_world(make_job(mlp(), epochs=2), data.shards(), checkpoints=policy(tmp_path / "c"))
    longer = make_job(mlp(), epochs=5)
    more = run_world(longer, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert same_bits(more, run_world(longer, data.shards()))


def test_never_resuming_starts_anew_and_later_runs_go_on_from_that(tmp_path: Path) -> None:
    job, data = make_job(mlp(), epochs=2), classification([12, 8])
    run_world(make_job(mlp(), epochs=4), data.shards(), checkpoints=policy(tmp_path / "c"))
    anew = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c", resume="never"))
    assert len(anew.history) == 2
    again = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert again.history == anew.history


@pytest.mark.parametrize(
    ("every", "epochs", "expected"), [(1, 3, [2, 3]), (2, 5, [4, 5]), (7, 3, [3])]
)
def test_checkpoints_are_of_every_so_many_epochs_and_of_the_last(
    tmp_path: Path, every: int, epochs: int, expected: list[int]
) -> None:
    job = make_job(mlp(), epochs=epochs)
    run_world(job, classification([8, 8]).shards(), checkpoints=policy(tmp_path, every=every))
    store = CheckpointStore(str(tmp_path), keep_last=2)
    found = []
    while (saved := store.newest()) is not None:
        found.append(len(saved.description["progress"]["history"]))
        (Path(saved.directory) / "manifest.json").unlink()
    assert sorted(found) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 3}, "seed: was 11, is now 3"),
        ({"batch_size": 2}, "batch size: was 4, is now 2"),
        (
            {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2)},
            "scheduler: was none, is now StepLR epoch .*'step_size': 2",
        ),
        (
            {"optimizer": partial(torch.optim.SGD, lr=0.2)},
            "lr of parameter group 0: was 0.1, is now 0.2",
        ),
        ({"strategy": ParameterAveraging(period=3)}, "strategy: was .*period=1.*now .*period=3"),
        ({"model": mlp(classes=4)}, "state: was .*, 83.*, is now .*, 92"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_another_training_is_refused_in_words(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = classification([12, 8])
    run_world(make_job(mlp()), data.shards(), checkpoints=policy(tmp_path / "c"))
    other = make_job(changes.pop("model", None) or mlp(), **changes)
    with pytest.raises(ConfigError, match=message):
        run_world(other, data.shards(), checkpoints=policy(tmp_path / "c"))


def test_another_order_of_values_in_memory_is_refused_in_words(tmp_path: Path) -> None:
    data = classification([12, 8], width=36)
    job = make_job(cnn(), schema=schema(36))
    run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    other = replace(job, model=as_builder(cnn().to(memory_format=torch.channels_last)))
    with pytest.raises(ConfigError, match=r"strides of 4.weight: was none, is now \[16, 1, 8, 4\]"):
        run_world(other, data.shards(), checkpoints=policy(tmp_path / "c"))


def test_another_number_of_workers_is_refused_in_words(tmp_path: Path) -> None:
    run_world(make_job(mlp()), classification([6, 6]).shards(), checkpoints=policy(tmp_path / "c"))
    with pytest.raises(ConfigError, match="number of workers: was 2, is now 3"):
        run_world(
            make_job(mlp()), classification([4, 4, 4]).shards(), checkpoints=policy(tmp_path / "c")
        )


def test_other_rows_are_refused_in_words(tmp_path: Path) -> None:
    run_world(make_job(mlp()), classification([6, 6]).shards(), checkpoints=policy(tmp_path / "c"))
    with pytest.raises(ConfigError, match=r"rows of each worker: was \[6, 6\], is now \[6, 7\]"):
        run_world(
            make_job(mlp()), classification([6, 7]).shards(), checkpoints=policy(tmp_path / "c")
        )


def test_a_disk_that_is_full_costs_the_checkpoint_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job, data = make_job(mlp(), epochs=3), classification([12, 8])
    whole = run_world(job, data.shards())
    monkeypatch.setattr("sparkdl.checkpoint.storage._Checksummed.write", _disk_full)
    with caplog.at_level(logging.WARNING):
        outcome = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert same_bits(outcome, whole)
    assert caplog.text.count("No space left on device") == 3
    assert "Training goes on" in caplog.text
    assert list((tmp_path / "c").iterdir()) == []


def _disk_full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_an_optimizer_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    def build(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.param_groups[0]["callback"] = print
        return optimizer

    with pytest.raises(TrainingError, match="SGD keeps state that cannot be saved"):
        run_world(
            make_job(mlp(), optimizer=build),
            classification([8, 8]).shards(),
            checkpoints=policy(tmp_path / "c"),
        )


def test_an_unreadable_directory_ends_the_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_world(make_job(mlp()), classification([6]).shards(), checkpoints=policy(tmp_path / "c"))
    monkeypatch.setattr("sparkdl.checkpoint.storage.FORMAT", 0)
    with pytest.raises(CheckpointError, match="newer than the 0"):
        run_world(make_job(mlp()), classification([6]).shards(), checkpoints=policy(tmp_path / "c"))


def test_a_center_is_saved_beside_a_writer_that_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGTERM, when the storage is slow."""
    reached, goes_on = threading.Event(), threading.Event()
    publish, save_center = PendingCheckpoint.publish, Averager.save_center

    def slow(self: PendingCheckpoint, description: dict[str, Any]) -> None:
        if not reached.is_set():
            reached.set()
            goes_on.wait(30)
        publish(self, description)

    def then_let_it_go_on(self: Averager) -> None:
        save_center(self)
        goes_on.set()
        for thread in threading.enumerate():
            if thread.name == "sparkdl-saving":
                thread.join(30)

    def on_event(event: object) -> None:
        if isinstance(event, WindowReport) and reached.wait(30):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(PendingCheckpoint, "publish", slow)
    monkeypatch.setattr(Averager, "save_center", then_let_it_go_on)
    monkeypatch.setattr("sparkdl.averager.loop.CLOSE_S", 0.2)
    monkeypatch.setattr("sparkdl.driver.SIGTERM_S", 0.2)
    job, data = make_job(mlp(), epochs=9), classification([12])
    with pytest.raises(SystemExit):
        run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"), on_event=on_event)
    there = sorted(entry for entry in (tmp_path / "c").iterdir())
    assert [entry.name for entry in there] == ["checkpoint-000001", "checkpoint-000002"]
    assert all((entry / "manifest.json").exists() for entry in there)


def test_a_checkpoint_that_waits_for_a_worker_when_the_run_fails_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another has yet to send its own state.
    monkeypatch.setattr(Checkpointing, "forgo", lambda self, rank: False)

    def on_event(event: object) -> None:
        if isinstance(event, WindowReport) and event.epoch == 2:
            raise Interrupted

    job, data = make_job(mlp(), epochs=9), classification([12])
    with pytest.raises(Interrupted):
        run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"), on_event=on_event)
    assert list((tmp_path / "c").iterdir()) == []


def test_a_second_training_on_the_same_path_is_refused_and_the_first_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkdl.checkpoint.lease.GRACE_S", 0.05)
    job, data = make_job(mlp(), epochs=2), classification([12])
    refused: list[str] = []

    def on_event(event: object) -> None:
        if isinstance(event, WindowReport) and not refused:
            with pytest.raises(ConfigError) as caught:
                run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
            refused.append(str(caught.value))

    first = policy(tmp_path / "c", application="application-7")
    outcome = run_world(job, data.shards(), checkpoints=first, on_event=on_event)
    assert f"in use by process {os.getpid()} (application-7) on" in refused[0]
    assert same_bits(outcome, run_world(job, data.shards()))
    assert same_bits(outcome, run_world(job, data.shards(), checkpoints=policy(tmp_path / "c")))


def test_a_checkpoint_of_another_kind_is_refused_in_words(tmp_path: Path) -> None:
    save_state(CheckpointStore(str(tmp_path / "c"), keep_last=1), {"epoch": 3})
    with pytest.raises(CheckpointError, match=r"no checkpoint of a fit: .*training function"):
        run_world(make_job(mlp()), classification([6]).shards(), checkpoints=policy(tmp_path / "c"))


@pytest.mark.parametrize(
    "progress",
    [
        {},
        {"epoch": "x"},
        {"epoch": 1, "positions": 7},
        {"positions": [{"epoch": []}]},
        {"positions": [[]]},
        {"reports": [{}]},
        {"epoch": -1},
        {"epoch": 1 << 63},
        {"rounds": 1.5},
        {"positions": [{"epoch": None}]},
        {"positions": [{"step": 2.0}]},
        {"reports": [{**asdict(REPORT), "last": 1}]},
        {"history": [{**asdict(SUMMARY), "loss": None}]},
    ],
)
def test_a_checkpoint_that_says_nothing_of_its_progress_is_refused_in_words(
    tmp_path: Path, progress: dict[str, Any]
) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    whole = Progress.start(1).as_json()
    said = progress and {**whole, **progress}
    store.begin().publish({"config": {}, "data": None, "progress": said})
    saved = store.newest()
    assert saved is not None
    with pytest.raises(CheckpointError, match="does not say how far"):
        Resumed.of(saved)


def test_a_checkpoint_of_other_workers_than_it_says_is_refused_in_words(tmp_path: Path) -> None:
    job, data = make_job(mlp(), epochs=2), classification([6, 6])
    run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    saved = CheckpointStore(str(tmp_path / "c"), keep_last=1).newest()
    assert saved is not None
    saved.description["progress"]["positions"].pop()
    with pytest.raises(CheckpointError, match="how far 1 workers had come, and that there were 2"):
        require_progress(Resumed.of(saved), 2, 2)


@pytest.mark.parametrize("data", [None, {}, {"openings": 7}, {"openings": []}, {"fingerprint": 1}])
def test_a_checkpoint_that_says_nothing_of_its_rows_is_refused_in_words(
    tmp_path: Path, data: dict[str, Any] | None
) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    progress = Progress.start(1).as_json()
    store.begin().publish({"config": {}, "data": data, "progress": progress})
    saved = store.newest()
    assert saved is not None
    present = {**DataFacts((3,), (), fingerprint=7).lasting(), "openings": [1]}
    with pytest.raises(CheckpointError, match="does not say which rows"):
        require_same_rows(Resumed.of(saved), present, ())


@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"is": "MSELoss()"},
        {**describe(nn.MSELoss()), "parts": {}, "is": None},
        {**describe(nn.MSELoss()), "parts": 7},
    ],
)
def test_a_checkpoint_that_says_nothing_of_its_training_is_refused_in_words(
    loss: dict[str, Any],
) -> None:
    with pytest.raises(CheckpointError, match="here does not say what training it is of"):
        require_same("here", {"loss": loss}, {"loss": describe(nn.MSELoss())})


def test_texts_that_differ_in_the_end_of_the_last_line_are_told_apart() -> None:
    now = describe(nn.MSELoss())
    with pytest.raises(ConfigError, match="loss: was MSELoss"):
        require_same("here", {"loss": {**now, "is": now["is"] + "\n", "parts": {}}}, {"loss": now})


def test_a_center_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    pending = CheckpointStore(str(tmp_path), keep_last=1).begin()
    with pending.create("center.safetensors") as file:
        write_tensors(file, {"no number": torch.ones(3)})
    pending.publish({"config": {}, "data": None, "progress": Progress.start(1).as_json()})
    saved = CheckpointStore(str(tmp_path), keep_last=1).newest()
    assert saved is not None
    with pytest.raises(CheckpointError, match="is of another model"):
        Resumed.of(saved).read_center((Segment("parameters", torch.float32, 3),))


@pytest.mark.parametrize(
    ("name", "epoch"), [("0", "two"), ("0", "9" * 5000), ("0", "-1"), ("1", "2"), ("0", "")]
)
def test_a_kept_model_of_another_training_is_refused_in_words(
    tmp_path: Path, name: str, epoch: str
) -> None:
    pending = CheckpointStore(str(tmp_path), keep_last=1).begin()
    with pending.create("kept-model.safetensors") as file:
        write_tensors(file, {name: torch.ones(3)}, {"epoch": epoch})
    pending.publish({"config": {}, "data": None, "progress": Progress.start(1).as_json()})
    saved = CheckpointStore(str(tmp_path), keep_last=1).newest()
    assert saved is not None
    with pytest.raises(CheckpointError, match="is of another model"):
        Resumed.of(saved).read_kept_model((Segment("parameters", torch.float32, 3),))


class Unreadable(io.BytesIO):
    """A file on a disk that has just failed."""

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_an_own_state_that_cannot_be_read_any_more_is_told_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, data = make_job(mlp(), optimizer=OPTIMIZERS["Adam"]), classification([6])
    run_world(replace(job, epochs=1), data.shards(), checkpoints=policy(tmp_path))
    opened: list[str] = []
    original, own_state = LocalFiles.open_input_stream, "rank-00000.safetensors"

    def open_input_stream(files: LocalFiles, path: str) -> Any:
        opened.append(Path(path).name)
        # It was whole when it was verified.
        failed = opened[-1] == own_state and opened.count(own_state) == 2
        return Unreadable() if failed else original(files, path)

    monkeypatch.setattr(LocalFiles, "open_input_stream", open_input_stream)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors cannot be read: .*Input"):
        run_world(replace(job, epochs=2), data.shards(), checkpoints=policy(tmp_path))


def test_without_the_workers_own_states_the_center_is_saved_all_the_same(tmp_path: Path) -> None:
    """As when the workers died together with whoever told the driver to end."""
    job, data = make_job(mlp(), epochs=4, optimizer=OPTIMIZERS["Adam"]), classification([12, 8])
    whole = run_world(job, data.shards())
    averagers: list[Averager] = []
    start = _threads(job, data.shards(), tmp_path)

    def noting(averager: Averager) -> Any:
        averagers.append(averager)
        return start(averager)

    def on_event(event: object) -> None:
        if isinstance(event, WindowReport) and (event.epoch, event.step) == (3, 8):
            averagers[0].fail(AskedToStop())

    with pytest.raises(AskedToStop):
        run(job, 2, noting, checkpoints=policy(tmp_path / "c"), on_event=on_event)
    averagers[0].save_center()
    saved = CheckpointStore(str(tmp_path / "c"), keep_last=2).newest()
    assert saved is not None
    assert saved.description["progress"]["rounds"] >= 2
    assert not saved.has("rank-00000.safetensors")
    assert same_bits(run_world(job, data.shards(), checkpoints=policy(tmp_path / "c")), whole)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    "strategy",
    [
        GradientAllReduce(),
        GradientAllReduce(accumulate=2, commit_every=2),
        ParameterAveraging(period=2, aggregation="executors", commit_every=2),
    ],
    ids=["all-reduce", "between", "executors"],
)
def test_workers_that_exchange_among_themselves_resume_with_the_same_bits(
    tmp_path: Path, strategy: Strategy, optimizer: Any
) -> None:
    job = make_job(mlp(), optimizer=optimizer, strategy=strategy, epochs=4)
    data = classification([22, 14])
    whole = run_world(job, data.shards(), ranks_as="processes")
    assert die_after(job, data, tmp_path / "c", 5, _processes, every_rounds=1)
    resumed = run_world(
        job, data.shards(), ranks_as="processes", checkpoints=policy(tmp_path / "c")
    )
    assert same_bits(resumed, whole)


def test_workers_that_exchange_gradients_resume_with_the_rows_that_they_were_dealt(
    tmp_path: Path,
) -> None:
    job = make_job(
        mlp(),
        optimizer=OPTIMIZERS["Adam"],
        strategy=GradientAllReduce(commit_every=2),
        epochs=4,
        feed=FeedOptions(reshuffle_every=1),
    )
    data = classification([22, 6])
    whole = run_world(job, data.shards(), ranks_as="processes")
    # in the middle of the second epoch
    assert die_after(job, data, tmp_path / "c", 9, _processes, every_rounds=1)
    resumed = run_world(
        job, data.shards(), ranks_as="processes", checkpoints=policy(tmp_path / "c")
    )
    assert same_bits(resumed, whole)
    assert [e.loss for e in resumed.history] == [e.loss for e in whole.history]


def test_state_that_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    job = make_job(mlp(), strategy=GradientAllReduce(shard_optimizer=True))
    with pytest.raises(ConfigError, match="keeps state on its workers that no checkpoint holds"):
        run_world(job, classification([8]).shards(), checkpoints=policy(tmp_path / "c"))
