"""The shape in which a loss takes one number per row: the one that compares no row with another."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from every_row import every
from torch import Tensor, nn

from sparkdl.errors import ModelError
from sparkdl.replica.loss_use import use_for, use_for_some
from sparkdl.replica.losses import LossUse, MinibatchLoss
from sparkdl.replica.targets import chosen_dims, distinct_rows, shaped

torch.manual_seed(0)
FLAT, COLUMN, WIDE = torch.randn(5), torch.randn(5, 1), torch.randn(5, 3)
NUMBERS, WHOLE = torch.rand(5), torch.tensor([0, 1, 0, 1, 0])


def own(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def squeezed(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs.squeeze(1) - targets) ** 2).mean()


def in_place(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.clone().sub_(targets).abs().mean()


def within_a_tuple(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.broadcast_tensors(outputs, targets)[0].mean()


ELEMENTWISE: list[Any] = [
    own,
    in_place,
    within_a_tuple,
    functional.mse_loss,
    functional.l1_loss,
    functional.huber_loss,
    functional.smooth_l1_loss,
    functional.poisson_nll_loss,
    functional.soft_margin_loss,
    functional.hinge_embedding_loss,
    functools.partial(functional.kl_div, reduction="batchmean"),
    functional.binary_cross_entropy_with_logits,
    nn.BCEWithLogitsLoss(),
    nn.MSELoss(),
    lambda o, t: torch.addcmul(o, o, t).mean(),
    lambda o, t: -torch.distributions.Normal(o, 1.0).log_prob(t).mean(),
]


@every("loss", ELEMENTWISE)
def test_elementwise_losses_get_targets_like_the_outputs(loss: Any) -> None:
    def chosen(outputs: Tensor, targets: Tensor) -> Any:
        return chosen_dims(lambda given: loss(outputs, given), targets)

    assert chosen(COLUMN, NUMBERS) == (2,)
    assert chosen(FLAT, NUMBERS[:, None]) == (1,)
    assert chosen(FLAT, NUMBERS) == chosen(COLUMN, NUMBERS[:, None]) == ()


@every("targets", [NUMBERS, WHOLE])
def test_the_choice_does_not_depend_on_the_dtype(targets: Tensor) -> None:
    assert chosen_dims(lambda given: own(COLUMN, given), targets) == (2,)
    assert chosen_dims(lambda given: squeezed(COLUMN, given), targets) == ()
    assert chosen_dims(lambda given: squeezed(COLUMN, given), targets[:, None]) == (1,)


def test_rows_that_a_loss_chooses_are_compared_with_their_own_targets_too() -> None:
    labels = torch.tensor([-1, 3, -1, 3, -1])

    def masked(targets: Tensor) -> Tensor:
        return own(COLUMN[targets >= 0], targets[targets >= 0])

    assert chosen_dims(masked, labels) == (2,)
    assert chosen_dims(masked, labels[:, None]) == ()  # chosen by (5, 1), both are (2,)
    assert chosen_dims(lambda given: squeezed(COLUMN[given >= 0], given[given >= 0]), labels) == ()


@every(
    ("loss", "outputs", "targets"),
    [
        (functional.cross_entropy, WIDE, WHOLE),
        (nn.MSELoss(), WIDE, torch.randn(5, 3)),  # not one number per row
        (own, WIDE, NUMBERS),  # the error is torch's
        (lambda o, t: ((o @ o.T) * (t[:, None] == t[None, :])).mean(), WIDE, WHOLE),  # contrastive
        (lambda o, t: torch.relu(1 - (o - o.T) * (t[:, None] - t)).mean(), COLUMN, NUMBERS),
    ],
)
def test_targets_stay_as_in_the_column_where_no_other_shape_is_right(
    loss: Any, outputs: Tensor, targets: Tensor
) -> None:
    assert chosen_dims(lambda given: loss(outputs, given), targets) == ()


def test_a_shape_that_raises_is_not_taken() -> None:
    assert chosen_dims(lambda given: WIDE.gather(1, given).mean(), WHOLE) == (2,)


def test_of_several_labels_each_has_its_own_shape() -> None:
    def loss(targets: Any) -> Tensor:
        return (
            own(COLUMN, targets[0])
            + functional.cross_entropy(WIDE, targets[1])
            + squeezed(COLUMN, targets[2])
        )

    dims = chosen_dims(loss, (NUMBERS, WHOLE, NUMBERS))
    assert dims == (2, None, None)
    assert [each.shape for each in shaped((NUMBERS, WHOLE, NUMBERS), dims)] == [(5, 1), (5,), (5,)]


def test_the_rows_tried_with_are_no_width_of_the_outputs() -> None:
    assert distinct_rows(lambda rows: torch.zeros(rows, 3))[0] == 5
    assert distinct_rows(lambda rows: (torch.zeros(rows, 5), torch.zeros(rows, 7)))[0] == 11


def across(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compares each row with all others, whatever the shape of the targets."""
    return (outputs.reshape(-1, 1) - targets.reshape(1, -1)) ** 2


def test_a_rows_loss_that_depends_on_other_rows_is_refused() -> None:
    for wanted in ({"weights": torch.ones(5)}, {"by_row": True}):
        with pytest.raises(ModelError, match=r"for 5 rows it gives \(5, 5\)"):
            use_for(across, COLUMN, NUMBERS, 5, **wanted)


def test_rows_as_wide_as_there_are_rows_are_scored() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) ** 2

    outputs, targets = torch.randn(8, 8), torch.randn(8, 8)
    use = use_for_some(loss, outputs, targets, 8)
    found = MinibatchLoss(loss, use).scores(outputs, targets, 8)
    torch.testing.assert_close(found, loss(outputs, targets).double().mean(1))


def test_rows_are_scored_by_their_own_targets_after_training_elsewhere() -> None:
    outputs, targets = torch.randn(9, 1), torch.randn(9)
    use = use_for_some(nn.MSELoss(), outputs, targets, 9)
    assert use == LossUse((2,))
    found = MinibatchLoss(nn.MSELoss(), use).scores(outputs, targets, 9)
    torch.testing.assert_close(found, ((outputs[:, 0] - targets) ** 2).double())
