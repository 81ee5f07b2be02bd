"""A function or script written for torchrun runs on Spark's executors as it is."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from pyspark.ml.torch.distributor import TorchDistributor as PysparksDistributor
from pyspark.sql import SparkSession
from subprocesses import run_python

import sparkdl
from sparkdl import TorchDistributor
from sparkdl.errors import ConfigError, TrainingError, WorkerError, WorkerLostError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TORCHRUN_SCRIPT = """
import argparse
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int)
    chosen = options.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(chosen.steps):
        x = torch.randn(8, 4, generator=generator)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("weights", [round(v, 4) for v in model.module.weight.flatten().tolist()])
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def train_with_ddp(steps: int, *, lr: float = 0.1) -> list[float]:
    """As one writes it for torchrun."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        x = inputs(dist.get_rank(), step)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    return model.module.weight.flatten().tolist()


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + step))


def train_alone(steps: int, ranks: int) -> list[float]:
    """The same in one process, on all ranks' rows."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.cat([inputs(rank, step) for rank in range(ranks)])
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.weight.flatten().tolist()


@pytest.mark.gate
def test_a_function_that_exits_with_zero_returns_none_and_other_codes_are_errors(
    spark: SparkSession,
) -> None:
    def leave(codes: list[Any]) -> str:
        sys.exit(codes[sparkdl.current_worker().rank])

    assert sparkdl.run(leave, [0, None], num_workers=2) == [None, None]
    with pytest.raises(WorkerError, match=r"rank 1 .*SystemExit: out of data"):
        sparkdl.run(leave, [0, "out of data"], num_workers=2)


@pytest.mark.gate
def test_a_thread_of_pythons_own_runs_in_the_applications_session(spark: SparkSession) -> None:
    """No session is active there."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(sparkdl.run, int, "7", num_workers=1).result(120) == [7]


def sum_in_groups_one_after_another() -> list[float]:
    sums = []
    for _ in range(3):
        dist.init_process_group("gloo", timeout=timedelta(minutes=1))
        total = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(total)
        sums.append(total.item())
        dist.destroy_process_group()
    return sums


@pytest.mark.gate
def test_a_function_may_destroy_its_group_and_make_another(spark: SparkSession) -> None:
    assert sparkdl.run(sum_in_groups_one_after_another, num_workers=2) == [[3.0] * 3] * 2


def step_with_a_sharded_optimizer() -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what torch does itself

    dist.init_process_group("gloo")
    linear = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(linear.weight)
    sharded = ZeroRedundancyOptimizer(linear.parameters(), torch.optim.SGD, lr=0.5)
    model, optimizer = sparkdl.current_worker().wrap(linear, sharded)
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    optimizer.step()
    return linear.weight.flatten().tolist()


@pytest.mark.gate
def test_an_optimizer_that_cannot_give_its_state_yet_can_be_wrapped(spark: SparkSession) -> None:
    assert sparkdl.run(step_with_a_sharded_optimizer, num_workers=2) == [[-0.5, -1.0]] * 2


@pytest.mark.versions
def test_results_come_in_the_order_of_ranks_whose_environment_is_torchruns_and_accelerates(
    spark: SparkSession,
) -> None:
    """Without ACCELERATE_USE_CPU accelerate would take each rank for the only one."""

    def look() -> tuple[list[int], dict[str, str]]:
        worker = sparkdl.current_worker()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        names += ("MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU")
        place = worker.rank, worker.world_size, worker.local_rank, worker.local_world_size
        return list(place), {name: os.environ[name] for name in names}

    def look_afterwards(_: Any) -> Any:
        ours = {"RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
        yield sorted(ours & os.environ.keys())

    found = sparkdl.run(look, num_workers=3, device="cpu")

    assert [place for place, _ in found] == [[rank, 3, rank, 3] for rank in range(3)]
    variables = [each for _, each in found]
    assert [each["RANK"] for each in variables] == ["0", "1", "2"]
    assert [each["LOCAL_RANK"] for each in variables] == ["0", "1", "2"]
    assert {each["WORLD_SIZE"] for each in variables} == {"3"}
    assert {each["ACCELERATE_USE_CPU"] for each in variables} == {"true"}
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in variables}) == 1
    left = spark.sparkContext.parallelize(range(3), 3).mapPartitions(look_afterwards).collect()
    assert left == [[], [], []]


@pytest.mark.versions
def test_a_script_with_arguments_runs_and_its_output_is_shown(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN_SCRIPT)

    assert sparkdl.run(str(script), "--steps", "5", num_workers=2) == [None, None]

    shown = capsys.readouterr().out.splitlines()
    weights = {line.partition("weights")[2] for line in shown if "weights" in line}
    assert len(weights) == 1
    assert {line.partition("weights")[0] for line in shown} == {"[rank 0] ", "[rank 1] "}


def test_an_exception_on_one_rank_while_others_wait_for_it_is_what_is_raised(
    spark: SparkSession,
) -> None:
    """Also on the one that serves the others' store."""

    def fail() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for step in range(100):
            dist.all_reduce(torch.ones(1000))
            if step == 10 and dist.get_rank() == 0:
                raise ZeroDivisionError("the reactor is empty")

    with pytest.raises(WorkerError, match=r"rank 0 on .*the reactor is empty"):
        sparkdl.run(fail, num_workers=2)


@pytest.mark.gate
def test_a_worker_killed_in_an_all_reduce_ends_the_run_and_is_named(spark: SparkSession) -> None:
    def die() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for step in range(100):
            if step == 10 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1000))

    started = time.monotonic()
    with pytest.raises((WorkerLostError, TrainingError), match="rank 1"):
        sparkdl.run(die, num_workers=3)
    assert time.monotonic() - started < 60
    assert sparkdl.run(lambda: "fine", num_workers=3) == ["fine"] * 3


def test_prints_errors_log_records_and_reports_arrive_behind_their_rank(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def speak() -> None:
        import logging

        print("to standard output")
        print("to standard error", file=sys.stderr)
        logging.getLogger("mine").warning("as a log record")
        sparkdl.current_worker().report(rows=1234567, loss=0.5)
        sys.stdout.buffer.write(b"as bytes\n")
        sys.stdout.write("without an end of line")

    sparkdl.run(speak, num_workers=2)

    shown = capsys.readouterr().out.splitlines()
    said = ("to standard output", "to standard error", "as a log record", "as bytes", "without an")
    said += ("rows 1234567, loss 0.5",)
    for rank in (0, 1):
        mine = [line for line in shown if line.startswith(f"[rank {rank}] ")]
        for text in said:
            assert any(text in line for line in mine), (text, mine)


FLOOD = """
import sparkdl

def flood():
    for number in range(20_000):
        print("line", number)

session = sparkdl.create_session("flood", master="local[1]", conf={"spark.ui.enabled": "false"})
session.sparkContext.setLogLevel("OFF")
sparkdl.run(flood, num_workers=1)
session.stop()
"""


@pytest.mark.gate
def test_what_is_left_out_with_a_local_master_is_in_the_drivers_standard_error() -> None:
    done = run_python("-c", FLOOD)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "lines left out; the driver's standard error has them)" in done.stdout
    shown = re.findall(r"^\[rank 0\] line (\d+)$", done.stdout, re.MULTILINE)
    logged = re.findall(r"^line (\d+)$", done.stderr, re.MULTILINE)
    assert len(shown) < 5_000 < len(logged)
    assert sorted(map(int, shown + logged)) == list(range(20_000))


def test_what_cannot_run_is_refused_before_anything_starts(
    spark: SparkSession, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="path of a script"):
        sparkdl.run(str(tmp_path / "nothing.py"))
    (tmp_path / "some.py").write_text("")
    with pytest.raises(ConfigError, match="no keyword arguments, but was given lr"):
        sparkdl.run(str(tmp_path / "some.py"), lr=0.1)
    with pytest.raises(ConfigError, match="num_workers must be a whole number"):
        sparkdl.run(print, num_workers=0)
    with pytest.raises(ConfigError, match="9, but the cluster has 3 slots"):
        sparkdl.run(print, num_workers=9)
    with pytest.raises(ConfigError, match="no worker here"):
        sparkdl.current_worker()


@pytest.mark.versions
def test_torch_distributor_is_a_drop_in_for_a_function_whatever_its_arguments_are_called(
    spark: SparkSession,
) -> None:
    def train(num_workers: int, device: str) -> tuple[list[float], str]:
        return train_with_ddp(num_workers), device

    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    weights, device = distributor.run(train, num_workers=20, device="mine")
    assert weights == pytest.approx(train_alone(20, 2), rel=1e-5)
    assert device == "mine"


TELLS_ENVIRONMENT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
names += ("NODE_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
found = {name: os.environ.get(name) for name in names}
with open(f"{sys.argv[1]}-{found['RANK']}", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.nightly
def test_torch_distributor_makes_the_environment_of_pysparks(
    spark: SparkSession, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TELLS_ENVIRONMENT)
    found = []
    for kind in (PysparksDistributor, TorchDistributor):
        kind(2, local_mode=False, use_gpu=False).run(str(script), str(tmp_path / kind.__module__))
        files = [tmp_path / f"{kind.__module__}-{rank}" for rank in range(2)]
        found.append([json.loads(file.read_text()) for file in files])
    assert found[0] == found[1]
    assert [each["LOCAL_RANK"] for each in found[1]] == ["0", "0"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found[1]] == ["", ""]


def test_torch_distributors_errors_name_its_arguments(spark: SparkSession, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    with pytest.raises(ConfigError, match="num_processes is 9, but the cluster has 3 slots"):
        TorchDistributor(9, local_mode=False, use_gpu=False).run(print)
    two = TorchDistributor(2, local_mode=False, use_gpu=False)
    with pytest.raises(ConfigError, match=r"train_object must .* there is no file .*train\.py"):
        two.run(str(script))
    script.write_text("")
    with pytest.raises(ConfigError, match="no keyword arguments, but was given lr"):
        two.run(str(script), lr=0.1)
