"""Workers that are added between epochs, and others that do not come back."""

from __future__ import annotations

import copy
import itertools
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_keyword import run
from every_row import every
from interruptions import policy, same_bits
from observed import Free, Heard
from support.faults import Proxy
from torch import nn
from toys import SGD, Data, classification, make_job, mlp, relative_error, union, windows_by_hand
from virtual_time import VirtualClock
from waiting import WAIT_S, eventually

from sparkdl.averager import Averager
from sparkdl.averager.run_events import Progress
from sparkdl.callbacks import Callback, Training
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.driver import Outcome, serving
from sparkdl.errors import ConfigError, DisconnectedError, WorkerError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.protocols import ColumnSpec
from sparkdl.report import TrainingSummary
from sparkdl.strategies import ElasticAveraging, OuterOptimizer, ParameterAveraging
from sparkdl.testing import _places, _processes, _threads, _train_in_thread, batches_of
from sparkdl.worker import Job
from sparkdl.worker.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("nobody_stays")

ROWS = 48
DATA = classification([ROWS])
HELD = np.arange(ROWS) % 3 == 0


def dealt(workers: int, data: Data = DATA) -> Data:
    share, left_over = divmod(len(data.targets), workers)
    return replace(data, sizes=tuple(share + (rank < left_over) for rank in range(workers)))


def launched(job: Job, directory: Path, ranks_as: Any = _threads) -> Any:
    """Starts as many workers as the averager has, on all rows."""

    def launch(averager: Averager) -> Any:
        return ranks_as(job, dealt(averager.world_size).shards(), directory)(averager)

    return launch


def trained(
    job: Job,
    directory: Path,
    free: Sequence[int],
    *,
    start: int = 2,
    most: int = 8,
    ranks_as: Any = _threads,
    **options: Any,
) -> Outcome:
    job = replace(job, max_workers=most)
    return run(job, start, launched(job, directory, ranks_as), slots=Free(free), **options)


class CountsInWholeNumbers(torch.optim.SGD):
    """Takes smaller and smaller steps, by a counter that is no part of the mean."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            taken = self.state[parameter].setdefault("taken", torch.zeros((), dtype=torch.int64))
            taken += 1
            parameter.grad.div_(float(taken))
        return super().step(closure)


def one_process(workers: list[int], optimizer: Any, scheduler: Any = None) -> nn.Module:
    """Trained, epoch by epoch, on the minibatches of so many workers put together."""
    module = copy.deepcopy(mlp()).train()
    steps = optimizer(module.parameters())
    schedule = scheduler(steps) if scheduler else None
    for epoch, count in enumerate(workers, start=1):
        for of, ranks in windows_by_hand(dealt(count), epoch):
            if of != epoch:
                continue
            features, targets = union([part for window in ranks.values() for part in window])
            steps.zero_grad()
            outputs = module(torch.from_numpy(features))
            nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
            steps.step()
            if schedule:
                schedule.step()
    return module


def test_an_epoch_with_other_workers_trains_as_one_process_on_their_minibatches(
    tmp_path: Path,
) -> None:
    """The optimizer's state and a schedule by the step go on where they were."""
    counting = CountsInWholeNumbers
    halving = partial(torch.optim.lr_scheduler.StepLR, step_size=7, gamma=0.5)
    job = make_job(mlp(), optimizer=counting, epochs=4, scheduler=halving, scheduler_every="step")
    outcome = trained(job, tmp_path, [2, 0, 2])
    assert [row.workers for row in outcome.history] == [2, 4, 4, 6]
    assert [row.examples for row in outcome.history] == [ROWS] * 4

    oracle = one_process([2, 4, 4, 6], counting, halving)
    assert relative_error(outcome.module, oracle) < 1e-6


def test_the_same_numbers_of_workers_give_the_same_bits_and_others_do_not(tmp_path: Path) -> None:
    """Also if a checkpoint is continued by another number, with random numbers of its own."""
    dropping = nn.Sequential(nn.Dropout(0.3), mlp())
    job = make_job(dropping, epochs=3, strategy=ParameterAveraging(3))
    of = partial(trained, directory=tmp_path, ranks_as=_processes)
    first, second, other = (of(job, free=free) for free in ([1], [1], [0, 1]))
    assert same_bits(first, second)
    assert not same_bits(first, other)
    saved = policy(tmp_path / "checkpoints", every_epochs=1)
    of(replace(job, epochs=1), free=[], checkpoints=saved)
    assert same_bits(of(job, free=[], start=3, checkpoints=saved), first)


class KeepsObjects(CountsInWholeNumbers):
    """Keeps what only pickle could take along."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["hook"] = object()
        return super().step(closure)


def test_an_optimizer_that_others_could_not_go_on_with_is_refused(tmp_path: Path) -> None:
    """Its counts would start anew in their midst."""
    with pytest.raises(WorkerError, match=r"rank \d.*with maxWorkers.*KeepsObjects keeps some"):
        trained(make_job(mlp(), optimizer=KeepsObjects, epochs=2), tmp_path, [2])
    own = ParameterAveraging(1, average_optimizer_state=False)
    job = make_job(mlp(), optimizer=KeepsObjects, epochs=2, strategy=own)
    assert [row.workers for row in trained(job, tmp_path, [2]).history] == [2, 4]


@every(
    "changes",
    [
        {"strategy": ElasticAveraging(period=2)},
        {"strategy": OuterOptimizer(period=2), "optimizer": partial(torch.optim.Adam, lr=0.01)},
        {"strategy": ParameterAveraging(2), "optimizer": CountsInWholeNumbers},
    ],
)
def test_a_checkpoint_of_an_epochs_end_is_continued_as_if_workers_had_been_added(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    job = make_job(mlp(), epochs=3, **changes)
    whole = trained(job, tmp_path, [2])
    saved = policy(tmp_path / "checkpoints", every_epochs=1)
    trained(replace(job, epochs=1), tmp_path, [], checkpoints=saved)
    resumed = trained(job, tmp_path, [], start=4, checkpoints=saved)
    assert [row.workers for row in resumed.history] == [2, 4, 4]
    assert same_bits(resumed, whole)


def test_others_go_on_from_any_workers_state_if_the_first_was_lost_as_it_was_saved(
    tmp_path: Path,
) -> None:
    job = make_job(mlp(), epochs=3, optimizer=CountsInWholeNumbers)
    whole = trained(job, tmp_path, [2])
    saved = policy(tmp_path / "checkpoints", every_epochs=1)
    trained(replace(job, epochs=1), tmp_path, [], checkpoints=saved)
    store = CheckpointStore(saved.path, keep_last=2)
    newest = store.newest()
    assert newest is not None
    others = {
        name: piece
        for name, piece in newest.contents.items()
        if name not in ("rank-00000", "sha256")
    }
    with store.held():
        store.write(others, newest.description)
    assert same_bits(trained(job, tmp_path, [], start=4, checkpoints=saved), whole)


def with_held_out_rows(job: Job, directory: Path) -> tuple[Job, Any]:
    """Every third row is held out; and what starts as many workers as an averager has."""
    job = replace(job, schema=replace(job.schema, validation=ColumnSpec("held", torch.bool)))

    def launch(averager: Averager) -> Any:
        return _threads(job, held_out_shards(averager.world_size), directory)(averager)

    return job, launch


def held_out_shards(workers: int) -> list[Any]:
    """All rows, dealt to workers; every third is held out."""
    held = np.arange(ROWS) % 3 == 0
    bounds = np.cumsum([0, *dealt(workers).sizes])
    return [
        batches_of(
            10,
            features=DATA.features[start:stop],
            label=DATA.targets[start:stop],
            held=held[start:stop],
        )
        for start, stop in itertools.pairwise(bounds)
    ]


def test_held_out_rows_are_validated_with_once_an_epoch_and_schedules_follow_them(
    tmp_path: Path,
) -> None:
    halving = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
    plain = make_job(mlp(), epochs=4, max_workers=8, scheduler=halving)
    job, launch = with_held_out_rows(plain, tmp_path)
    notes = Notes()
    outcome = run(job, 2, launch, slots=Free([2, 0, 1]), callbacks=[notes])
    assert [row.workers for row in outcome.history] == [2, 4, 4, 5]
    assert [row.validation_examples for row in outcome.history] == [ROWS // 3] * 4
    assert [epoch for kind, epoch in notes.told if kind == "epoch"] == [1, 2, 3, 4]
    with torch.no_grad():
        outputs = outcome.module(torch.from_numpy(DATA.features[HELD]))
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(DATA.targets[HELD]))
    assert outcome.history[-1].validation_loss == pytest.approx(loss.item())

    saved = policy(tmp_path / "checkpoints", every_epochs=1)
    short, launch_short = with_held_out_rows(replace(plain, epochs=1), tmp_path)
    run(short, 2, launch_short, slots=Free([]), checkpoints=saved)
    # The first epoch is validated again, and decided on.
    resumed = run(job, 4, launch, slots=Free([0, 0, 1]), checkpoints=saved)
    for mine, whole in zip(resumed.history, outcome.history, strict=True):
        assert mine.validation_loss == pytest.approx(whole.validation_loss)
        assert mine.workers == whole.workers


def test_a_checkpoint_from_the_middle_of_an_epoch_is_continued_by_as_many_until_it_ends(
    tmp_path: Path,
) -> None:
    class StopsInTheMiddle(Callback):
        rounds = 8

        def on_round(self, training: Training, reports: Sequence[WindowReport]) -> None:
            self.rounds -= 1
            if not self.rounds:
                training.stop("enough")

    job = make_job(mlp(), epochs=3)
    saved = policy(tmp_path / "checkpoints", every_rounds=1)
    trained(job, tmp_path, [], checkpoints=saved, callbacks=[StopsInTheMiddle()])
    with pytest.raises(ConfigError, match="middle of an epoch that 2 workers began"):
        trained(job, tmp_path, [], start=1, most=1, checkpoints=saved)
    resumed = trained(job, tmp_path, [2], start=4, checkpoints=saved)
    assert [row.workers for row in resumed.history] == [2, 2, 4]
    assert [row.examples for row in resumed.history] == [ROWS] * 3


def test_other_rows_and_an_unchanging_run_do_not_continue_one_whose_workers_change(
    tmp_path: Path,
) -> None:
    job = make_job(mlp(), epochs=2)
    saved = policy(tmp_path / "checkpoints", every_epochs=1)
    trained(replace(job, epochs=1), tmp_path, [], checkpoints=saved)
    with pytest.raises(ConfigError, match="number of workers"):
        run(job, 2, launched(job, tmp_path), checkpoints=saved)
    job, other = replace(job, max_workers=8), dealt(4, classification([ROWS], seed=1))
    with pytest.raises(ConfigError, match="fingerprint"):
        run(job, 4, _threads(job, other.shards(), tmp_path), checkpoints=saved, slots=Free([]))


class Notes(Callback):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def on_start(self, training: Training, statistics: DataStatistics) -> None:
        self.told.append(("start", len(statistics.shard_rows)))

    def on_epoch(self, training: Training, summary: EpochSummary) -> None:
        self.told.append(("epoch", summary.epoch))

    def on_end(self, training: Training, error: BaseException | None) -> None:
        self.told.append(("end", len(training.history)))


def test_callbacks_hear_of_each_epoch_once_and_may_end_the_run_where_it_would_grow(
    tmp_path: Path,
) -> None:
    job, notes = make_job(mlp(), epochs=3), Notes()
    trained(job, tmp_path, [1, 1], callbacks=[notes])
    assert notes.told == [("start", 2), ("epoch", 1), ("epoch", 2), ("epoch", 3), ("end", 3)]

    class Stops(Callback):
        def on_epoch(self, training: Training, summary: EpochSummary) -> None:
            training.stop("enough")

    stopped = trained(job, tmp_path, [1, 1], callbacks=[Stops()])
    assert [row.workers for row in stopped.history] == [2]
    assert stopped.stopped == "enough"


def test_the_record_has_all_that_took_part(tmp_path: Path) -> None:
    job = make_job(mlp(), epochs=2)
    recording = trained(job, tmp_path, [3]).recording
    assert recording.world_size == len(recording.hosts) == 5
    assert recording.rows.sum() == 2 * ROWS
    assert np.count_nonzero(recording.seconds.sum(axis=1)) == 5
    assert recording.outcome == "finished"


def test_no_more_workers_than_allowed_are_added(tmp_path: Path) -> None:
    outcome = trained(make_job(mlp(), epochs=3), tmp_path, [9, 9], most=3)
    assert [row.workers for row in outcome.history] == [2, 3, 3]


def test_a_worker_that_does_not_come_back_costs_the_epoch_that_it_was_lost_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others train that epoch from its start; nothing of the attempt before is in the model."""
    monkeypatch.setattr(serving, "LOOK_S", 0.02)
    job = make_job(mlp(), epochs=3, max_failures=9, deadline_s=1e9, max_workers=3)
    clock, slots, seen = VirtualClock(), Free([]), list[int]()

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        workers = averager.world_size
        seen.append(workers)
        shards = dealt(workers).shards()
        if workers < 3:
            with _threads(job, shards, tmp_path)(averager):
                yield
            return
        with (
            Proxy(averager.address) as proxy,
            _last_through(proxy, job, shards, tmp_path, averager),
        ):

            def leave() -> None:
                assert eventually(lambda: averager.progress.epoch == 2 and averager.progress.rounds)
                proxy.__exit__(None, None, None)

            leaving = threading.Thread(target=leave)
            leaving.start()
            with clock.running_once(averager, lambda: bool(averager.losses)):
                yield
            leaving.join(WAIT_S)

    outcome = run(job, 3, launch, slots=slots, now=clock)
    assert seen == [3, 2]
    summary = TrainingSummary(outcome.recording)
    assert summary.workers["rows"].tolist() == [24, 24, 0]
    summary.save_report(str(tmp_path / "report.html"))
    assert [row.workers for row in outcome.history] == [3, 2, 2]
    assert [row.examples for row in outcome.history] == [ROWS] * 3
    assert relative_error(outcome.module, one_process([3, 2, 2], SGD)) < 1e-6


@pytest.mark.parametrize(
    ("held_out", "after", "workers", "started"),
    [(False, 2, [3, 3], [3]), (True, 1, [2, 2], [3, 2])],
    ids=["the last epoch counts", "an epoch not yet validated is trained again"],
)
def test_callbacks_and_history_have_the_same_numbers_if_a_worker_is_lost_after_its_last_window(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    held_out: bool,
    after: int,
    workers: list[int],
    started: list[int],
) -> None:
    monkeypatch.setattr(serving, "LOOK_S", 0.02)
    job = make_job(mlp(), epochs=2, max_failures=9, deadline_s=1e9, max_workers=3)
    clock, heard, proxies, seen = VirtualClock(), Heard(), list[Proxy](), list[int]()
    reports = TrainingLoop._report_validation

    def leaves(loop: TrainingLoop, epoch: int) -> None:
        if loop.run.rank == 2 and epoch == after:
            proxies[0].__exit__(None, None, None)
            raise DisconnectedError("lost after its last window")
        reports(loop, epoch)

    monkeypatch.setattr(TrainingLoop, "_report_validation", leaves)
    if held_out:
        job = replace(job, schema=replace(job.schema, validation=ColumnSpec("held", torch.bool)))

    def shards_of(workers: int) -> list[Any]:
        return held_out_shards(workers) if held_out else dealt(workers).shards()

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        shards = shards_of(averager.world_size)
        seen.append(averager.world_size)
        if averager.world_size < 3:
            with _threads(job, shards, tmp_path)(averager):
                yield
            return
        with (
            Proxy(averager.address) as proxy,
            _last_through(proxy, job, shards, tmp_path, averager),
        ):
            proxies.append(proxy)
            with clock.running_once(averager, lambda: bool(averager.losses)):
                yield

    outcome = run(job, 3, launch, slots=Free([]), now=clock, callbacks=[heard])
    assert outcome.history == heard.told
    assert [row.workers for row in outcome.history] == workers
    assert heard.recorded == [[1], [1, 2]]
    assert seen == started


def test_sigterm_as_the_number_changes_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    class Terminates(Callback):
        def on_epoch(self, training: Training, summary: EpochSummary) -> None:
            if summary.epoch == 2:
                signal.raise_signal(signal.SIGTERM)

    job, path = make_job(mlp(), epochs=500), tmp_path / "checkpoints"
    with pytest.raises(SystemExit):
        trained(job, tmp_path, [0, 1], checkpoints=policy(path), callbacks=[Terminates()])
    resumed = trained(replace(job, epochs=4), tmp_path, [], checkpoints=policy(path))
    assert [row.examples for row in resumed.history] == [ROWS] * 4


@contextmanager
def _last_through(
    proxy: Proxy, job: Job, shards: list[Any], directory: Path, averager: Averager
) -> Iterator[None]:
    """All workers, the last of which reaches the averager by a proxy, and is not started again."""
    first = _threads(job, shards[:-1], directory)
    place = _places(len(shards), directory)[-1]
    last = threading.Thread(
        target=_train_in_thread, args=(job, place, proxy.address, shards[-1]), daemon=True
    )
    last.start()
    with first(averager):
        yield
    last.join(WAIT_S)


def test_what_a_checkpoint_says_of_where_its_workers_began_is_checked() -> None:
    told = Progress.start(2).as_json()
    for since in ({"epoch": 2}, {"epoch": 1, "step_of_epoch": 3}):
        with pytest.raises(TypeError, match="since"):
            Progress.from_json({**told, "since": since})
