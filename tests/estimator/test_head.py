"""Heads: told from the loss; classes, probabilities and metrics' inputs as torch has them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every, every_row
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from sparkdl import TorchModel
from sparkdl.errors import ConfigError, ModelError
from sparkdl.estimator.head import Head, class_winners, head_of, output_function
from sparkdl.estimator.outputs import MetricInputs
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference.predictor import Labels, Score


class MyCrossEntropy(nn.CrossEntropyLoss):
    pass


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, outputs: Any, targets: Any) -> Any:
        return outputs


@every_row(
    (nn.CrossEntropyLoss(), Head.LOGITS),
    (nn.CrossEntropyLoss(label_smoothing=0.1), Head.LOGITS),
    (MyCrossEntropy(), Head.LOGITS),
    (nn.NLLLoss(), Head.LOG_PROBABILITIES),
    (nn.BCEWithLogitsLoss(), Head.BINARY_LOGIT),
    (nn.BCELoss(), Head.BINARY_PROBABILITY),
    (nn.MultiMarginLoss(), Head.SCORES),
    (functional.cross_entropy, Head.LOGITS),
    (functional.nll_loss, Head.LOG_PROBABILITIES),
    (functional.binary_cross_entropy_with_logits, Head.BINARY_LOGIT),
    (functional.binary_cross_entropy, Head.BINARY_PROBABILITY),
    (functional.multi_margin_loss, Head.SCORES),
    (partial(functional.cross_entropy, label_smoothing=0.1), Head.LOGITS),
    (partial(partial(functional.nll_loss)), Head.LOG_PROBABILITIES),
    (torch.compile(nn.CrossEntropyLoss(), backend="eager"), Head.LOGITS),
    (nn.MSELoss(), Head.UNKNOWN),
    (functional.l1_loss, Head.UNKNOWN),
    (lambda outputs, targets: outputs.mean(), Head.UNKNOWN),
    (Unhashable(), Head.UNKNOWN),
)
def test_the_head_is_told_from_the_loss(loss: Any, head: Head) -> None:
    assert head_of(loss) is head


logits = st.lists(
    st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3), min_size=1, max_size=6
)


@given(rows=logits)
def test_logits_become_softmax_probabilities_and_the_largest_wins(rows: list[list[float]]) -> None:
    outputs = torch.tensor(rows)
    classes = Head.LOGITS.classes(outputs)
    assert classes.dtype is torch.float64
    found = zip(rows, Head.LOGITS.probabilities(outputs).tolist(), classes.tolist(), strict=True)
    for row, mine, winner in found:
        exponentials = [math.exp(value - max(row)) for value in row]
        assert mine == pytest.approx([e / sum(exponentials) for e in exponentials], abs=1e-6)
        assert row[int(winner)] == max(row)


@every("shape", [(5,), (5, 1)])
def test_one_output_a_row_is_for_class_one(shape: tuple[int, ...]) -> None:
    values = [-3.0, -0.1, 0.0, 0.1, 3.0]
    outputs = torch.tensor(values).view(shape)
    expected = [[1 - p, p] for p in (1 / (1 + math.exp(-v)) for v in values)]
    torch.testing.assert_close(Head.BINARY_LOGIT.probabilities(outputs), torch.tensor(expected))
    assert Head.BINARY_LOGIT.classes(outputs).tolist() == [0, 0, 0, 1, 1]
    outputs = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]).view(shape)
    head = Head.BINARY_PROBABILITY
    assert head.classes(outputs).tolist() == [0, 0, 0, 1, 1]
    both = [[1, 0], [0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0, 1]]
    assert head.probabilities(outputs).tolist() == both


def test_a_class_that_is_hardly_possible_keeps_its_probability() -> None:
    scores = torch.tensor([-30.0, -17.0, 17.0, 30.0])
    expected = [[1 / (1 + math.exp(v)), 1 / (1 + math.exp(-v))] for v in scores.tolist()]
    found = Head.BINARY_LOGIT.probabilities(scores)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@every_row(
    (Head.LOGITS, torch.tensor([[1.0, 2.0], [math.nan, 0.0], [3.0, math.nan]])),
    (Head.BINARY_LOGIT, torch.tensor([[1.0], [math.nan], [math.nan]])),
)
@every("thresholds", [None, [0.5, 0.5]])
def test_what_is_no_number_is_given_no_class(
    head: Head, outputs: torch.Tensor, thresholds: list[float] | None
) -> None:
    with pytest.raises(ModelError, match=r"NaN for 2 of 3 rows.* no class.*outputType='raw'"):
        class_winners(outputs, head=head, thresholds=thresholds, values=None)


def test_a_module_that_gives_more_than_when_the_model_was_made_is_told_so() -> None:
    function, _ = output_function("raw", Head.UNKNOWN, 1)
    assert function(torch.ones(3, 1)).tolist() == [1.0] * 3
    with pytest.raises(ModelError, match=r"\(3, 5\), but .* one number per row.*from_module"):
        function(torch.ones(3, 5))


def test_log_probabilities_are_exponentiated() -> None:
    scores = torch.randn(4, 3, dtype=torch.float64)
    outputs = functional.log_softmax(scores, dim=1)
    torch.testing.assert_close(Head.LOG_PROBABILITIES.probabilities(outputs), scores.softmax(dim=1))
    assert torch.equal(Head.LOG_PROBABILITIES.classes(outputs), scores.argmax(dim=1).double())


SINGLE = (Head.BINARY_LOGIT, Head.BINARY_PROBABILITY)


@every_row(
    *((h.probabilities, (2, 3), "CrossEntropyLoss") for h in (Head.SCORES, Head.UNKNOWN)),
    *((h.classes, shape, "single output") for h in SINGLE for shape in ((4, 2), (4, 1, 1))),
    *((h.probabilities, shape, "single") for h in SINGLE for shape in ((4, 2), (4, 1, 1))),
    *((Head.LOGITS.classes, shape, "shape") for shape in ((4,), (4, 1), (4, 3, 2))),
)
def test_outputs_that_have_no_classes_or_probabilities_are_refused(
    method: Any, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){words}.*outputType='raw'") as caught:
        method(torch.zeros(shape))
    assert str(shape) in str(caught.value) or words == "CrossEntropyLoss"


def test_what_targets_a_head_takes() -> None:
    assert {head for head in Head if head.takes_class_index} == {
        Head.LOGITS,
        Head.LOG_PROBABILITIES,
        Head.SCORES,
    }
    assert {head for head in Head if not head.is_classification} == {Head.UNKNOWN}


@every("output_type", ["auto", "class", "probability", "raw"])
def test_outputs_without_any_number_a_row_are_refused(output_type: str) -> None:
    with pytest.raises(ConfigError, match="with no numbers per row"):
        output_function(output_type, Head.LOGITS, 0)


SCORES = torch.tensor([[0.2, 0.9, 0.1], [3.0, -1.0, 0.5]])
CLASSES = torch.tensor([1, 0])


@every_row(
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
    return Score(loss, Labels([ColumnSpec("y", dtype)], as_one=True))


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
        ModelError, match=r"lossCol need a loss .* shape \(2,\) here, but it gives \(\)"
    ):
        score(mean_of)(torch.ones(2), torch.ones(2), 2)


def test_a_loss_of_all_pairs_of_rows_is_refused_after_training_elsewhere() -> None:
    def of_all_pairs(outputs: Any, targets: Any) -> Any:
        return (outputs.reshape(-1, 1) - targets.reshape(1, -1)) ** 2

    for rows in (2, 9):
        with pytest.raises(ModelError, match=r"each row is compared with all others"):
            score(of_all_pairs)(torch.ones(rows, 1), torch.ones(rows), rows)
