"""Whole runs that go wrong: the error names who, where and when, and everybody leaves."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
import torch
from by_keyword import open_averager, run
from misbehaving import Raises, marked, ranks, started
from torch import Tensor, nn
from toys import classification, make_job, mlp
from virtual_time import VirtualClock
from waiting import WAIT_S, eventually

from sparkdl.averager import Averager, ServiceAddress
from sparkdl.errors import (
    DisconnectedError,
    NonFiniteError,
    TrainingError,
    WorkerError,
    WorkerLostError,
)
from sparkdl.protocols import Batch
from sparkdl.strategies import ParameterAveraging
from sparkdl.strategies.base import Run
from sparkdl.testing import run_world
from sparkdl.worker import Placement, report_failure, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("nobody_stays")


class ForgetsItsLastWindow(ParameterAveraging):
    """On rank 1, in the second epoch."""

    def end_epoch(self, run: Run, state: Any) -> None:
        if (run.rank, run.epoch) != (1, 2):
            super().end_epoch(run, state)


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_strategy_that_forgets_its_last_window_is_told_so(epochs: int) -> None:
    job = make_job(mlp(), strategy=ForgetsItsLastWindow(period=2), epochs=epochs, deadline_s=600.0)
    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1, epoch 2, step 6: ForgetsItsLastWindow ended"):
        run_world(job, classification([12, 12]).shards())
    assert time.monotonic() - started < 150


class ClosesItsEpochTwice(ParameterAveraging):
    """Where it ends with a whole period, ``after_step`` has closed the window already."""

    def after_step(self, run: Run, state: Any, batch: Batch) -> None:
        self.exchange(run, state, last=batch.last)


def test_a_strategy_that_closes_its_epoch_twice_is_told_so() -> None:
    job = make_job(mlp(), strategy=ClosesItsEpochTwice(), epochs=2, deadline_s=60.0)
    words = r"window of epoch 1, but the run is in epoch 2\. A stra"
    with pytest.raises(TrainingError, match=words):
        run_world(job, classification([12, 12]).shards())


class Before(nn.Module):
    """Does something with the rows before each forward pass."""

    def __init__(self, deed: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.net, self.deed = mlp(), deed

    def forward(self, features: Tensor) -> Tensor:
        self.deed(features)
        return self.net(features)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ...")],
    ids=["python", "torch"],
)
def test_want_of_memory_on_a_worker_names_the_settings(error: Exception) -> None:
    def fail(_: Tensor) -> None:
        raise error

    with pytest.raises(WorkerError, match=r"rank 0, .*\n.*raise spark.executor.memoryOverhead"):
        run_world(make_job(Before(fail)), classification([8]).shards())


def test_a_module_that_is_not_there_comes_with_how_modules_travel() -> None:
    imports = Before(lambda _: importlib.import_module("a_module_that_nobody_has"))
    with pytest.raises(WorkerError, match=r"a_module_that_nobody_has'\n.*addPyFile"):
        run_world(make_job(imports), classification([8]).shards())


def test_an_error_ends_the_run_without_a_deadline_having_passed() -> None:
    job, shards = make_job(Raises(), deadline_s=60), marked([12, 12, 12], 0).shards()
    with pytest.raises(WorkerError):
        run(job, 3, ranks(job, shards, {0: 0, 1: 1, 2: 2}), now=VirtualClock())


def test_an_error_while_building_the_model_on_a_worker_is_the_workers_error() -> None:
    def build() -> nn.Module:
        if threading.current_thread() is not threading.main_thread():
            raise LookupError("no weights on this host")
        return mlp()

    with pytest.raises(WorkerError, match="LookupError: no weights on this host") as caught:
        run_world(make_job(build), classification([4, 4]).shards())
    assert (caught.value.epoch, caught.value.step) == (0, 0)
    assert "in build" in caught.value.worker_traceback


@pytest.mark.parametrize("part", ["loss", "optimizer"])
def test_an_error_in_loss_or_optimizer_is_the_workers_error(part: str) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("in the loss")

    main = threading.main_thread()

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if threading.current_thread() is not main:  # the driver steps a replica of its own
                raise KeyError("in the optimizer")

    changes = {"loss": loss} if part == "loss" else {"optimizer": partial(Optimizer, lr=0.1)}
    with pytest.raises(WorkerError, match=f"KeyError: 'in the {part}'"):
        run_world(make_job(mlp(), **changes), classification([4, 4]).shards())


def test_an_error_in_the_source_of_rows_is_the_workers_error() -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield from classification([4]).shards()[0]
        raise OSError("the upstream broke")

    with pytest.raises(WorkerError, match="OSError: the upstream broke"):
        run_world(make_job(mlp()), [rows(), classification([4]).shards()[0]])  # type: ignore[list-item]


def test_a_diverged_loss_is_a_non_finite_error() -> None:
    data = classification([8, 8])
    data.features[:] *= 1e8
    job = make_job(nn.Linear(6, 3).double(), optimizer=partial(torch.optim.SGD, lr=1e302), epochs=5)
    with pytest.raises(NonFiniteError, match="learning rate"):
        run_world(job, data.shards())


class EndsOnArrival:
    """A shard that ends the process which unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


@pytest.mark.gate
def test_a_process_that_ends_before_it_joins_is_noticed_at_once() -> None:
    shard = classification([8]).shards()[0]
    started = time.monotonic()
    with pytest.raises(WorkerLostError, match="rank 1 exited with code 3"):
        run_world(make_job(mlp()), [shard, EndsOnArrival()], ranks_as="processes")
    assert time.monotonic() - started < 55


def test_a_replica_of_another_shape_ends_the_run() -> None:
    def build() -> nn.Module:
        is_rank = threading.current_thread() is not threading.main_thread()
        return mlp(classes=5) if is_rank else mlp()

    with pytest.raises(TrainingError, match="same model"):
        run_world(make_job(build, deadline_s=60), classification([4, 4]).shards())


def test_a_worker_that_could_not_start_says_why() -> None:
    job = make_job(mlp(), deadline_s=60)

    def launch(averager: Averager) -> Any:
        error = ImportError("No module named 'timm'")
        reporter = threading.Thread(target=report_failure, args=(averager.address, 1, error))
        return started([reporter], WAIT_S)

    with pytest.raises(WorkerError, match=r"rank 1.*ImportError: No module named 'timm'") as caught:
        run(job, 2, launch)
    assert (caught.value.rank, caught.value.epoch, caught.value.step) == (1, 0, 0)


class Drawing(nn.Module):
    """Keeps what its rank begins with, and a mask that it draws, in a file of its process."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net, self.folder = nn.Linear(6, 3).double(), str(folder)

    def forward(self, features: Tensor) -> Tensor:
        drawn = {"weight": self.net.weight, "mask": nn.functional.dropout(torch.ones(64))}
        torch.save(drawn, Path(self.folder, str(os.getpid())))
        return self.net(features)


def test_replicas_start_equal_and_draw_different_dropout_masks(tmp_path: Path) -> None:
    run_world(make_job(Drawing(tmp_path)), classification([4, 4]).shards(), ranks_as="processes")
    (tmp_path / str(os.getpid())).unlink(missing_ok=True)  # the driver tries a step
    first, second = (torch.load(path) for path in tmp_path.iterdir())
    assert torch.equal(first["weight"], second["weight"])
    assert not torch.equal(first["mask"], second["mask"])


def test_a_worker_stopped_by_the_averager_returns_without_raising() -> None:
    job = make_job(mlp(), deadline_s=60)
    returned: list[bool] = []
    with open_averager((), [], 2, job.strategy.wire_format, deadline_s=60) as averager:

        def work() -> None:
            train(job, Placement(rank=0, directory=Path("/tmp")), averager.address, [])
            returned.append(True)

        worker = threading.Thread(target=work)
        worker.start()
        assert eventually(lambda: averager.anyone_joined)
        averager.fail(TrainingError("changed our mind"))
        worker.join(WAIT_S)
    assert returned == [True]


def test_a_worker_that_comes_after_the_run_was_closed_says_so_at_once() -> None:
    with open_averager((), [], 1, make_job(mlp()).strategy.wire_format, deadline_s=60) as averager:
        address: ServiceAddress = averager.address
    started, threads = time.monotonic(), torch.get_num_threads()
    place = Placement(rank=0, directory=Path("/tmp"), threads=threads + 1)
    with pytest.raises(DisconnectedError, match=r"rank 0 cannot reach the averager at tcp://"):
        train(make_job(mlp(), deadline_s=60), place, address, [])
    assert time.monotonic() - started < 30
    assert torch.get_num_threads() == threads
