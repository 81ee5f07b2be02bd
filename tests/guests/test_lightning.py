"""Lightning takes the ``devices`` and ``num_nodes`` that fit how its ranks lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from installed import require
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.errors import WorkerError

pytestmark = pytest.mark.guests

PROGRAM = "with_lightning.py"


@pytest.fixture(autouse=True)
def _has_lightning() -> None:
    require("lightning")


def arguments(devices: int, nodes: int) -> list[str]:
    return ["--epochs", "1", "--devices", str(devices), "--num-nodes", str(nodes)]


def test_devices_are_the_workers_of_a_host(spark: SparkSession, project: Path) -> None:
    sparkdl.run(PROGRAM, *arguments(devices=3, nodes=1), num_workers=3)
    weights = [torch.load(project / f"rank{rank}.pt") for rank in range(3)]
    torch.testing.assert_close(weights[1:], weights[:1] * 2, rtol=0, atol=0)


def test_a_task_of_torch_distributor_is_a_node_of_one_device(
    spark: SparkSession, project: Path
) -> None:
    sparkdl.run(PROGRAM, *arguments(devices=2, nodes=1), num_workers=2)
    as_on_one_host = torch.load(project / "rank1.pt")
    (project / "rank1.pt").unlink()
    (project / "checkpoints" / "last.ckpt").unlink()
    distributor = sparkdl.TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    distributor.run(PROGRAM, *arguments(devices=1, nodes=2))
    torch.testing.assert_close(torch.load(project / "rank1.pt"), as_on_one_host, rtol=0, atol=0)


def test_what_does_not_fit_is_lightnings_own_error(spark: SparkSession, project: Path) -> None:
    with pytest.raises(WorkerError, match=r"does not match the world size \(2\)"):
        sparkdl.run(PROGRAM, *arguments(devices=2, nodes=2), num_workers=2)
