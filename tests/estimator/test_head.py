"""Heads: told from the loss; classes and probabilities as torch itself would compute them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from every_row import every
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from sparkdl.errors import ConfigError
from sparkdl.estimator.head import Head, head_of, output_function


class MyCrossEntropy(nn.CrossEntropyLoss):
    pass


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, outputs: Any, targets: Any) -> Any:
        return outputs


@every(
    ("loss", "head"),
    [
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
        (nn.MSELoss(), Head.UNKNOWN),
        (functional.l1_loss, Head.UNKNOWN),
        (lambda outputs, targets: outputs.mean(), Head.UNKNOWN),
        (Unhashable(), Head.UNKNOWN),
    ],
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


def test_log_probabilities_are_exponentiated() -> None:
    scores = torch.randn(4, 3, dtype=torch.float64)
    outputs = functional.log_softmax(scores, dim=1)
    torch.testing.assert_close(Head.LOG_PROBABILITIES.probabilities(outputs), scores.softmax(dim=1))
    assert torch.equal(Head.LOG_PROBABILITIES.classes(outputs), scores.argmax(dim=1).double())


SINGLE = (Head.BINARY_LOGIT, Head.BINARY_PROBABILITY)


@every(
    ("method", "shape", "words"),
    [
        *((h.probabilities, (2, 3), "CrossEntropyLoss") for h in (Head.SCORES, Head.UNKNOWN)),
        *((h.classes, shape, "single output") for h in SINGLE for shape in ((4, 2), (4, 1, 1))),
        *((h.probabilities, shape, "single") for h in SINGLE for shape in ((4, 2), (4, 1, 1))),
        *((Head.LOGITS.classes, shape, "shape") for shape in ((4,), (4, 1), (4, 3, 2))),
    ],
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
