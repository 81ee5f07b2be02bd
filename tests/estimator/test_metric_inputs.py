"""What metrics are given of a model's outputs, and what each row's loss is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparkdl import TorchModel
from sparkdl.errors import ConfigError, ModelError
from sparkdl.estimator.head import Head
from sparkdl.estimator.metric_inputs import MetricInputs
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference.scores import Labels, Score

SCORES = torch.tensor([[0.2, 0.9, 0.1], [3.0, -1.0, 0.5]])
CLASSES = torch.tensor([1, 0])


@every(
    ("head", "outputs", "targets", "predicted", "labels"),
    [
        (Head.LOGITS, SCORES, CLASSES, SCORES.softmax(1), CLASSES),
        (Head.LOGITS, SCORES.bfloat16(), CLASSES, SCORES.bfloat16().float().softmax(1), CLASSES),
        (Head.LOG_PROBABILITIES, SCORES, CLASSES, SCORES.exp(), CLASSES),
        (Head.SCORES, SCORES, CLASSES, SCORES, CLASSES),
        (Head.BINARY_LOGIT, SCORES[:, :1], CLASSES.float(), SCORES[:, 0].sigmoid(), CLASSES),
        (Head.BINARY_PROBABILITY, SCORES[0], torch.ones(3), SCORES[0], torch.ones(3).long()),
        # Several labels a row, and parts of labels.
        (Head.BINARY_LOGIT, SCORES, SCORES.round(), SCORES.sigmoid(), SCORES.round().long()),
        (Head.BINARY_PROBABILITY, SCORES[0], SCORES[1], SCORES[0], SCORES[1]),
        (Head.UNKNOWN, SCORES[:, :1], SCORES[:, 1], SCORES[:, 0], SCORES[:, 1]),
        (Head.UNKNOWN, SCORES[:, 0], SCORES[:, 1:2], SCORES[:, 0], SCORES[:, 1]),
        (Head.UNKNOWN, SCORES, SCORES, SCORES, SCORES),
    ],
)
def test_probabilities_and_labels_of_the_same_shape(
    head: Head, outputs: Any, targets: Any, predicted: Any, labels: Any
) -> None:
    found = MetricInputs(head, None)(outputs, targets)
    for each, expected in zip(found, (predicted, labels), strict=True):
        torch.testing.assert_close(each, expected, rtol=0, atol=0)


def test_of_several_outputs_the_one_of_prediction_col() -> None:
    inputs = MetricInputs(Head.UNKNOWN, "b")
    found, labels = inputs({"a": SCORES, "b": SCORES[:, 0]}, (CLASSES, CLASSES))
    assert torch.equal(found, SCORES[:, 0])
    assert isinstance(labels, tuple)
    model = TorchModel.from_module(nn.Linear(2, 2), torch.zeros(1, 2))
    model.setOutputCols({"x": 0, "y": 1})
    with pytest.raises(ConfigError, match="has no column 'prediction'"):
        MetricInputs.of(model, Head.UNKNOWN)


def score(loss: Any, dtype: torch.dtype = torch.float32) -> Score:
    return Score(loss, Labels([ColumnSpec("y", dtype)], as_one=True), None)


@given(st.integers(0, 1000))
def test_each_row_has_its_own_loss_and_their_mean_is_the_loss(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    outputs, classes = numbers.normal(size=(6, 3)), numbers.integers(0, 3, 6)
    exact = -(outputs[range(6), classes] - np.log(np.exp(outputs).sum(1)))
    for loss in (nn.CrossEntropyLoss(), nn.functional.cross_entropy):
        found = score(loss)(torch.tensor(outputs), torch.tensor(classes), 6)
        np.testing.assert_allclose(found.numpy(), exact)
        mean = loss(torch.tensor(outputs), torch.tensor(classes))
        assert float(found.mean()) == pytest.approx(float(mean))
    wide = score(nn.MSELoss())(torch.tensor(outputs), torch.zeros(6, 3), 6)
    np.testing.assert_allclose(wide.numpy(), (outputs**2).mean(1))
    column = score(nn.MSELoss())(torch.tensor(outputs[:, :1]), torch.zeros(6), 6)
    np.testing.assert_allclose(column.numpy(), outputs[:, 0] ** 2)


def test_a_loss_that_gives_only_the_mean_is_refused_with_what_to_do() -> None:
    def mean_of(outputs: Any, targets: Any) -> Any:
        return (outputs - targets).mean()

    with pytest.raises(
        ModelError, match=r"scoreCol need a loss .* shape \(2,\) here, but it gives \(\)"
    ):
        score(mean_of)(torch.ones(2), torch.ones(2), 2)


def test_a_loss_of_all_pairs_of_rows_is_refused_after_training_elsewhere() -> None:
    def of_all_pairs(outputs: Any, targets: Any) -> Any:
        return (outputs.reshape(-1, 1) - targets.reshape(1, -1)) ** 2

    for rows in (2, 9):
        with pytest.raises(ModelError, match=r"each row is compared with all others"):
            score(of_all_pairs)(torch.ones(rows, 1), torch.ones(rows), rows)
