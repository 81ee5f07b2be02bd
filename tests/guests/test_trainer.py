"""Hugging Face's Trainer on two ranks is the same program alone with minibatches twice as large."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from installed import require
from pyspark.sql import SparkSession
from torch import Tensor

import sparkdl

pytestmark = pytest.mark.guests

PROGRAM = "with_trainer.py"


def train_alone(directory: Path, epochs: int) -> dict[str, Tensor]:
    """What one process without Spark makes of the program."""
    subprocess.run(
        [sys.executable, PROGRAM, f"--epochs={epochs}", "--batch-size=16"],
        cwd=directory,
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    weights: dict[str, Tensor] = torch.load(directory / "rank0.pt")
    return weights


def test_a_trainer_resumes_with_the_code_that_was_edited_since(
    spark: SparkSession, project: Path, copy_of_project: Path
) -> None:
    require("transformers")
    require("accelerate")
    for epochs in (1, 2):
        sparkdl.run(PROGRAM, f"--epochs={epochs}", num_workers=2)
        alone = train_alone(copy_of_project, epochs)
        for rank in range(2):
            torch.testing.assert_close(torch.load(project / f"rank{rank}.pt"), alone)
        for directory in (project, copy_of_project):
            beside = directory / "sentences.py"
            beside.write_text(beside.read_text().replace("word + 1", "word * 3"))
