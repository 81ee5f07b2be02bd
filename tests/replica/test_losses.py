"""Losses, and the shapes of their targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from every_row import every, every_row
from models import ModelOutput, OwnLoss
from replicas import SGD
from torch import Tensor, nn

from sparkdl.errors import ModelError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.replica.loss_use import require_own_scores, require_own_targets, require_own_targets_in
from sparkdl.replica.losses import MinibatchLoss, ModelLoss, with_reduction

LOGITS = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 1.0], [3.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
CLASSES = torch.tensor([1, 0, 2, 2])
WEIGHTS = torch.tensor([2.0, 0.0, 1.0, 1.0])


def by_row(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().amax(dim=1)


def test_a_loss_of_the_users_is_taken_as_it_is() -> None:
    assert with_reduction(by_row, "none") is by_row


def weighted(values: Tensor) -> Tensor:
    loss = MinibatchLoss(lambda outputs, targets: outputs)
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
    return Replica(model, SGD, loss or nn.CrossEntropyLoss())


@every("weights", [None, WEIGHTS])
def test_evaluation_sums_the_loss_without_dropout_or_training(weights: Tensor | None) -> None:
    each = replica()
    before = [p.clone() for p in each.module.parameters()]
    batches = [
        Batch((LOGITS[rows],), CLASSES[rows], False, None if weights is None else weights[rows])
        for rows in (slice(3), slice(3, 4))
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


@every_row(
    ({"logits": ROWS}, r"a dict of 'logits' float32 \(4, 2\)"),
    ((ROWS, ONE), r"a tuple of 0 float32 \(4, 2\), 1 float32 \(\)"),
    ({"loss": ROWS}, r"'loss' float32 \(4, 2\)"),
    (ROWS, r"float32 \(4, 2\)"),
    ({"loss": 0.5}, r"'loss' \(float\)"),
    (None, "a NoneType"),
)
def test_a_model_without_a_loss_of_its_own_is_refused_with_what_it_returns(
    outputs: Any, found: str
) -> None:
    with pytest.raises(ModelError, match=f"called with a=..., b=... the model returns .*{found}"):
        ModelLoss(("a", "b"))(outputs, (ROWS, ROWS))


torch.manual_seed(0)
FLAT, WIDE = torch.randn(5), torch.randn(5, 3)
COLUMN = FLAT[:, None]
NUMBERS, WHOLE = torch.rand(5), torch.tensor([0, 1, 0, 1, 0])
BROADCASTS = r"loss broadcasts shape \(\d.*\): it compares .* outputs.squeeze\(1\)"


def own(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def squeezed(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs.squeeze(1) - targets) ** 2).mean()


def within_a_tuple(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.broadcast_tensors(outputs, targets)[0].mean()


def taken(loss: Any, outputs: Tensor, targets: Any, **wanted: Any) -> None:
    batch = Batch((), targets, True, wanted.get("weights"))
    require_own_targets(loss, outputs, batch, 5, by_row=wanted.get("by_row", False))


def refused(loss: Any, outputs: Tensor, targets: Any) -> None:
    with pytest.raises(ModelError, match=BROADCASTS):
        taken(loss, outputs, targets)


@every(
    "loss",
    [
        *(
            functional.mse_loss,
            functional.l1_loss,
            functional.huber_loss,
            functional.smooth_l1_loss,
        ),
        *(functional.poisson_nll_loss, functional.soft_margin_loss),
        *(functional.hinge_embedding_loss, partial(functional.kl_div, reduction="batchmean")),
        *(functional.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss(), nn.MSELoss()),
    ],
)
def test_elementwise_losses_get_targets_like_the_outputs(loss: Any) -> None:
    mine, expected = MinibatchLoss(loss), loss(FLAT, NUMBERS)
    for outputs in (FLAT, COLUMN):
        for targets in (NUMBERS, NUMBERS[:, None]):
            torch.testing.assert_close(mine(outputs, Batch((), targets, True))[0], expected)
            taken(loss, outputs, targets)


@every(
    "loss",
    [
        own,
        within_a_tuple,
        lambda o, t: functional.mse_loss(o, t),
        lambda o, t: torch.addcmul(o, o, t).mean(),
        lambda o, t: -torch.distributions.Normal(o, 1.0).log_prob(t).mean(),
    ],
)
def test_a_loss_of_ones_own_that_broadcasts_rows_with_rows_is_refused(loss: Any) -> None:
    refused(loss, COLUMN, NUMBERS)
    refused(loss, FLAT, NUMBERS[:, None])
    taken(loss, FLAT, NUMBERS)
    taken(loss, COLUMN, NUMBERS[:, None])


@every("loss", [nn.CrossEntropyLoss(), functional.cross_entropy])
def test_a_number_per_row_is_not_taken_for_the_probability_of_a_single_class(loss: Any) -> None:
    with pytest.raises(RuntimeError, match=r"expected (target dtype|scalar type)"):
        loss(COLUMN, NUMBERS)
    with pytest.raises(RuntimeError, match=r"expected (target dtype|scalar type)"):
        MinibatchLoss(loss)(COLUMN, Batch((), NUMBERS, True))


@every("targets", [NUMBERS, WHOLE])
def test_the_choice_does_not_depend_on_the_dtype(targets: Tensor) -> None:
    found, _ = MinibatchLoss(nn.L1Loss())(COLUMN, Batch((), targets, True))
    torch.testing.assert_close(found, (FLAT - targets).abs().mean())
    refused(own, COLUMN, targets)
    refused(squeezed, COLUMN, targets[:, None])
    taken(squeezed, COLUMN, targets)


def test_rows_that_a_loss_chooses_are_compared_with_their_own_targets_too() -> None:
    labels = torch.tensor([-1, 3, -1, 3, -1])

    def masked(outputs: Tensor, targets: Tensor) -> Tensor:
        return own(outputs[targets >= 0], targets[targets >= 0])

    refused(masked, COLUMN, labels)
    taken(masked, COLUMN, labels[:, None])
    taken(masked, FLAT, labels)


def ranked(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.relu(1 - (outputs - outputs.T) * (targets[:, None] - targets[None, :])).mean()


@every_row(
    (functional.cross_entropy, WIDE, WHOLE),
    (nn.MSELoss(), WIDE, torch.randn(5, 3)),  # not one number per row
    (own, WIDE, NUMBERS),  # the error is torch's
    (lambda o, t: ((o @ o.T) * (t[:, None] == t[None, :])).mean(), WIDE, WHOLE),  # contrastive
    (ranked, COLUMN, NUMBERS),
    (lambda o, t: ((o @ o.T) * t).mean(), WIDE, NUMBERS),
    (lambda o, t: own(o - torch.tensor([0.1, 0.5, 0.9]), t[:, None]), COLUMN, NUMBERS),
)
def test_targets_stay_as_in_the_column_and_pairs_that_are_meant_are_taken(
    loss: Any, outputs: Tensor, targets: Tensor
) -> None:
    taken(loss, outputs, targets)


def test_of_several_labels_each_is_as_in_its_column() -> None:
    def loss(outputs: Tensor, targets: Any) -> Tensor:
        one, classes, other = targets
        own_losses = own(outputs, one) + squeezed(outputs, other)
        return own_losses + functional.cross_entropy(WIDE, classes)

    taken(loss, COLUMN, (NUMBERS[:, None], WHOLE, NUMBERS))
    refused(loss, COLUMN, (NUMBERS, WHOLE, NUMBERS))


class Variational(nn.Module):
    """Returns what it makes of its features, and the mean and the logarithm of a variance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, features: Tensor) -> Any:
        code = self.layer(features)
        return code, code.cos(), code.sin()


def divergence(means: Tensor, logarithms: Tensor) -> Tensor:
    return -0.5 * (1 + logarithms - means**2 - logarithms.exp())


def of_examples(outputs: Any, targets: Tensor) -> Tensor:
    """As PyTorch's example of a variational autoencoder has it."""
    rebuilt, *others = outputs
    ones = torch.ones_like(rebuilt)
    found = functional.binary_cross_entropy_with_logits(rebuilt, ones, reduction="sum")
    return found + divergence(*others).sum()


def of_a_sum(outputs: Any, targets: Tensor) -> Any:
    return of_examples(outputs, targets), torch.tensor(float(len(targets)))


class Sum(nn.Module):
    """Wraps one of torch's."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.inner = nn.MSELoss(reduction=reduction)

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.inner(outputs[0], targets[:, None].expand(-1, 2))


def made_up_codes(rows: int) -> Batch:
    return Batch((torch.ones(rows, 3),), torch.arange(rows) % 2 + 0.5, True)


@every("loss", [of_examples, Sum("sum"), lambda o, t: 1e-3 * o[0].pow(2).sum()])
def test_a_loss_of_ones_own_that_adds_up_rows_is_refused_for_several_workers(loss: Any) -> None:
    replica = Replica(Variational(), SGD, loss)
    require_own_targets_in(replica, made_up_codes, scores=False)
    with pytest.raises(ModelError, match=r"adds up the rows .* Divide it by the number of rows"):
        require_own_targets_in(replica, made_up_codes, scores=False, several=True)


@every(
    "loss",
    [
        of_a_sum,
        Sum("mean"),
        lambda o, t: of_examples(o, t) / len(t),
        lambda o, t: 0 * o[0].sum(),
        lambda o, t: o[0].norm(),
        lambda o, t: torch.cdist(o[0], o[0]).sum(),
        lambda o, t: {}["not there"],
    ],
)
def test_means_pairs_and_what_compares_rows_are_no_sums_over_rows(loss: Any) -> None:
    replica = Replica(Variational(), SGD, loss)
    require_own_targets_in(replica, made_up_codes, scores=False, several=True)


CLASS_WEIGHTS = torch.tensor([1.0, 9.0])


@every_row(
    (lambda o, t: functional.cross_entropy(o, t, CLASS_WEIGHTS), True),
    (lambda o, t: functional.cross_entropy(o, t, ignore_index=1), True),
    (lambda o, t: functional.cross_entropy(o, t), False),
    (lambda o, t: (o.sum(1) * (1 - 2 * t)).mean(), False),
    (lambda o, t: functional.cross_entropy(functional.dropout(o), t, CLASS_WEIGHTS), False),
    (nn.CrossEntropyLoss(CLASS_WEIGHTS), False),
)
def test_a_loss_of_ones_own_that_is_no_mean_over_rows_is_warned_of_for_several_workers(
    caplog: pytest.LogCaptureFixture, loss: Any, warned: bool
) -> None:
    def rows_of(rows: int) -> Batch:
        kinds = torch.arange(rows) % 2
        return Batch((torch.stack([kinds, 1.0 - kinds, kinds], dim=1),), kinds, True)

    caplog.clear()
    torch.manual_seed(0)
    replica = Replica(nn.Linear(3, 2), SGD, loss)
    require_own_targets_in(replica, rows_of, scores=False)
    assert not caplog.messages
    require_own_targets_in(replica, rows_of, scores=False, several=True)
    assert len(caplog.messages) == warned
    assert all("not the mean of the losses of its rows" in each for each in caplog.messages)


@every_row(
    (lambda o, t: (o[0].pow(2).mean(), torch.tensor(float(len(t)))), "this sum is"),
    (lambda o, t: (o[0].pow(2).sum(), o[0].pow(2).mean()), "this weight is"),
)
def test_two_numbers_that_are_no_sum_and_weight_are_refused(loss: Any, named: str) -> None:
    replica = Replica(Variational(), SGD, loss)
    with pytest.raises(ModelError, match=f"{named} .* also if each of them is there twice"):
        require_own_targets_in(replica, made_up_codes, scores=False)


class WithLoss(Variational):
    """Computes its own loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction, self.noise = reduction, nn.Dropout(0.5)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        code = self.noise(self.layer(features))
        if labels is None:
            return code
        wanted = labels[:, None].expand_as(code)
        return functional.mse_loss(code, wanted, reduction=self.reduction), code


def test_a_models_own_loss_that_adds_up_rows_is_refused_for_several_workers() -> None:
    summed, mean = (Replica(WithLoss(each), SGD, ModelLoss()) for each in ("sum", "mean"))
    require_own_targets_in(summed, made_up_codes, scores=False)
    require_own_targets_in(mean, made_up_codes, scores=False, several=True)
    with pytest.raises(ModelError, match="adds up the rows"):
        require_own_targets_in(summed, made_up_codes, scores=False, several=True)


def test_the_rows_tried_with_are_no_width_of_the_outputs() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return own(outputs[:, :1] - torch.arange(11.0), targets[:, None])

    def made_up(rows: int) -> Batch:
        return Batch((torch.zeros(rows, 3),), torch.zeros(rows), True)

    require_own_targets_in(Replica(nn.Linear(3, 11), SGD, loss), made_up, scores=False)


def across(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compares each row with all others, whatever the shape of the targets."""
    return (outputs.reshape(-1, 1) - targets.reshape(1, -1)) ** 2


def test_a_rows_loss_that_depends_on_other_rows_is_refused() -> None:
    for wanted in ({"weights": torch.ones(5)}, {"by_row": True}):
        with pytest.raises(ModelError, match=r"for 5 rows it gives \(5, 5\)"):
            taken(across, COLUMN, NUMBERS, **wanted)


@every_row(
    # rows as wide as there are rows
    (lambda o, t: (o - t) ** 2, torch.randn(11, 11), torch.randn(11, 11)),
    (nn.MSELoss(), torch.randn(9, 1), torch.randn(9)),
)
def test_rows_are_scored_by_their_own_targets_after_training_elsewhere(
    loss: Any, outputs: Tensor, targets: Tensor
) -> None:
    require_own_scores(loss, outputs, targets, len(outputs))
    found = MinibatchLoss(loss).scores(outputs, targets, len(outputs))
    squares = (outputs - targets.view_as(outputs)) ** 2
    torch.testing.assert_close(found, squares.double().mean(1))


class Heads(nn.Module):
    """Two heads, as what ``pack`` makes of them; features by two names."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(6, 3).double(), nn.Linear(6, 2).double()
        self.pack = pack

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.pack(self.first(left), self.second(right))


PACKED: dict[
    str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]
] = {
    "tuple": (lambda a, b: (a, b), lambda o: (o[0], o[1])),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda o: (o["a"], o["b"])),
    "ModelOutput": (lambda a, b: ModelOutput(a=a, b=b), lambda o: (o.a, o.b)),
}


@every("kind", PACKED)
@every("as_kwargs", [False, True])
def test_a_loss_is_given_all_that_the_model_returns_and_all_labels(
    kind: str, as_kwargs: bool
) -> None:
    pack, unpack = PACKED[kind]

    def loss(outputs: Any, targets: tuple[Tensor, Tensor]) -> Tensor:
        first, second = unpack(outputs)
        return nn.functional.cross_entropy(first, targets[0]) + second.sub(targets[1]).abs().mean()

    left, right = torch.randn(2, 5, 6, dtype=torch.float64)
    targets = torch.arange(5) % 3, torch.randn(5, 2, dtype=torch.float64)
    oracle = Heads(lambda a, b: (a, b))
    a, b = oracle(left, right)
    expected = nn.functional.cross_entropy(a, targets[0]) + b.sub(targets[1]).abs().mean()
    torch.optim.SGD(oracle.parameters(), lr=0.1).zero_grad()
    expected.backward()

    replica = Replica(Heads(pack), SGD, loss, features_as_kwargs=as_kwargs)
    # By name the order says nothing.
    features: Any = {"right": right, "left": left} if as_kwargs else (left, right)
    batch = Batch(features, targets, last=False)
    total, rows = replica.evaluate([batch])
    assert total / rows == pytest.approx(expected.item(), rel=1e-12)
    assert replica.step(batch).item() == pytest.approx(expected.item(), rel=1e-12)
    for mine, other in zip(replica.module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, other - 0.1 * other.grad, rtol=1e-12, atol=0)


@every("as_tuple", [False, True])
@every("features_as", ["arguments", "keywords"])
def test_a_model_that_computes_its_own_loss_trains_as_torch_would(
    as_tuple: bool, features_as: str
) -> None:
    torch.manual_seed(5)
    model, oracle = OwnLoss(as_tuple=as_tuple).double(), OwnLoss().double()
    oracle.load_state_dict(model.state_dict())
    features, scale = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    labels = torch.arange(5) % 3
    logits = oracle.head(oracle.body(features).tanh() * scale[:, None])
    expected = nn.functional.cross_entropy(logits, labels)
    expected.backward()

    by_name = features_as == "keywords"
    replica = Replica(model, SGD, ModelLoss(), features_as_kwargs=by_name)
    given: Any = {"scale": scale, "features": features} if by_name else (features, scale)
    batch = Batch(given, labels, last=False)
    total, rows = replica.evaluate([batch])
    assert total / rows == pytest.approx(expected.item(), rel=1e-12)
    replica.step(batch)
    for mine, other in zip(replica.module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, other - 0.1 * other.grad, rtol=1e-12, atol=0)


def test_several_labels_reach_a_model_of_its_own_loss_by_their_names() -> None:
    class Distance(nn.Linear):
        def forward(self, x: Tensor, near: Tensor, far: Tensor) -> Any:  # type: ignore[override]
            (y,) = super().forward(x).T
            return {"loss": (y - near).abs().mean() + 10 * (y - far).abs().mean()}

    near, far = torch.randn(2, 5)
    x = torch.randn(5, 2)
    replica = Replica(Distance(2, 1), SGD, ModelLoss(("far", "near")))
    y = nn.functional.linear(x, replica.module.weight, replica.module.bias)[:, 0].detach()
    loss = replica.forward_backward(Batch((x,), (far, near), last=False))
    torch.testing.assert_close(loss, (y - near).abs().mean() + 10 * (y - far).abs().mean())


def test_a_features_dict_is_one_argument_unless_it_is_wanted_as_keywords() -> None:
    class Sum(nn.Linear):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(inputs["a"] + inputs["b"])

    a, b = torch.randn(2, 5, 3)
    batch = Batch({"a": a, "b": b}, torch.zeros(5, dtype=torch.int64), last=False)
    by_name = Replica(Sum(3, 2), SGD, nn.CrossEntropyLoss())
    expected = nn.functional.linear(a + b, by_name.module.weight, by_name.module.bias)
    torch.testing.assert_close(by_name.outputs(batch), expected)
    by_keyword = Replica(Sum(3, 2), SGD, nn.CrossEntropyLoss(), features_as_kwargs=True)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        by_keyword.outputs(batch)
