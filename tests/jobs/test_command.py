"""The models that evaluate and predict read."""

from __future__ import annotations

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
