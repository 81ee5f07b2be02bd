"""What a fitted model tells of its training."""

from __future__ import annotations

import pytest
import torch
from frames import estimator, features_of, frame, labels_of
from pyspark.sql import SparkSession
from torch import nn

from sparkdl import ParameterAveraging


def test_history_has_a_row_for_each_epoch_with_all_rows_and_the_rounds(
    spark: SparkSession,
) -> None:
    model = estimator(
        epochs=3, optimizer=torch.optim.Adam, strategy=ParameterAveraging(period=2)
    ).fit(frame(spark, rows=60, partitions=2))
    assert [epoch.epoch for epoch in model.history] == [1, 2, 3]
    assert [epoch.examples for epoch in model.history] == [60, 60, 60]
    assert [epoch.rounds for epoch in model.history] == [2, 2, 2]  # after steps 2 and 3
    assert all(epoch.seconds > 0 for epoch in model.history)
    assert model.history[-1].loss < model.history[0].loss
    assert type(model.module) is nn.Sequential
    assert not model.module.training
    assert {str(p.device) for p in model.module.parameters()} == {"cpu"}


def test_the_first_loss_is_that_of_the_initial_parameters(spark: SparkSession) -> None:
    torch.manual_seed(2)
    network = nn.Linear(4, 3)
    with torch.no_grad():
        outputs = network(torch.tensor(features_of(range(60)), dtype=torch.float32))
        expected = float(nn.functional.cross_entropy(outputs, torch.tensor(labels_of(range(60)))))
    model = estimator(model=network, batchSize=60).fit(frame(spark))
    assert model.history[0].loss == pytest.approx(expected, rel=1e-5)
