"""A session of two executors with two faked GPUs each, and two GPUs a task: four ranks.

    python train_on_gpus.py DISCOVERY OUTPUT SCENARIO ...

Writes down what came out of each scenario, a JSON object a line. torch sees no GPU, so the ranks
compute on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from frames import CLASSES, WIDTH, estimator, features_of, frame
from pyspark import InheritableThread
from pyspark.sql import SparkSession
from torch import Tensor, nn

import sparkdl
from sparkdl import GradientAllReduce, ParameterAveraging, TorchDistributor, create_session
from sparkdl.errors import SparkDLError
from sparkdl.spark.cluster.slots import most_slots

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS = 70
EPOCHS = 3


def look() -> dict[str, Any]:
    worker = sparkdl.current_worker()
    print("hello from", worker.rank)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {
        "rank": worker.rank,
        "device": worker.device,
        "gpu": worker.gpu,
        "pid": os.getpid(),
        "task": os.getppid(),
        "environment": [os.environ[name] for name in names],
    }


def ids() -> list[list[int]]:
    """The rows of two epochs."""
    batches = sparkdl.current_worker().batches(8)
    return [[i for batch in batches for i in batch["id"].tolist()] for _ in range(2)]


class Fails(nn.Module):
    """A linear model that once kills its process or task, on a certain row's rank."""

    def __init__(self, deed: str, trace: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.deed, self.trace = deed, trace
        self.register_buffer("marked", torch.from_numpy(features_of([33])).float())

    def forward(self, features: Tensor) -> Tensor:
        marked = self.training and bool((features == self.marked).all(dim=1).any())
        if marked and not Path(self.trace).exists():
            Path(self.trace).write_text(str(os.getpid()))
            os.kill(os.getppid() if self.deed == "kill task" else os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return self.linear(features)


def fit(spark: SparkSession, rows: int = ROWS, **changes: Any) -> dict[str, Any]:
    """Whole shards as minibatches."""
    tuned = estimator(**{"numWorkers": 4, "batchSize": 1000, "epochs": EPOCHS, **changes})
    model = tuned.fit(frame(spark, rows=rows, partitions=2))
    return {
        "bits": [t.double().flatten().tolist() for t in model.module.state_dict().values()],
        "examples": [epoch.examples for epoch in model.history],
    }


def cancel_soon(spark: SparkSession, trace: str) -> dict[str, Any]:
    """A run that is cancelled once all of its ranks sleep."""

    def sleep() -> None:
        with open(trace, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(300)

    told: list[str] = []
    rows = frame(spark)
    thread = InheritableThread(
        target=lambda: told.append(refused(lambda: sparkdl.run(sleep, num_workers=4, df=rows)))
    )
    thread.start()
    deadline = time.monotonic() + 90
    pids: list[str] = []
    while len(pids) < 4 and not told and time.monotonic() < deadline:
        time.sleep(0.1)
        pids = Path(trace).read_text().split() if Path(trace).exists() else []
    spark.sparkContext.cancelAllJobs()
    thread.join(60)
    deadline = time.monotonic() + 10
    while (left := [p for p in pids if Path("/proc", p).exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"started": len(pids), "left": left, "told": told}


def refused(action: Callable[[], Any]) -> str:
    try:
        return f"not refused: {action()}"
    except SparkDLError as error:
        return f"{type(error).__name__}: {error}"


def scenarios(spark: SparkSession, directory: Path) -> dict[str, Callable[[], Any]]:
    def trace(name: str) -> str:
        return str(directory / name)

    def fails(deed: str, name: str, **changes: Any) -> dict[str, Any]:
        return fit(spark, model=Fails(deed, trace(name)), batchSize=4, **changes)

    averaging = partial(fit, spark, strategy=ParameterAveraging(period=1))
    return {
        "look": lambda: sparkdl.run(look, num_workers=4),
        "rows": lambda: [sparkdl.run(ids, num_workers=4, df=frame(spark, ROWS, 5)) for _ in "ab"],
        "averaging": lambda: [averaging(), averaging()],
        "all workers": lambda: averaging(numWorkers=None, epochs=1),
        "few rows": lambda: averaging(rows=5, epochs=1),
        "too few rows": lambda: refused(lambda: averaging(rows=3)),
        "all-reduce": lambda: fit(spark, strategy=GradientAllReduce()),
        "not a multiple": lambda: refused(lambda: averaging(numWorkers=3)),
        "too many": lambda: refused(lambda: averaging(numWorkers=6)),
        "no such GPU": lambda: refused(
            lambda: TorchDistributor(4, local_mode=False, use_gpu=True).run(look)
        ),
        "kill": lambda: fails("kill", "kill", epochs=2, maxFailures=1),
        "kill task": lambda: fails("kill task", "kill task", epochs=2, maxFailures=1),
        "cancel": lambda: cancel_soon(spark, trace("cancel")),
        "cores": lambda: most_slots(spark),
        "left": lambda: [process for process in rank_processes() if Path(process).exists()],
    }


def rank_processes() -> list[str]:
    """Those that live on after a few seconds, but for the servers that they are forked from."""
    deadline = time.monotonic() + 10
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                environment = (path / "environ").read_bytes()
                parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
                lines = [(each / "cmdline").read_bytes() for each in (path, path.parent / parent)]
                is_rank = all(b"fork_server" in line for line in lines)
            except OSError:  # it ended in between
                continue
            if is_rank and f"SPARKDL_TEST={os.getpid()}".encode() in environment:
                found.append(str(path))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def main(discovery: str, output: str, *names: str) -> None:
    # Executors inherit it.
    os.environ["SPARKDL_TEST"] = str(os.getpid())
    spark = create_session(
        "gpus",
        master="local-cluster[2,2,1024]",
        conf={
            "spark.executor.memory": "1024m",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.worker.resource.gpu.amount": "2",
            "spark.worker.resource.gpu.discoveryScript": discovery,
            "spark.executor.resource.gpu.amount": "2",
            "spark.task.resource.gpu.amount": "2",
        },
    )
    spark.sparkContext.setLogLevel("OFF")
    known = scenarios(spark, Path(output).parent)
    for name in names or known:
        started = time.monotonic()
        try:
            found = known[name]()
        except Exception as error:  # the tests look at it
            found = f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - started, 1)
        with open(output, "a") as file:
            file.write(json.dumps({"name": name, "found": found, "seconds": seconds}) + "\n")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
