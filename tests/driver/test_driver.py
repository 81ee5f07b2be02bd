"""The driver's half: nothing is left behind, a plain module comes out, and a checkpoint goes on."""

from __future__ import annotations

import gc
import socket
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import hypothesis.strategies as st
import pytest
import torch
from by_keyword import run
from every_row import every_row
from hypothesis import given, settings
from interruptions import OPTIMIZERS, die_after, policy, same_bits, save_and_stop
from misbehaving import resume_after
from torch import Tensor, nn
from toys import classification, held_out, held_out_schema, make_job, mlp, schema, sparkdl_threads
from waiting import eventually

import sparkdl.testing
from sparkdl.averager import Averager
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.driver import Outcome, as_builder
from sparkdl.errors import DataError, ModelError, TrainingError, WorkerError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.feed.shards import DataStatistics
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import _processes, _threads, run_world
from sparkdl.worker import Job


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Host and port of every averager that a run opens."""
    seen: list[tuple[str, int]] = []
    threads = sparkdl.testing._threads

    def spying(*args: Any) -> Any:
        launch = threads(*args)

        def noting(averager: Averager) -> Any:
            seen.append(averager.address.host_and_port)
            return launch(averager)

        return noting

    monkeypatch.setattr(sparkdl.testing, "_threads", spying)
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
    alone = [run_world(job, data.shards()) for job in jobs]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda job: run_world(job, data.shards()), jobs))
    assert all(map(same_bits, alone, together))


def test_an_error_of_the_launcher_ends_the_run() -> None:
    @contextmanager
    def launch(averager: Averager) -> Any:
        averager.fail(TrainingError("the cluster is gone"))
        yield

    with pytest.raises(TrainingError, match="the cluster is gone"):
        run(make_job(mlp()), 2, launch)
    assert sparkdl_threads() == []


def threads_launch(job: Job, sizes: list[int], directory: Path) -> Any:
    return sparkdl.testing._threads(job, classification(sizes).shards(), directory)


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


@every_row(([0, 0], "the DataFrame is empty"), ([1, 0, 1], "2 rows, fewer than the 3 workers"))
def test_a_run_without_a_row_for_each_worker_is_refused_and_leaves_nothing(
    tmp_path: Path, sizes: list[int], message: str
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


def test_the_attributes_of_an_instances_parameters_reach_the_optimizer() -> None:
    def grouped(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups: dict[float, list[nn.Parameter]] = {}
        for _, each in named_parameters:
            groups.setdefault(getattr(each, "rate", 0.0), []).append(each)
        return torch.optim.SGD([{"params": each, "lr": rate} for rate, each in groups.items()])

    model = nn.Linear(6, 3).double()
    model.weight.rate = 0.5  # type: ignore[assignment]
    model.weight.partner = model.bias  # type: ignore[assignment]
    copied: Any = as_builder(model)()
    assert copied.weight.partner is copied.bias
    job = make_job(model, optimizer=grouped)
    trained = run_world(job, classification([8, 8]).shards()).module
    assert not torch.equal(trained.weight, model.weight)
    assert torch.equal(trained.bias, model.bias)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_an_instances_parameters_which_no_copy_has_are_refused(kind: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 3))
    getattr(model[0].weight, kind)(lambda gradient: None)
    with pytest.raises(ModelError, match=r"'0\.weight' .* has a hook .*registers the hook as it"):
        as_builder(model)


class Sparse(nn.Linear):
    sparse = True  # as torch's embeddings say it


@every_row(
    (mlp(), torch.optim.LBFGS, r"'closure'\. Use one that steps without a clos"),
    # In torch's words alone, or told what to set where the model has sparse gradients.
    (mlp(), torch.optim.SparseAdam, r"please consider Adam instead$"),
    (
        nn.Sequential(Sparse(6, 3)).double(),
        torch.optim.SparseAdam,
        r"instead\. An optimizer for .*average_optimizer_state=False\)$",
    ),
)
def test_an_optimizer_that_cannot_train_the_model_is_refused(
    model: nn.Module, optimizer: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        run_world(make_job(model, optimizer=optimizer), classification([8]).shards())


cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [22, 14, 5]
"""Of batches of 4 in windows of 2, so 3, 2 and 1 windows an epoch."""


@settings(max_examples=20)
@given(
    windows=st.integers(0, 23),
    stop=st.sampled_from([die_after, save_and_stop]),
    every_rounds=st.sampled_from([None, 1, 2]),
)
@pytest.mark.nightly
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
    saved_windows = sum(each["contributions"] for each in progress["sums"])
    assert 12 * len(progress["history"]) + saved_windows >= windows


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
def test_a_layer_that_is_first_used_late_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, windows: int
) -> None:
    job = make_job(
        LateLayer(), optimizer=OPTIMIZERS["Adam"], strategy=ParameterAveraging(2), epochs=4
    )
    data = classification(SIZES)
    whole = run_world(job, data.shards())
    assert not torch.equal(
        whole.module.get_parameter("late.0.weight"), LateLayer().late.get_parameter("0.weight")
    )
    assert same_bits(resume_after(windows, job, data, tmp_path), whole)


def test_never_resuming_starts_anew_and_later_runs_go_on_from_that(tmp_path: Path) -> None:
    job, data = make_job(mlp(), epochs=2), classification([12, 8])
    run_world(make_job(mlp(), epochs=4), data.shards(), checkpoints=policy(tmp_path / "c"))
    anew = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c", resume="never"))
    assert len(anew.history) == 2
    again = run_world(job, data.shards(), checkpoints=policy(tmp_path / "c"))
    assert again.history == anew.history


def test_of_its_own_a_training_resumes_only_what_it_has_written(tmp_path: Path) -> None:
    data, path = classification([12, 8]), tmp_path / "c"
    run_world(make_job(mlp(), epochs=2), data.shards(), checkpoints=policy(path))
    own = policy(path, resume="own", training="mine")
    other = make_job(mlp(), epochs=2, optimizer=OPTIMIZERS["Adam"])
    anew = run_world(other, data.shards(), checkpoints=own)
    assert same_bits(anew, run_world(other, data.shards()))
    again = run_world(other, data.shards(), checkpoints=own)
    assert again.history == anew.history


HELD = held_out([20, 9, 6])
"""Of batches of 4: 4, 2 and 1 steps an epoch."""


def validated_job(strategy: Strategy[Any]) -> Job:
    return make_job(mlp(), schema=held_out_schema(), epochs=3, strategy=strategy)


def history_of(outcome: Outcome) -> list[EpochSummary]:
    return [replace(epoch, seconds=0.0) for epoch in outcome.history]


def losses_of(outcome: Outcome) -> list[float | None]:
    return [loss for each in outcome.history for loss in (each.loss, each.validation_loss)]


@pytest.mark.parametrize(
    ("strategy", "windows", "every_rounds"),
    [
        (ParameterAveraging(2), 8, None),
        (ParameterAveraging(1), 18, 1),
        (GradientAllReduce(), 6, None),
    ],
    ids=["averaging", "in-the-middle", "all-reduce"],
)
def test_the_losses_on_held_out_rows_are_those_of_a_training_never_interrupted(
    tmp_path: Path, strategy: Strategy[Any], windows: int, every_rounds: int | None
) -> None:
    job, path, among = validated_job(strategy), tmp_path / "c", strategy.needs.collective
    ranks_as: Any = "processes" if among else "threads"
    whole = run_world(job, HELD.shards(), ranks_as=ranks_as)
    launch = _processes if among else _threads
    assert die_after(job, HELD, path, windows, launch, every_rounds=every_rounds)
    resumed = run_world(job, HELD.shards(), ranks_as=ranks_as, checkpoints=policy(path))
    assert all(epoch.validation_examples == 12 for epoch in whole.history)
    if among:  # gloo adds up three ranks' gradients in an order of its own
        assert losses_of(resumed) == pytest.approx(losses_of(whole), rel=1e-12)
    else:
        assert history_of(resumed) == history_of(whole)


def test_a_training_that_had_ended_tells_of_its_last_epoch_too(tmp_path: Path) -> None:
    job, checkpoints = validated_job(ParameterAveraging(2)), policy(tmp_path)
    whole = run_world(job, HELD.shards(), checkpoints=checkpoints)
    again = run_world(job, HELD.shards(), checkpoints=checkpoints)
    assert history_of(again) == history_of(whole)
