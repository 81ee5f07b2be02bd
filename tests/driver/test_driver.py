"""The driver's half: nothing is left behind by a run, and the outcome is a plain module."""

from __future__ import annotations

import gc
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from by_keyword import run
from every_row import every
from torch import nn
from toys import classification, make_job, mlp, schema, sparkdl_threads
from waiting import eventually

import sparkdl.testing.world
from sparkdl.averager import Averager
from sparkdl.driver import as_builder
from sparkdl.errors import DataError, ModelError, TrainingError, WorkerError
from sparkdl.events import WindowReport
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world
from sparkdl.worker import Job


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Host and port of every averager that a run opens."""
    seen: list[tuple[str, int]] = []
    threads = sparkdl.testing.world._threads

    def spying(*args: Any) -> Any:
        launch = threads(*args)

        def noting(averager: Averager) -> Any:
            seen.append(averager.address.host_and_port)
            return launch(averager)

        return noting

    monkeypatch.setattr(sparkdl.testing.world, "_threads", spying)
    return seen


def assert_nothing_left(addresses: list[tuple[str, int]]) -> None:
    assert eventually(lambda: not sparkdl_threads(), 60), sparkdl_threads()
    for address in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=2)


def test_ten_runs_leave_no_thread_port_or_file_behind(addresses: list[tuple[str, int]]) -> None:
    job, data = make_job(mlp(), epochs=2), classification([9, 6])
    run_world(job, data.shards())
    gc.collect()
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        run_world(job, data.shards())
    assert_nothing_left(addresses)
    gc.collect()
    assert len(addresses) == 11
    assert threading.active_count() == threads
    # gRPC closes some of its sockets late; eleven runs must not keep a file each
    assert len(list(Path("/proc/self/fd").iterdir())) < files + 10


def test_failed_runs_leave_no_thread_and_no_port_behind(addresses: list[tuple[str, int]]) -> None:
    def bad_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    job, data = make_job(mlp(), loss=bad_loss), classification([9, 6, 3])
    for _ in range(5):
        with pytest.raises(WorkerError):
            run_world(job, data.shards())
    assert_nothing_left(addresses)


def test_two_runs_at_once_do_not_disturb_each_other() -> None:
    jobs = [make_job(mlp(seed=seed), epochs=3) for seed in (1, 2)]
    data = classification([14, 9])
    alone = [run_world(job, data.shards()).module.state_dict() for job in jobs]
    together: dict[int, dict[str, torch.Tensor]] = {}

    def work(index: int) -> None:
        together[index] = run_world(jobs[index], data.shards()).module.state_dict()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index in range(2):
        assert all(torch.equal(alone[index][k], together[index][k]) for k in alone[index])


def test_an_error_of_the_launcher_ends_the_run() -> None:
    @contextmanager
    def launch(averager: Averager) -> Any:
        averager.fail(TrainingError("the cluster is gone"))
        yield

    with pytest.raises(TrainingError, match="the cluster is gone"):
        run(make_job(mlp()), 2, launch)
    assert sparkdl_threads() == []


def threads_launch(job: Job, sizes: list[int], directory: Path) -> Any:
    return sparkdl.testing.world._threads(job, classification(sizes).shards(), directory)


def test_the_check_sees_the_statistics_before_any_worker_trains(tmp_path: Path) -> None:
    log: list[object] = []
    job = make_job(mlp(), epochs=2)

    def check(statistics: DataStatistics) -> None:
        log.append(statistics)
        time.sleep(0.3)  # long enough for a worker that does not wait to be seen
        log.append("checked")

    run(job, 2, threads_launch(job, [8, 5], tmp_path), check=check, on_event=log.append)

    statistics = log[0]
    assert isinstance(statistics, DataStatistics)
    assert statistics.shard_rows == (8, 5)
    assert [column.longest for column in statistics.columns] == [6, None]
    assert log[1:3] == ["checked", statistics]
    windows = [event for event in log if isinstance(event, WindowReport)]
    assert sum(window.examples for window in windows) == 2 * 13
    assert not any(isinstance(event, WindowReport) for event in log[:3])


def test_an_error_of_the_check_reaches_the_caller_and_nobody_trains(tmp_path: Path) -> None:
    log: list[object] = []
    job = make_job(mlp())

    def check(statistics: DataStatistics) -> None:
        raise ModelError("the model does not fit these rows")

    with pytest.raises(ModelError, match="does not fit these rows"):
        run(job, 2, threads_launch(job, [8, 5], tmp_path), check=check, on_event=log.append)
    assert log == []
    assert_nothing_left([])


@every(
    ("sizes", "message"),
    [([0, 0], "the DataFrame is empty"), ([1, 0, 1], "2 rows, fewer than the 3 workers")],
)
def test_a_run_without_a_row_for_each_worker_is_refused_and_leaves_nothing(
    sizes: list[int], message: str, tmp_path: Path
) -> None:
    """Before a check, which is spared such rows."""
    checked: list[DataStatistics] = []
    job = make_job(mlp())
    with pytest.raises(DataError, match=message):
        run(job, len(sizes), threads_launch(job, sizes, tmp_path), check=checked.append)
    assert checked == []
    assert_nothing_left([])
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_drivers_callback_reaches_the_caller_and_stops_the_workers() -> None:
    def on_event(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_world(make_job(mlp(), epochs=50), classification([40, 40]).shards(), on_event=on_event)
    assert_nothing_left([])


def test_the_outcome_is_in_evaluation_mode_and_has_a_history() -> None:
    outcome = run_world(make_job(mlp(), epochs=2), classification([8]).shards())
    assert not outcome.module.training
    assert [row.epoch for row in outcome.history] == [1, 2]
    assert all(row.seconds > 0 for row in outcome.history)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_outcome_keeps_the_models_dtype(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    job = make_job(model, schema=schema(dtype=dtype), strategy=ParameterAveraging(period=2))
    outcome = run_world(job, classification([8, 8]).shards())
    assert {p.dtype for p in outcome.module.parameters()} == {dtype}


def test_an_instance_is_built_as_a_copy_and_stays_untouched() -> None:
    model = mlp()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first, second = as_builder(model)(), as_builder(model)()
    assert first is not model
    assert first is not second
    outcome = run_world(make_job(model, epochs=2), classification([8, 8]).shards())
    assert outcome.module is not model
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


class Sparse(nn.Linear):
    sparse = True  # as torch's embeddings say it


@every(
    ("model", "optimizer", "message"),
    [
        (mlp(), torch.optim.LBFGS, r"'closure'\. Use one that steps without a clos"),
        # In torch's words alone, or told what to set where the model has sparse gradients.
        (mlp(), torch.optim.SparseAdam, r"please consider Adam instead$"),
        (
            nn.Sequential(Sparse(6, 3)).double(),
            torch.optim.SparseAdam,
            r"instead\. An optimizer for .*average_optimizer_state=False\)$",
        ),
    ],
)
def test_an_optimizer_that_cannot_train_the_model_is_refused(
    model: nn.Module, optimizer: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        run_world(make_job(model, optimizer=optimizer), classification([8]).shards())
