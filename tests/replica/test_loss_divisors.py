"""What losses are divided by: minibatches add up to torch's loss of all their rows."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from every_row import every, every_row
from replicas import SGD
from torch import Tensor, nn

from sparkdl.errors import ModelError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.replica.loss_use import require_own_targets_in
from sparkdl.replica.losses import (
    ClassIndexLoss,
    MinibatchLoss,
    ModelLoss,
    reduction_of,
    with_reduction,
)

torch.manual_seed(0)
ROWS, CLASSES, LENGTH = 12, 4, 3
FEATURES = torch.randn(ROWS, 5, dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, -100, 1, 0, -100, -100, -100, 2, 0])
TOKENS = torch.randint(0, CLASSES, (ROWS, LENGTH))
TOKENS[1], TOKENS[5, 1:], TOKENS[8, 0] = -100, -100, -100
SHARES = torch.rand(ROWS, CLASSES, dtype=torch.float64).softmax(1)
WEIGHT = torch.tensor([1.0, 5.0, 0.5, 0.0], dtype=torch.float64)
CUTS = [1, 3, 4, 2, 2]  # the third of four labels that do not count


def net(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(5, outputs).double()


class Sequences(nn.Module):
    """Logits of LENGTH tokens, (rows, classes, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(CLASSES * LENGTH)

    def forward(self, features: Tensor) -> Tensor:
        return self.inner(features).view(-1, CLASSES, LENGTH)


def log_probabilities() -> nn.Module:
    return nn.Sequential(net(), nn.LogSoftmax(1))


def rows_and_weights(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counts = (targets != -100).double()
    rows = functional.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return rows * counts, counts


def sum_and_weight(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    rows, counts = rows_and_weights(outputs, targets)
    return rows.sum(), counts.sum()


TWICE = partial(partial(functional.cross_entropy, ignore_index=1), weight=WEIGHT)
NLL = partial(functional.nll_loss, weight=WEIGHT, ignore_index=2)
CASES: dict[str, tuple[Any, Any, Tensor, Any]] = {
    "ignored": (net, nn.CrossEntropyLoss(), LABELS, None),
    "class weights": (net, nn.CrossEntropyLoss(weight=WEIGHT), LABELS, None),
    "smoothing": (net, nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2), LABELS, None),
    "smoothing alone": (net, nn.CrossEntropyLoss(label_smoothing=0.2), LABELS, None),
    "another ignored": (net, nn.CrossEntropyLoss(ignore_index=0), LABELS.clamp(min=0), None),
    "tokens": (Sequences, nn.CrossEntropyLoss(weight=WEIGHT), TOKENS, None),
    "function": (net, functional.cross_entropy, LABELS, None),
    "partial": (net, partial(functional.cross_entropy, weight=WEIGHT), LABELS, None),
    "partial of a partial": (net, TWICE, LABELS.clamp(min=0), None),
    "bound": (net, nn.CrossEntropyLoss(weight=WEIGHT).forward, LABELS, None),
    "called": (net, nn.CrossEntropyLoss(weight=WEIGHT).__call__, LABELS, None),
    "partial of a module": (net, partial(nn.CrossEntropyLoss(weight=WEIGHT)), LABELS, None),
    "nll": (log_probabilities, nn.NLLLoss(weight=WEIGHT), LABELS, None),
    "nll function": (log_probabilities, NLL, LABELS.clamp(min=0), None),
    "probabilities": (net, nn.CrossEntropyLoss(weight=WEIGHT), SHARES, None),
    "batchmean": (log_probabilities, nn.KLDivLoss(reduction="batchmean"), SHARES, None),
    "elements": (net, nn.MSELoss(), SHARES, None),
    "pair": (net, sum_and_weight, LABELS, nn.CrossEntropyLoss()),
}


def oracle(name: str) -> tuple[float, list[Tensor]]:
    build, loss, targets, plain = CASES[name]
    module = build()
    whole = (plain or loss)(module(FEATURES), targets)
    whole.backward()
    return whole.item(), [each.grad for each in module.parameters()]


def batches(targets: Tensor, weights: Tensor | None = None) -> list[Batch]:
    parts = zip(FEATURES.split(CUTS), targets.split(CUTS), strict=True)
    cut = [None] * len(CUTS) if weights is None else weights.split(CUTS)
    return [Batch((f,), t, False, w) for (f, t), w in zip(parts, cut, strict=True)]


def added_up(name: str, loss: Any, weights: Tensor | None) -> tuple[float, list[Tensor]]:
    """From minibatches, whose gradients are weighted by what each was divided by."""
    build, _, targets, _ = CASES[name]
    replica = Replica(build(), partial(torch.optim.SGD, lr=0.1), loss)
    replica.use_loss("counts")
    total, grads = 0.0, [torch.zeros_like(each) for each in replica.trainable()]
    for batch in batches(targets, weights):
        replica.forward_backward(batch)
        divisor = batch.examples if replica.divisor is None else replica.divisor.item()
        total += divisor
        for sum_, parameter in zip(grads, replica.trainable(), strict=True):
            sum_ += divisor * parameter.grad
    value, weight = replica.evaluate(batches(targets, weights))
    assert weight == pytest.approx(total)
    return value / weight, [each / total for each in grads]


class PassesOn(nn.Module):
    """A loss of the user's with the attributes of torch's, whose result it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.inner(outputs, targets) ** 2


def test_a_loss_that_wraps_one_of_torchs_is_its_own_and_is_not_changed() -> None:
    loss = PassesOn()
    assert reduction_of(loss) is None
    assert with_reduction(loss, "none") is loss
    assert loss.inner.reduction == "mean"


@pytest.mark.filterwarnings("ignore:::torch")  # importing its compiler warns
def test_a_compiled_loss_is_known_as_what_it_compiles_which_stays_as_it_was() -> None:
    loss = nn.CrossEntropyLoss(weight=WEIGHT)
    known = ClassIndexLoss.of(torch.compile(loss))
    assert known.weight is WEIGHT
    found = with_reduction(torch.compile(loss), "none")(net()(FEATURES), LABELS)
    assert found.shape == (ROWS,)
    assert loss.reduction == "mean"


@every("weighted", [False, True])
@every("name", CASES)
def test_minibatches_add_up_to_torchs_loss_of_all_rows(name: str, weighted: bool) -> None:
    loss = CASES[name][1]
    if weighted and loss is sum_and_weight:
        loss = rows_and_weights
    value, grads = added_up(name, loss, torch.ones(ROWS) if weighted else None)
    expected, theirs = oracle(name)
    assert value == pytest.approx(expected, rel=1e-9)
    for mine, other in zip(grads, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


@every("name", ["class weights", "tokens", "smoothing", "nll"])
def test_a_row_of_weight_two_counts_like_two_rows(name: str) -> None:
    build, loss, targets, _ = CASES[name]
    weights = torch.tensor([2.0, 0.0, 1.0, 1.0] * 3)
    repeated = torch.repeat_interleave(torch.arange(ROWS), weights.long())
    batch = Batch((FEATURES,), targets, True, weights)
    found, _ = MinibatchLoss(loss, "counts")(build()(FEATURES), batch)
    expected = loss(build()(FEATURES[repeated]), targets[repeated])
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


@every("dtype", [torch.float16, torch.bfloat16])
def test_class_weights_may_be_in_half_precision_as_the_outputs_are(dtype: torch.dtype) -> None:
    loss, batch = nn.CrossEntropyLoss(weight=WEIGHT.to(dtype)), Batch((FEATURES,), LABELS, True)
    outputs = net()(FEATURES).to(dtype)
    found, _ = MinibatchLoss(loss)(outputs, batch)
    assert found.item() == pytest.approx(loss(outputs, LABELS).item(), rel=1e-2)


@every("dtype", [torch.float16, torch.bfloat16])
def test_weighted_losses_in_half_precision_are_summed_in_single(dtype: torch.dtype) -> None:
    outputs, targets = (torch.linspace(0, end, 4_000).to(dtype) for end in (50.0, 10.0))
    weights = torch.linspace(0.1, 1.9, 4_000)
    batch = Batch((outputs,), targets, True, weights)
    found, _ = MinibatchLoss(nn.MSELoss())(outputs, batch)
    wanted = nn.MSELoss(reduction="none")(outputs, targets).double() @ weights.double() / 4_000
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


@every("weights", [None, torch.ones(2), torch.zeros(2)])
@every_row(
    (nn.CrossEntropyLoss(), [-100, -100]),
    (nn.CrossEntropyLoss(weight=WEIGHT), [3, 3]),  # a class of weight 0
    (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), [-100, -100]),
)
def test_where_nothing_counts_the_loss_and_its_gradients_are_zero(
    weights: Tensor | None, loss: nn.Module, labels: list[int]
) -> None:
    replica = Replica(net(), partial(torch.optim.SGD, lr=0.1), copy.deepcopy(loss))
    replica.use_loss("counts")
    batch = Batch((FEATURES[:2],), torch.tensor(labels), True, weights)
    assert replica.step(batch).item() == 0
    assert replica.divisor == 0
    assert all(each.grad is not None and not each.grad.any() for each in replica.trainable())


@every("loss", [nn.MSELoss(reduction="sum"), nn.KLDivLoss(reduction="sum")])
def test_a_sum_is_the_same_with_weights_of_one(loss: nn.Module) -> None:
    outputs, batch = net()(FEATURES).log_softmax(1), Batch((FEATURES,), SHARES, True)
    weighted = Batch((FEATURES,), SHARES, True, torch.ones(ROWS))
    mine = MinibatchLoss(loss)
    torch.testing.assert_close(mine(outputs, weighted)[0], mine(outputs, batch)[0])
    assert mine.is_sum


def test_old_names_of_reductions_are_known() -> None:
    loss = partial(functional.mse_loss, size_average=False)
    assert reduction_of(loss) == "sum"
    outputs, targets = torch.ones(3), torch.zeros(3)
    assert with_reduction(loss, "none")(outputs, targets).tolist() == [1, 1, 1]


def test_a_class_of_ones_own_that_only_inherits_is_a_mean_over_rows() -> None:
    class Focal(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return super().forward(input, target).square()

    found, divisor = MinibatchLoss(Focal())(net()(FEATURES), Batch((FEATURES,), LABELS, True))
    assert divisor is None
    assert found.item() == pytest.approx(oracle("ignored")[0] ** 2)


@every("pair", [(torch.ones(2), 1), (torch.tensor(1.0),), (1.0, 2.0)])
def test_what_is_no_pair_of_scalars_is_refused(pair: Any) -> None:
    with pytest.raises(ModelError, match=r"must return scalar tensors \(sum, weight\)"):
        MinibatchLoss(lambda o, t: pair)(net()(FEATURES), Batch((), LABELS, True))


@every("name", ["batchmean", "tokens", "ignored"])
def test_a_row_is_scored_with_its_own_loss(name: str) -> None:
    build, loss, targets, _ = CASES[name]
    if name == "tokens":
        loss = nn.CrossEntropyLoss()
    outputs = build()(FEATURES)
    found = MinibatchLoss(loss).scores(outputs, targets, ROWS)
    alone = torch.stack([loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(ROWS)])
    torch.testing.assert_close(found, alone.nan_to_num(0.0))


class CountsTokens(nn.Linear):
    """Computes the mean over the labels that count, as Hugging Face's models do."""

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(super().forward(features), labels)}


@every_row((-100, True), (0, False))
def test_a_models_own_loss_that_is_no_mean_over_rows_is_warned_of_for_several_workers(
    caplog: pytest.LogCaptureFixture, first_label: int, warned: bool
) -> None:
    def rows_of(rows: int) -> Batch:
        kinds = torch.arange(rows) % 2
        labels = torch.where(kinds == 0, first_label, 1)
        return Batch((torch.stack([kinds, 1.0 - kinds, kinds], dim=1),), labels, True)

    caplog.clear()
    replica = Replica(CountsTokens(3, 2), SGD, ModelLoss())
    require_own_targets_in(replica, rows_of, scores=False)
    assert not caplog.messages
    require_own_targets_in(replica, rows_of, scores=False, several=True)
    assert len(caplog.messages) == warned
    assert all("not the mean of the losses of its rows" in each for each in caplog.messages)
