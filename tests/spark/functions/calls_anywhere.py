"""Calls that a classic session and a Connect client can both make, and compare."""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn

import sparkdl
from sparkdl import TorchDistributor, TorchModel, current_worker
from sparkdl.errors import SparkDLError
from sparkdl.spark import sending
from sparkdl.spark.catalyst.jvm import is_of_connect

SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(sys.argv[1]) + dist.get_rank()])
dist.all_reduce(total)
print("a script's sum", total.item())
dist.destroy_process_group()
"""


def summed(start: float) -> tuple[float, str]:
    """As one writes it for torchrun."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    print("a word from rank", os.environ["RANK"])
    return total.item(), os.environ["RANK"] + os.environ["WORLD_SIZE"]


def fed() -> list[list[int]]:
    """The ids of a worker's minibatches in two epochs."""
    worker = current_worker()
    batches = worker.batches(4)
    epochs = [torch.cat([batch["id"] for batch in batches]).tolist() for _ in range(2)]
    worker.report(rows=len(epochs[0]))
    return epochs


def large() -> bytes:
    """More than a row or a message of gRPC holds."""
    return bytes(range(256)) * (160 << 10)


def failing() -> None:
    """Raises on one rank, and waits for it on the others."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        raise LookupError("no such thing")
    dist.barrier()


def dying() -> None:
    """Ends one rank's process, and waits for it on the others."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def answers(spark: SparkSession) -> dict[str, Any]:
    """All that calls give."""
    rows = spark.range(0, 100, 1, 5)
    script = Path(tempfile.mkdtemp()) / "script.py"
    script.write_text(SCRIPT)
    reports: dict[int, float] = {}
    found: dict[str, Any] = {
        "alone": sparkdl.run(summed, 1.5, num_workers=1),
        "summed": sparkdl.run(summed, 1.5, num_workers=3),
        "script": sparkdl.run(str(script), 2, num_workers=2),
        "distributor": TorchDistributor(2, local_mode=False, use_gpu=False).run(summed, start=0.0),
        "fed": sparkdl.run(
            fed,
            num_workers=3,
            df=rows,
            shuffleRows="spark",
            on_report=lambda rank, numbers: reports.update({rank: numbers["rows"]}),
        ),
        "large": [len(each) for each in sparkdl.run(large, num_workers=2)],
    }
    if is_of_connect(spark):
        sending.MOST_IN_A_TASK = 0
    found["as an artifact"] = sparkdl.run(summed, 1.5, num_workers=3)
    return {**found, "reports": reports, "udf": _predicted(spark)}


def _predicted(spark: SparkSession) -> list[list[float]]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = nn.Linear(2, 1)
    model = TorchModel.from_module(module, torch.zeros(2, 2))
    function = model.udf()
    spark.udf.register("predict", function)
    rows = spark.range(0, 50, 1, 3).selectExpr("array(id / 50.0D, sin(id)) as x")
    rows.createOrReplaceTempView("rows_to_predict")
    return [
        [row.y for row in rows.select(function("x").alias("y")).collect()],
        [row.y for row in spark.sql("SELECT predict(x) AS y FROM rows_to_predict").collect()],
    ]


def modules(_: SparkSession) -> list[str]:
    """Every module of the package, once imported, and the public names."""
    for name in sparkdl.__all__:
        getattr(sparkdl, name)
    found = [each.name for each in pkgutil.walk_packages(sparkdl.__path__, "sparkdl.")]
    for module in found:
        importlib.import_module(module)
    return found + sparkdl.__all__


def refusals(spark: SparkSession) -> dict[str, str]:
    """How calls end that cannot end well."""
    tried: dict[str, Callable[[], object]] = {
        "raises": lambda: sparkdl.run(failing, num_workers=3),
        "dies": lambda: sparkdl.run(dying, num_workers=3),
        "first dies": lambda: sparkdl.run(os._exit, 3, num_workers=1),
        "workers": lambda: sparkdl.run(summed, 0.0, num_workers=7),
        "empty": lambda: sparkdl.run(fed, num_workers=2, df=spark.range(0)),
        "partitions": lambda: sparkdl.run(fed, df=spark.range(9), shuffleRows="none"),
        "checkpoint": lambda: sparkdl.run(_save, num_workers=1),
        "start": lambda: sparkdl.create_session(master="local[2]"),
    }
    return {name: _words(each) for name, each in tried.items()}


def _save() -> None:
    current_worker().save_checkpoint("hdfs://nowhere/run", {"epoch": 1})


def _words(call: Callable[[], object]) -> str:
    try:
        call()
    except SparkDLError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
