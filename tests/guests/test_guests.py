"""Programs of Lightning, accelerate, Hugging Face's Trainer and torch alone, on executors."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs.problem import network, rows
from pyspark.sql import SparkSession
from subprocesses import printed_by
from torch import Tensor, nn

import sparkdl
from sparkdl.errors import WorkerError

pytestmark = pytest.mark.nightly

Weights = dict[str, Tensor]
LIGHTNING, TRAINER = "with_lightning.py", "with_trainer.py"


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips where a package is not installed; it is imported on the executors alone."""
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    reason = f"{', '.join(missing)} not installed; make test-guests does it"
    return pytest.mark.skipif(bool(missing), reason=reason)


def train_alone(*losses: Callable[[Tensor, Tensor], Tensor], shuffled: bool) -> Weights:
    """One process on what two ranks have together, an epoch with each of the losses."""
    features, targets = rows().tensors
    with torch.random.fork_rng():
        model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch, loss in enumerate(losses):
        order = torch.arange(len(features))
        if shuffled:  # as torch's DistributedSampler does it
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(2 * 8):
            optimizer.zero_grad()
            loss(model(features[batch]), targets[batch]).backward()
            optimizer.step()
    return model.state_dict()


def assert_weights(project: Path, expected: Weights) -> None:
    """Those that both ranks have saved."""
    for rank in range(2):
        torch.testing.assert_close(torch.load(project / f"rank{rank}.pt"), expected)


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("program", "shuffled"),
    [
        ("ddp.py", True),
        ("fsdp2.py", True),
        pytest.param(LIGHTNING, True, marks=needs("lightning")),
        pytest.param("with_accelerate.py", False, marks=needs("accelerate")),
    ],
)
def test_a_program_resumes_with_the_code_that_was_edited_since(
    spark: SparkSession, project: Path, program: str, shuffled: bool
) -> None:
    """From its own relative checkpoint, all in one session."""
    squared, smooth = nn.functional.mse_loss, nn.functional.smooth_l1_loss
    sparkdl.run(program, "--epochs", "2", num_workers=2)
    assert_weights(project, train_alone(squared, squared, shuffled=shuffled))
    edit(project / "problem.py", "mse_loss", "smooth_l1_loss")
    sparkdl.run(program, "--epochs", "4", num_workers=2)
    assert_weights(project, train_alone(squared, squared, smooth, smooth, shuffled=shuffled))
    first, second = (torch.load(project / f"rank{rank}.pt") for rank in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@needs("transformers", "accelerate")
def test_a_trainer_resumes_with_the_code_that_was_edited_since(
    spark: SparkSession, project: Path, copy_of_project: Path
) -> None:
    """On two ranks it is the same program alone with minibatches twice as large."""
    alone = {"cwd": copy_of_project, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    for epochs in (1, 2):
        sparkdl.run(TRAINER, f"--epochs={epochs}", num_workers=2)
        printed_by(TRAINER, f"--epochs={epochs}", "--batch-size=16", **alone)
        assert_weights(project, torch.load(copy_of_project / "rank0.pt"))
        for directory in (project, copy_of_project):
            edit(directory / "sentences.py", "word + 1", "word * 3")


def lightning_arguments(devices: int, nodes: int) -> list[str]:
    return ["--epochs", "1", "--devices", str(devices), "--num-nodes", str(nodes)]


@needs("lightning")
def test_lightnings_devices_are_the_workers_of_a_host(spark: SparkSession, project: Path) -> None:
    sparkdl.run(LIGHTNING, *lightning_arguments(devices=3, nodes=1), num_workers=3)
    weights = [torch.load(project / f"rank{rank}.pt") for rank in range(3)]
    torch.testing.assert_close(weights[1:], weights[:1] * 2, rtol=0, atol=0)


@needs("lightning")
def test_a_task_of_torch_distributor_is_a_node_of_one_device(
    spark: SparkSession, project: Path
) -> None:
    sparkdl.run(LIGHTNING, *lightning_arguments(devices=2, nodes=1), num_workers=2)
    as_on_one_host = torch.load(project / "rank1.pt")
    (project / "rank1.pt").unlink()
    (project / "checkpoints" / "last.ckpt").unlink()
    distributor = sparkdl.TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    distributor.run(LIGHTNING, *lightning_arguments(devices=1, nodes=2))
    torch.testing.assert_close(torch.load(project / "rank1.pt"), as_on_one_host, rtol=0, atol=0)


@needs("lightning")
def test_what_does_not_fit_is_lightnings_own_error(spark: SparkSession, project: Path) -> None:
    with pytest.raises(WorkerError, match=r"does not match the world size \(2\)"):
        sparkdl.run(LIGHTNING, *lightning_arguments(devices=2, nodes=2), num_workers=2)
