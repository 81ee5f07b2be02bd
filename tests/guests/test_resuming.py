"""A program runs, is edited, and resumes from its own relative checkpoint, all in one session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from installed import require
from programs.problem import network, rows
from pyspark.sql import SparkSession
from torch import Tensor, nn

import sparkdl

pytestmark = pytest.mark.guests

Weights = dict[str, Tensor]


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


def weights_of(project: Path, rank: int) -> Weights:
    weights: Weights = torch.load(project / f"rank{rank}.pt")
    return weights


@pytest.mark.parametrize(
    ("program", "needs", "shuffled"),
    [
        ("ddp.py", "torch", True),
        ("fsdp2.py", "torch", True),
        ("with_lightning.py", "lightning", True),
        ("with_accelerate.py", "accelerate", False),
    ],
)
def test_a_program_resumes_with_the_code_that_was_edited_since(
    spark: SparkSession, project: Path, program: str, needs: str, shuffled: bool
) -> None:
    require(needs)
    squared, smooth = nn.functional.mse_loss, nn.functional.smooth_l1_loss

    sparkdl.run(program, "--epochs", "2", num_workers=2)
    expected = train_alone(squared, squared, shuffled=shuffled)
    for rank in range(2):
        torch.testing.assert_close(weights_of(project, rank), expected)

    beside = project / "problem.py"
    beside.write_text(beside.read_text().replace("mse_loss", "smooth_l1_loss"))
    sparkdl.run(program, "--epochs", "4", num_workers=2)
    expected = train_alone(squared, squared, smooth, smooth, shuffled=shuffled)
    for rank in range(2):
        torch.testing.assert_close(weights_of(project, rank), expected)
    torch.testing.assert_close(weights_of(project, 0), weights_of(project, 1), rtol=0, atol=0)
