"""Losses of single rows, weighted: torch's own and the user's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from every_row import every
from torch import Tensor, nn

from sparkdl.errors import ModelError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.replica.losses import LossUse, MinibatchLoss, ModelLoss, with_reduction

LOGITS = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 1.0], [3.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
CLASSES = torch.tensor([1, 0, 2, 2])
WEIGHTS = torch.tensor([2.0, 0.0, 1.0, 1.0])


def by_row(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().amax(dim=1)


@every(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        functional.cross_entropy,
        partial(functional.cross_entropy, label_smoothing=0.1),
    ],
)
def test_torchs_own_losses_give_one_value_a_row(loss: Any) -> None:
    expected = [loss(LOGITS[i : i + 1], CLASSES[i : i + 1]).item() for i in range(4)]
    assert with_reduction(loss, "none")(LOGITS, CLASSES).tolist() == pytest.approx(expected)
    assert loss(LOGITS, CLASSES).dim() == 0  # the user's object is as it was


def test_a_loss_of_the_users_is_taken_as_it_is() -> None:
    assert with_reduction(by_row, "none") is by_row


def weighted(values: Tensor) -> Tensor:
    loss = MinibatchLoss(lambda outputs, targets: outputs, LossUse())
    return loss(values, Batch((), CLASSES, True, WEIGHTS))[0]


def test_values_of_several_outputs_count_by_their_mean() -> None:
    values = torch.tensor([[1.0, 3.0], [10.0, 20.0], [0.0, 2.0], [4.0, 4.0]])
    assert weighted(values).item() == pytest.approx((2 * 2 + 0 + 1 + 4) / 4)


@every("values", [torch.tensor(1.0), torch.ones(3), torch.ones(1, 4)])
def test_a_loss_without_one_value_a_row_is_refused_with_its_shape(values: Tensor) -> None:
    with pytest.raises(ModelError, match=r"one value per row, shape \(4,\)"):
        weighted(values)


def replica(loss: Any = None) -> Replica:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    return Replica(model, partial(torch.optim.SGD, lr=0.1), loss or nn.CrossEntropyLoss())


def test_a_row_of_weight_zero_has_no_gradient_and_one_of_two_counts_twice() -> None:
    weighted, repeated = replica(), replica()
    for each in (weighted, repeated):
        each.module.eval()
    chosen = torch.tensor([0, 0, 2, 3])
    weighted.step(Batch((LOGITS,), CLASSES, True, WEIGHTS))
    repeated.step(Batch((LOGITS[chosen],), CLASSES[chosen], True))
    for mine, other in zip(weighted.module.parameters(), repeated.module.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-7)


@every("weights", [None, WEIGHTS])
def test_evaluation_sums_the_loss_without_dropout_or_training(weights: Tensor | None) -> None:
    each = replica()
    before = [p.clone() for p in each.module.parameters()]
    cut = [None if weights is None else weights[i : i + 3] for i in (0, 3)]
    batches = [
        Batch((LOGITS[i : i + 3],), CLASSES[i : i + 3], False, w)
        for i, w in zip((0, 3), cut, strict=True)
    ]
    total, weight = each.evaluate(batches)
    rows = functional.cross_entropy(each.module[0](LOGITS), CLASSES, reduction="none")
    factors = np.ones(4) if weights is None else weights.numpy()
    assert total == pytest.approx(float((rows.detach().numpy() * factors).sum()), rel=1e-6)
    assert weight == factors.sum()
    assert each.module.training
    assert all(torch.equal(a, b) for a, b in zip(before, each.module.parameters(), strict=True))


ONE, ROWS = torch.tensor(0.5), torch.zeros(4, 2)


@every("outputs", [{"logits": ROWS, "loss": ONE}, (ONE, ROWS), [ONE], ONE])
def test_a_models_own_loss_is_the_one_named_so_or_the_first_or_all(outputs: Any) -> None:
    assert ModelLoss()(outputs, ROWS) is ONE


@every(
    ("outputs", "found"),
    [
        ({"logits": ROWS}, r"a dict of 'logits' float32 \(4, 2\)"),
        ((ROWS, ONE), r"a tuple of 0 float32 \(4, 2\), 1 float32 \(\)"),
        ({"loss": ROWS}, r"'loss' float32 \(4, 2\)"),
        (ROWS, r"float32 \(4, 2\)"),
        ({"loss": 0.5}, r"'loss' \(float\)"),
        (None, "a NoneType"),
    ],
)
def test_a_model_without_a_loss_of_its_own_is_refused_with_what_it_returns(
    outputs: Any, found: str
) -> None:
    with pytest.raises(ModelError, match=f"called with a=..., b=... the model returns .*{found}"):
        ModelLoss(("a", "b"))(outputs, (ROWS, ROWS))
