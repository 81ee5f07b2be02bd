"""Counts that a metric keeps beside its declared states are told of, and nothing else is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import (
    AUROC,
    CatMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    R2Score,
)
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryConfusionMatrix,
    BinaryF1Score,
    BinaryPrecisionRecallCurve,
)
from torchmetrics.wrappers import BootStrapper, MinMaxMetric

from sparkdl.metrics import Metrics
from sparkdl.metrics.metrics import rehearse


class Counts(Metric):
    """Declares its sum, but not how many values it is of."""

    def __init__(self, kept: Any, add: Callable[[Any], Any]) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.seen = kept
        self._add = add

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        self.total += predicted.sum()
        self.seen = self._add(self.seen)

    def compute(self) -> Tensor:
        return self.total


class LooksUp(Counts):
    """Learns of the first minibatch what it will need; counts nothing beside its states."""

    def __init__(self) -> None:
        super().__init__(None, lambda seen: 3)


def warnings_of(metric: Metric, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.WARNING):
        rehearse(Metrics.of({"mine": metric}), torch.tensor([0.2, 0.9]), torch.tensor([0, 1]))
    return caplog.text


@pytest.mark.parametrize(
    ("kept", "add"),
    [
        (0, lambda seen: seen + 1),
        (0.5, lambda seen: seen + 0.5),
        (torch.zeros(2), lambda seen: seen + 1),
        ([], lambda seen: [*seen, 1]),
        ({}, lambda seen: {**seen, len(seen): 1}),
        ([torch.zeros(1)], lambda seen: [seen[0] + 1]),
    ],
)
def test_a_count_that_is_not_declared_is_told_with_its_name(
    kept: Any, add: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    said = warnings_of(Counts(kept, add), caplog)
    assert "metric 'mine' accumulates in 'seen', which is not declared with add_state" in said


def test_a_count_of_a_metric_inside_is_told_with_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inside = MinMaxMetric(Counts(0, lambda seen: seen + 1))
    assert "'_base_metric.seen'" in warnings_of(inside, caplog)


@pytest.mark.parametrize(
    "metric",
    [
        LooksUp(),
        AUROC("binary"),
        BinaryAccuracy(),
        BinaryConfusionMatrix(),
        BinaryF1Score(),
        BinaryPrecisionRecallCurve(thresholds=5),
        MeanSquaredError(),
        R2Score(),
        BinaryAccuracy() + BinaryF1Score(),
        BootStrapper(MeanSquaredError(), num_bootstraps=2),
        MinMaxMetric(MeanSquaredError()),
    ],
    ids=lambda metric: type(metric).__name__,
)
def test_metrics_that_declare_what_they_count_are_not_told_of(
    metric: Metric, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(metric, caplog) == ""


@pytest.mark.parametrize("kind", [CatMetric, MeanMetric])
def test_aggregations_are_not_told_of(kind: type[Metric], caplog: pytest.LogCaptureFixture) -> None:
    class OfPredictions(kind):  # type: ignore[misc,valid-type]
        def update(self, predicted: Tensor, targets: Tensor) -> None:
            super().update(predicted)

    assert warnings_of(OfPredictions(), caplog) == ""
