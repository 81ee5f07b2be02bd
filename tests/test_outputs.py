"""What a model returns, and the minibatches that it is given."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import ModelOutput
from torch import Tensor

from sparkdl.errors import ModelError
from sparkdl.feed.schema import FeedSchema
from sparkdl.outputs import described, parts_of, pick, widths_of
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec

ROWS = 5
LOGITS, HIDDEN, LOSS = torch.randn(ROWS, 3), torch.randn(ROWS, 2, 4), torch.tensor(1.0)
NUMBER = torch.randn(ROWS)


@dataclass
class Fields:
    loss: Tensor | None
    logits: Tensor
    hidden: Tensor


Pair = namedtuple("Pair", ["logits", "hidden"])

BY_NAME: dict[str, Any] = {
    "dict": {"loss": None, "logits": LOGITS, "hidden": HIDDEN},
    "ModelOutput": ModelOutput(loss=None, logits=LOGITS, hidden=HIDDEN),
    "dataclass": Fields(None, LOGITS, HIDDEN),
    "namedtuple": Pair(LOGITS, HIDDEN),
}


def test_outputs_with_names_are_picked_by_those() -> None:
    for kind, outputs in BY_NAME.items():
        assert [*parts_of(outputs)] == ["logits", "hidden"], kind
        assert pick(outputs, "logits", ROWS) is LOGITS, kind
        assert pick(outputs, "hidden", ROWS) is HIDDEN, kind
        assert widths_of(outputs, ROWS) == {"logits": 3, "hidden": 8}, kind


def test_outputs_without_names_are_picked_by_position() -> None:
    for outputs in ((LOSS, None, LOGITS, NUMBER), [LOSS, None, LOGITS, NUMBER]):
        assert pick(outputs, 2, ROWS) is LOGITS
        assert widths_of(outputs, ROWS) == {2: 3, 3: None}


def test_the_only_output_needs_no_name() -> None:
    only: list[Any] = [LOGITS, (LOGITS,), {"logits": LOGITS, "loss": None}]
    for outputs in only:
        assert pick(outputs, None, ROWS) is LOGITS
        assert widths_of(outputs, ROWS)[None] == 3


def test_what_cannot_be_picked_is_answered_with_what_there_is() -> None:
    cases: list[tuple[Any, Any, str]] = [
        ({"logits": LOGITS, "hidden": HIDDEN}, "logit", r"'logit', but .* 'logits' float32 \(5, 3"),
        ((LOGITS, HIDDEN), 2, r"output 2, but the model returns a tuple of 0 float32 \(5, 3\), 1 "),
        ((LOGITS, HIDDEN), "logits", "output 'logits', but the model returns a tuple of 0"),
        (BY_NAME["ModelOutput"], 0, "output 0, but the model returns a ModelOutput of 'logits'"),
        ((LOGITS, HIDDEN), None, r"several outputs: .*outputCols=\{'prediction': 0\}"),
        (LOGITS, 0, r"output 0, but the model returns one tensor, float32 \(5, 3\)\. Drop"),
        ("text", None, r"returns a str; it must return a tensor of shape \(rows, \.\.\.\)"),
        ((), None, "returns a tuple; it must return a tensor"),
        ({"layers": (LOGITS, HIDDEN)}, "layers", "1 float32.* as its output 'layers', which is no"),
        ((LOSS, LOGITS), 0, r"shape \(\) as its output 0 for 5 rows; the first dimension must be"),
        ((HIDDEN[:2], LOGITS), 0, r"shape \(2, 2, 4\) as its output 0 for 5 rows"),
    ]
    for outputs, key, message in cases:
        with pytest.raises(ModelError, match=message):
            pick(outputs, key, ROWS)
        assert key not in widths_of(outputs, ROWS), message


def test_outputs_within_outputs_are_described_by_their_kind() -> None:
    outputs = {"logits": LOGITS, "layers": (HIDDEN, HIDDEN), 7: 0.5}
    assert described(outputs) == "a dict of 'logits' float32 (5, 3), 'layers' (tuple), 7 (float)"


def test_only_keys_that_a_saved_model_can_name_are_outputs_to_choose() -> None:
    tensor = torch.zeros(5, 3)
    odd: dict[Any, Any] = {"a": tensor, 0: tensor, -1: tensor, True: tensor, (1, 2): tensor}
    assert set(widths_of(odd, 5)) == {"a", 0}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of what will change or go
def test_outputs_that_are_not_dense_are_refused_with_what_makes_them_so() -> None:
    ones, rows = torch.ones(5, 2), [torch.ones(k) for k in range(5)]
    for output, told in (
        (ones.to_sparse(), r"sparse_coo float32 \(5, 2\), .* output\.to_dense\(\)"),
        (ones.to_mkldnn(), r"mkldnn float32 \(5, 2\), .* output\.to_dense\(\)"),
        (ones.to("meta"), "meta float32 .* one that has values"),
        (
            torch.nested.nested_tensor(rows, layout=torch.jagged),
            r"nested float32, .* output\.to_padded_tensor",
        ),
        (
            torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8),
            r"quantized qint8 .* output\.dequantize\(\)",
        ),
        (torch.masked.masked_tensor(ones, ones > 0), r"masked float32 .* output\.to_tensor"),
    ):
        with pytest.raises(ModelError, match=told):
            pick(output, None, 5)
        assert widths_of((torch.ones(5), output), 5) == {0: None}, told


DEVICE = torch.device("cpu")


@pytest.mark.parametrize("by_name", [False, True])
def test_a_minibatch_without_labels_has_as_many_examples_as_features(by_name: bool) -> None:
    features = torch.zeros(3, 2)
    batch = Batch({"x": features} if by_name else (features,), (), last=False)
    assert batch.examples == 3
    assert batch.to(DEVICE) is batch


def test_a_minibatch_without_labels_moves_with_its_features() -> None:
    batch = Batch((torch.zeros(3, 2),), (), last=True).to(torch.device("meta"))
    (features,) = batch.features
    assert (features.device.type, batch.targets, batch.last) == ("meta", (), True)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_labels_that_are_a_tuple_stay_one_when_lengths_are_known(count: int) -> None:
    labels = tuple(ColumnSpec(f"y{n}", torch.float32, (UNKNOWN,)) for n in range(count))
    schema = FeedSchema((ColumnSpec("x", torch.float32),), labels).of_lengths([None] + [4] * count)
    assert schema.label == tuple(ColumnSpec(f"y{n}", torch.float32, (4,)) for n in range(count))
