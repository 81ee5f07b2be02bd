"""Checkpoints that a run writes, resumes from or refuses."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_keyword import run
from every_row import every, every_row
from hostile import damaged
from hypothesis import given, settings
from interruptions import OPTIMIZERS, AskedToStop, Interrupted, policy, same_bits
from toys import Data, classification, cnn, make_job, mlp, schema

from sparkdl.averager import Averager
from sparkdl.averager.coordination.run_state import Checkpointing
from sparkdl.averager.run_events import Position, Progress
from sparkdl.averager.service.saving import ResumedCheckpoint
from sparkdl.callbacks import Callback, Training
from sparkdl.checkpoint import storage
from sparkdl.checkpoint.policy import require_same
from sparkdl.checkpoint.state_files import save_state
from sparkdl.checkpoint.storage import CheckpointStore, Contents, _Hashed
from sparkdl.driver.resuming import require_progress, require_same_rows
from sparkdl.durable.local_files import LocalFiles
from sparkdl.errors import CheckpointError, ConfigError, SparkDLError, WorkerLostError
from sparkdl.events import EpochSummary, WindowReport, WindowSums
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.shards import DataStatistics
from sparkdl.protocols import ColumnSpec
from sparkdl.strategies import GradientAllReduce, ParameterAveraging
from sparkdl.testing import _threads, run_world
from sparkdl.worker import Job


def epochs_saved(path: Path) -> int | None:
    """In the newest checkpoint, if there is one."""
    saved = CheckpointStore(str(path), keep_last=2).newest()
    return None if saved is None else len(saved.description["progress"]["history"])


def when(epoch: int, step: int | None, act: Callable[[], object]) -> Callable[[object], None]:
    """What the driver calls with its events, and acts at a window, or at each of an epoch."""

    def on_event(event: object) -> None:
        if isinstance(event, WindowReport) and event.epoch == epoch and step in (None, event.step):
            act()

    return on_event


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def interrupt() -> None:
    raise Interrupted


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, data = make_job(mlp(), epochs=3), classification([40, 40])
    whole = run_world(job, data.shards())
    published, saved_before = threading.Event(), list[int | None]()
    write = CheckpointStore.write

    def wait_for_the_next_epoch(
        self: CheckpointStore, contents: Contents, description: dict[str, Any]
    ) -> str:
        if description["progress"]["epoch"] == 2:
            assert published.wait(20)
        return write(self, contents, description)

    def publish() -> None:
        saved_before.append(epochs_saved(tmp_path))
        published.set()

    monkeypatch.setattr(CheckpointStore, "write", wait_for_the_next_epoch)
    at_its_end = when(2, 15, publish)
    outcome = run_world(job, data.shards(), checkpoints=policy(tmp_path), on_event=at_its_end)
    assert saved_before[0] is None
    assert same_bits(outcome, whole)
    assert epochs_saved(tmp_path) == 3


@pytest.mark.parametrize(
    ("every", "epochs", "expected"), [(1, 3, [2, 3]), (2, 5, [4, 5]), (7, 3, [3])]
)
def test_checkpoints_are_of_every_so_many_epochs_and_of_the_last(
    tmp_path: Path, every: int, epochs: int, expected: list[int]
) -> None:
    job, checkpoints = make_job(mlp(), epochs=epochs), policy(tmp_path, every_epochs=every)
    run_world(job, classification([8, 8]).shards(), checkpoints=checkpoints)
    store = CheckpointStore(str(tmp_path), keep_last=2)
    found = []
    while (saved := store.newest()) is not None:
        found.append(len(saved.description["progress"]["history"]))
        Path(saved.path).unlink()
    assert sorted(found) == expected


def test_a_disk_that_is_full_costs_the_checkpoint_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job, data = make_job(mlp(), epochs=3), classification([12, 8])
    whole = run_world(job, data.shards())
    monkeypatch.setattr("sparkdl.checkpoint.storage._Hashed.write", _disk_full)
    with caplog.at_level(logging.WARNING):
        outcome = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert same_bits(outcome, whole)
    assert caplog.text.count("No space left on device") == 4  # of each epoch, and at the end
    assert "Training continues" in caplog.text
    assert list((tmp_path / "c").iterdir()) == []


def _disk_full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_what_a_full_disk_has_cost_is_saved_when_a_callback_stops_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Callback):
        def on_epoch(self, training: Training, summary: EpochSummary) -> None:
            if summary.epoch == 2:
                training.stop("enough")

    job, data = make_job(mlp(), epochs=9), classification([12, 8])
    _full_until_the_end(monkeypatch)
    run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"), callbacks=[Stop()])
    assert epochs_saved(tmp_path / "c") == 2


@pytest.mark.parametrize("for_good", [False, True])
def test_on_sigterm_with_a_full_disk_the_center_is_tried_once_more_and_the_log_says_what_came_of_it(
    for_good: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job, data = make_job(mlp(), epochs=500), classification([12, 8])
    if for_good:
        monkeypatch.setattr("sparkdl.checkpoint.storage._Hashed.write", _disk_full)
    else:
        _full_until_the_end(monkeypatch)
    at_once = when(2, 4, terminate)
    with pytest.raises(SystemExit):
        run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"), on_event=at_once)
    assert (epochs_saved(tmp_path / "c") is None) is for_good
    assert ("the training can resume" in caplog.text) is not for_good
    assert ("is lost, because no other could be written" in caplog.text) is for_good


def _full_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint can be written but the one for which the run has ended."""
    write, save_center = _Hashed.write, Averager.save_center

    def then_there_is_room(self: Averager) -> bool:
        monkeypatch.setattr(_Hashed, "write", write)
        return save_center(self)

    monkeypatch.setattr(_Hashed, "write", _disk_full)
    monkeypatch.setattr(Averager, "save_center", then_there_is_room)


def test_a_checkpoint_that_is_being_written_when_the_run_fails_is_there_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, goes_on = threading.Event(), threading.Event()
    write, join_writer = CheckpointStore.write, Averager._join_writer

    def slow(self: CheckpointStore, contents: Contents, description: dict[str, Any]) -> str:
        reached.set()
        assert goes_on.wait(30)
        return write(self, contents, description)

    def after_the_service(self: Averager) -> None:
        goes_on.set()
        join_writer(self)

    def fail() -> None:
        assert reached.wait(30)
        raise Interrupted

    monkeypatch.setattr(CheckpointStore, "write", slow)
    monkeypatch.setattr(Averager, "_join_writer", after_the_service)
    job, data, failing = make_job(mlp(), epochs=9), classification([12]), when(2, None, fail)
    with pytest.raises(Interrupted):
        run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"), on_event=failing)
    assert epochs_saved(tmp_path / "c") == 1


def test_state_that_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    job = make_job(mlp(), strategy=GradientAllReduce(shard_optimizer=True))
    with pytest.raises(ConfigError, match="state on its workers that checkpoints do not include"):
        run_world(job, classification([8]).shards(), checkpoints=policy(tmp_path / "c"))


def test_a_center_is_saved_beside_a_writer_that_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGTERM, when the storage is slow."""
    reached, goes_on = threading.Event(), threading.Event()
    write, save_center = storage.write_pieces, Averager.save_center

    def slow(*what: Any) -> None:
        if not reached.is_set():
            reached.set()
            goes_on.wait(30)
        write(*what)

    def then_let_it_go_on(self: Averager) -> bool:
        saved = save_center(self)
        goes_on.set()
        for thread in threading.enumerate():
            if thread.name == "sparkdl-saving":
                thread.join(30)
        return saved

    def on_event(event: object) -> None:
        if isinstance(event, WindowReport) and reached.wait(30):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(storage, "write_pieces", slow)
    monkeypatch.setattr(Averager, "save_center", then_let_it_go_on)
    monkeypatch.setattr("sparkdl.averager.service.server.CLOSE_S", 0.2)
    monkeypatch.setattr("sparkdl.driver.resuming.SIGTERM_S", 0.2)
    job, data = make_job(mlp(), epochs=9), classification([12])
    with pytest.raises(SystemExit):
        run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"), on_event=on_event)
    there = sorted(entry.name[:17] for entry in (tmp_path / "c").iterdir())
    assert there == ["checkpoint-000001", "checkpoint-000002"]


@pytest.mark.parametrize("lost", [False, True])
def test_sigterm_as_the_workers_leave_ends_the_driver_too(tmp_path: Path, lost: bool) -> None:
    """A cluster that is shut down ends the workers, and just after them the driver."""
    strategy = GradientAllReduce() if lost else ParameterAveraging()
    job, data = make_job(mlp(), epochs=2, strategy=strategy), classification([12])
    start = _threads(job, data.shards(), tmp_path)

    @contextmanager
    def terminated_at_the_end(averager: Averager) -> Iterator[None]:
        try:
            with start(averager):
                yield
        finally:
            terminate()

    def lose(event: object) -> None:
        if lost and isinstance(event, EpochSummary):
            raise WorkerLostError("its host was shut down")

    with pytest.raises(SystemExit) as ended:
        run(job, 1, terminated_at_the_end, checkpoints=policy(tmp_path / "c"), on_event=lose)
    assert ended.value.code == 128 + signal.SIGTERM
    assert epochs_saved(tmp_path / "c") == (1 if lost else 2)


def test_a_checkpoint_that_waits_for_a_worker_when_the_run_fails_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another has yet to send its state.
    monkeypatch.setattr(Checkpointing, "forgo", lambda self, rank: False)

    job, data, failing = make_job(mlp(), epochs=9), classification([12]), when(2, None, interrupt)
    with pytest.raises(Interrupted):
        run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"), on_event=failing)
    assert list((tmp_path / "c").iterdir()) == []


def test_without_the_worker_states_the_center_is_saved_all_the_same(tmp_path: Path) -> None:
    """As when the workers died together with whoever told the driver to end."""
    job, data = make_job(mlp(), epochs=4, optimizer=OPTIMIZERS["Adam"]), classification([12, 8])
    whole = run_world(job, data.shards())
    averagers: list[Averager] = []
    start = _threads(job, data.shards(), tmp_path)

    def noting(averager: Averager) -> Any:
        averagers.append(averager)
        return start(averager)

    stopping = when(2, 5, lambda: averagers[0].fail(AskedToStop()))
    with pytest.raises(AskedToStop):
        run(job, 2, noting, checkpoints=policy(tmp_path / "c"), on_event=stopping)
    averagers[0].save_center()
    saved = CheckpointStore(str(tmp_path / "c"), keep_last=2).newest()
    progress = saved.description["progress"]
    # Workers may have gone on while the driver was told.
    assert (progress["epoch"], progress["rounds"]) >= (2, 2)
    assert "rank-00000" not in saved.contents
    assert same_bits(run_world(job, data.shards(), checkpoints=policy(tmp_path / "c")), whole)


@every("ends", ["epoch", "round"])
def test_a_training_that_resumes_without_the_states_of_its_workers_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    """A callback has ended it where no checkpoint was due, or where one was."""

    class Ends(Callback):
        def on_epoch(self, training: Training, summary: EpochSummary) -> None:
            if ends == "epoch":
                training.stop("enough")

        def on_round(self, training: Training, reports: Sequence[WindowReport]) -> None:
            if ends == "round":
                training.stop("enough")

    data, path = classification([12, 8]), tmp_path / ends
    job = make_job(mlp(), epochs=3, strategy=ParameterAveraging(1, average_optimizer_state=False))
    run_world(job, data.shards(), checkpoints=policy(path), callbacks=[Ends()])
    run_world(job, data.shards(), checkpoints=policy(path))
    assert ("lacks the states of 2 of 2 workers" in caplog.text) is (ends == "round")
    caplog.clear()


def test_a_second_training_on_the_same_path_is_refused_and_the_first_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkdl.durable.lease.GRACE_S", 0.05)
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


JOB, TWELVE = make_job(mlp()), classification([6, 6])
IMAGES = make_job(cnn(), schema=schema(36)), classification([12, 8], width=36)


@every_row(
    ((JOB, TWELVE), (make_job(mlp(classes=4)), TWELVE), "state: was .*, 83.*, is now .*, 92"),
    (
        (JOB, TWELVE),
        (make_job(mlp(), optimizer=partial(torch.optim.SGD, lr=0.2)), TWELVE),
        "lr of parameter group 0: was 0.1, is now 0.2",
    ),
    (
        IMAGES,
        (make_job(cnn().to(memory_format=torch.channels_last), schema=schema(36)), IMAGES[1]),
        r"strides of 4.weight: was none, is now \[16, 1, 8, 4\]",
    ),
    ((JOB, TWELVE), (JOB, classification([4, 4, 4])), "number of workers: was 2, is now 3"),
    (
        (JOB, TWELVE),
        (JOB, classification([6, 7])),
        r"rows of each partition: was \[6, 6\], is now \[6, 7\]",
    ),
)
def test_another_training_is_refused_in_words(
    tmp_path: Path, first: tuple[Job, Data], other: tuple[Job, Data], message: str
) -> None:
    run_world(first[0], first[1].shards(), checkpoints=policy(tmp_path / "c"))
    with pytest.raises(ConfigError, match=message):
        run_world(other[0], other[1].shards(), checkpoints=policy(tmp_path / "c"))


def test_a_checkpoint_of_another_kind_is_refused_in_words(tmp_path: Path) -> None:
    save_state(CheckpointStore(str(tmp_path / "c"), keep_last=1), {"epoch": 3})
    with pytest.raises(CheckpointError, match=r"not a checkpoint of a fit: .*training function"):
        run_world(make_job(mlp()), classification([6]).shards(), checkpoints=policy(tmp_path / "c"))


def test_a_checkpoint_of_other_workers_than_it_says_is_refused_in_words(tmp_path: Path) -> None:
    job, data = make_job(mlp(), epochs=2), classification([6, 6])
    run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    saved = CheckpointStore(str(tmp_path / "c"), keep_last=1).newest()
    saved.description["progress"]["positions"].pop()
    with pytest.raises(CheckpointError, match="progress of 1 workers, but says that there were 2"):
        require_progress(ResumedCheckpoint.of(saved), 2, 2)


@pytest.mark.parametrize("data", [None, {}, {"fingerprint": 1}])
def test_a_checkpoint_that_says_nothing_of_its_rows_is_refused_in_words(
    tmp_path: Path, data: dict[str, Any] | None
) -> None:
    store = CheckpointStore(str(tmp_path), keep_last=1)
    progress = Progress.start(1).as_json()
    store.write({}, {"config": {}, "data": data, "progress": progress})
    saved = store.newest()
    assert saved is not None
    present = DataStatistics((3,), (), fingerprint=7)
    with pytest.raises(CheckpointError, match="does not say which rows"):
        require_same_rows(ResumedCheckpoint.of(saved), present, ())


SUMS = WindowSums(rank=0, examples=2, loss_sum=0.5, divisor=2, weight=2, measured={"noise": 2.5})
TOLD: Any = {"metrics": {"f1": [0.5, {"a": 1.0}]}, "measured": {"noise": 2.5}}
SUMMARY = EpochSummary(epoch=1, loss=0.5, examples=3, rounds=2, seconds=1.5, **TOLD)
PRESENT = DataStatistics((3, 4), (ColumnStatistics(smallest=0.5, largest=2.0),), fingerprint=7)
DESCRIPTION = {
    "config": {"model": "here", "workers": 2},
    "data": PRESENT.lasting(),
    "progress": Progress(
        epoch=2,
        rounds=1,
        positions=(Position(epoch=2, step=5, step_of_epoch=1), Position(epoch=2, step=4)),
        sums=(SUMS,),
        history=(SUMMARY,),
    ).as_json(),
}
KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
    "Mapping[str, MetricValue]": (dict,),
    "Mapping[str, float]": (dict,),
}
"""The types that a field may have, by the words of its annotation."""


@settings(max_examples=150)
@given(described=damaged(DESCRIPTION))
def test_whatever_a_checkpoint_says_is_of_its_types_or_an_error_of_the_projects_own(
    tmp_path: Path, described: Any
) -> None:
    """As far as its progress goes: what has been trained, and what was measured."""
    saved: Any = SimpleNamespace(path=str(tmp_path), description=described)
    try:
        resumed = ResumedCheckpoint.of(saved)
        require_same(saved.path, described["config"], DESCRIPTION["config"])
        require_progress(resumed, 5, 2)
        require_same_rows(resumed, PRESENT, (ColumnSpec("x", torch.float32),))
    except SparkDLError:
        return
    told = resumed.progress
    for each in (*told.positions, *told.sums, *told.history):
        for field in fields(each):
            assert isinstance(getattr(each, field.name), KINDS[str(field.type)]), field.name
    assert all(holds_numbers(each.metrics) for each in told.history)
    assert all(holds_numbers(each.measured) for each in (*told.sums, *told.history))


def holds_numbers(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(holds_numbers, value.values()))
    return (
        all(map(holds_numbers, value)) if isinstance(value, list) else type(value) in (int, float)
    )


class Unreadable(io.BytesIO):
    """A file on a disk that has just failed."""

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_a_worker_state_that_cannot_be_read_any_more_is_told_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, data = make_job(mlp(), optimizer=OPTIMIZERS["Adam"]), classification([6])
    run_world(replace(job, epochs=1), data.shards(), checkpoints=policy(tmp_path))
    original, opened = LocalFiles.open_input_file, list[str]()

    def open_input_file(files: LocalFiles, path: str) -> Any:
        opened.append(path)
        # It was whole when it was verified, and when the center was read.
        return Unreadable() if len(opened) == 2 else original(files, path)

    monkeypatch.setattr(LocalFiles, "open_input_file", open_input_file)
    message = r"checkpoint-000001\.safetensors cannot be read: .*Input"
    with pytest.raises(CheckpointError, match=message):
        run_world(replace(job, epochs=2), data.shards(), checkpoints=policy(tmp_path))
