"""A frozen backbone on real executors: built there, never sent, and in the result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from frames import CLASSES, estimator, features_of, frame, labels_of
from models import task_rank
from pyspark.sql import SparkSession
from torch import nn

from sparkdl import ParameterAveraging, TorchModel
from sparkdl.errors import ModelError


def test_a_fitted_model_has_the_backbone_that_every_executor_has_built(
    spark: SparkSession, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        backbone = nn.Linear(4, 16).requires_grad_(False)
        return nn.Sequential(backbone, nn.Tanh(), nn.Linear(16, CLASSES)).double()

    rows = frame(spark, rows=60, partitions=3)
    fitted = estimator(
        model=build,
        strategy=ParameterAveraging(period=1),
        epochs=3,
        batchSize=60,
        numWorkers=3,
        seed=7,
    ).fit(rows)

    torch.manual_seed(7)
    oracle = build()
    backbone = oracle[0].weight.clone()
    optimizer = torch.optim.SGD(oracle[2].parameters(), lr=0.1)
    features, labels = torch.from_numpy(features_of(range(60))), labels_of(range(60))
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(oracle(features), torch.from_numpy(labels)).backward()
        optimizer.step()
    assert torch.equal(fitted.module[0].weight, backbone)
    torch.testing.assert_close(fitted.module[2].weight, oracle[2].weight, rtol=1e-6, atol=0)
    expected = oracle(features).argmax(dim=1).numpy()
    for model in (fitted, saved_and_loaded(fitted, tmp_path / "model")):
        found = {row["id"]: row["prediction"] for row in model.transform(rows).collect()}
        assert np.array_equal([found[number] for number in range(60)], expected)


def saved_and_loaded(model: TorchModel, path: Path) -> TorchModel:
    model.save(str(path))
    return TorchModel.load(str(path), trust=True)


def test_an_executor_with_another_backbone_is_named_with_its_host(spark: SparkSession) -> None:
    def build() -> nn.Module:
        backbone = nn.Linear(4, 16).requires_grad_(False)
        with torch.no_grad():
            backbone.weight[2, 2] += task_rank() == 1
        return nn.Sequential(backbone, nn.Tanh(), nn.Linear(16, CLASSES)).double()

    with pytest.raises(
        ModelError, match=r"rank 1 on \S+ built the model with different frozen parameter"
    ):
        estimator(model=build, epochs=1, numWorkers=3).fit(frame(spark, rows=30, partitions=3))
