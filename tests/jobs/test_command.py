"""How a job begins, and the models that evaluate and predict read."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from every_row import every
from pyspark.sql import SparkSession
from torch import nn

from sparkdl import TorchClassificationModel, TorchModel, TorchRegressionModel
from sparkdl.checkpoint.module_files import SavedModule
from sparkdl.estimator.fitted import FittedModel
from sparkdl.jobs.command import load_model
from sparkdl.protocols import ColumnSpec

TRAIN = Path(__file__).parents[2] / "jobs/train.py"


@every("package", ["pyspark", "yaml"])
def test_a_package_that_the_drivers_python_lacks_is_exit_code_5_with_what_to_install(
    package: str,
) -> None:
    without = f"import runpy, sys; sys.modules[{package!r}] = None"
    program = f"{without}; runpy.run_path({str(TRAIN)!r}, run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, package in ended.stderr) == (5, True)
    assert f"{sys.executable}. Start the job with a Python that has it" in ended.stderr
    assert "pip install 'sparkdl-torch[jobs]'" in ended.stderr


@every("kind", [TorchModel, TorchClassificationModel, TorchRegressionModel])
def test_a_model_of_any_estimator_is_read_as_what_it_is(
    spark: SparkSession, tmp_path: Path, kind: type[FittedModel]
) -> None:
    features = (ColumnSpec("features", torch.float32, (3,)),)
    made_of = SavedModule(
        nn.Linear(3, 2), partial(nn.Linear, 3, 2), features, "logits", {None: 2}, ()
    )
    model = kind(made_of)._set(predictionCol="found")
    model.save(str(tmp_path / "model"))
    read = load_model(str(tmp_path / "model"), (), spark)
    assert type(read) is kind
    assert read.uid == model.uid
    assert read.getPredictionCol() == "found"
