"""What a model is told before training, without Spark: called otherwise, or returning otherwise."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from every_row import every_row
from frames import built
from models import OwnLoss
from table_networks import FillsBuffer, GrowsLayers, Margin
from torch import Tensor, nn
from torch.nn.utils import prune
from toys import mlp

from sparkdl.errors import ModelError
from sparkdl.estimator.checks.probe import PREDICTED_ROWS, Trial
from sparkdl.estimator.head import Head, head_of
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.schema import FeedSchema
from sparkdl.outputs import described
from sparkdl.protocols import ColumnSpec
from sparkdl.replica.losses import ModelLoss

ROWS = PREDICTED_ROWS
FEATURES = ColumnSpec("features", torch.float32, (4,))
SCALE = ColumnSpec("scale", torch.float32)
LABEL = ColumnSpec("label", torch.int64)
HELD_OUT = ColumnSpec("held_out", torch.bool)


def tried(
    model: Any,
    loss: Any,
    *features: ColumnSpec,
    by_name: bool = False,
    as_kwargs: bool = False,
    validated: bool = False,
) -> Any:
    """What the model returns for ``transform``."""
    columns = features or (FEATURES,)
    schema = FeedSchema(columns, LABEL, validation=HELD_OUT if validated else None, by_name=by_name)
    statistics = [*(ColumnStatistics() for _ in columns), ColumnStatistics(smallest=0, largest=2)]
    taken = "kwargs" if as_kwargs else "tensor"
    replica = built(lambda: model, loss=loss, featuresAs=taken)
    return Trial(replica, schema, statistics).step(head_of(loss))


class Returns(nn.Module):
    """Returns what ``of`` makes of its logits, whether it is in training mode, and its labels."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.of = of

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        return self.of(self.layer(features), self.training, labels)


def of_two(outputs: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs[0], targets) + outputs[1].mean()


def test_what_transform_will_see_is_returned_in_evaluation_mode_and_without_labels() -> None:
    outputs = tried(OwnLoss(), ModelLoss())
    assert [*outputs] == ["logits", "pooled", "layers"]
    assert outputs["logits"].shape == (ROWS, 3)
    modes = Returns(lambda logits, training, labels: (logits, logits) if training else logits)
    assert described(tried(modes, of_two)) == f"float32 ({ROWS}, 3)"


def test_features_reach_the_model_by_keyword() -> None:
    specs = (SCALE, FEATURES)
    outputs = tried(OwnLoss(), ModelLoss(), *specs, by_name=True, as_kwargs=True)
    assert described(outputs["pooled"]) == f"float32 ({ROWS}, 5)"


def test_a_dict_given_to_a_model_of_arguments_is_refused_with_what_to_set() -> None:
    with pytest.raises(ModelError) as refused:
        tried(OwnLoss(), ModelLoss(), FEATURES, SCALE, by_name=True)
    message = str(refused.value)
    assert "called as model({'features': ..., 'scale': ...}, labels=...)" in message
    assert "its forward takes (features, scale, labels)" in message
    assert "featuresAs" in message


class Caches(nn.Module):
    """Has a buffer that follows its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("shift", torch.zeros(1, 4))

    def forward(self, features: Tensor) -> Tensor:
        if len(self.shift) < len(features):
            self.shift = torch.zeros(len(features), 4)
        return self.layer(features + self.shift[: len(features)])


class OfIndex(nn.Module):
    """Computes its own loss of an index."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)

    def forward(self, index: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.table(index)
        return logits if labels is None else functional.cross_entropy(logits, labels)


def only_in_training(logits: Tensor, training: bool, labels: Any) -> Tensor:
    if not training:
        raise ZeroDivisionError("no running mean yet")
    return logits


def with_labels(logits: Tensor, training: bool, labels: Any) -> Any:
    return functional.cross_entropy(logits, labels), logits


def of_absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.abs(), targets)


CE = nn.CrossEntropyLoss()
BY_KEYWORD = {"by_name": True, "as_kwargs": True}
INDEX, WIDE = ColumnSpec("index", torch.int64), ColumnSpec("wide", torch.float32, (16,))


@every_row(
    (
        mlp(4).float(),
        CE,
        [],
        BY_KEYWORD,
        r"model\(features=\.\.\.\), and its forward takes \(input",
    ),
    (mlp(4).float(), ModelLoss(), [], {}, r"model\(features, labels=\.\.\.\), and its forward"),
    (
        Returns(lambda logits, *_: (logits, logits.mean())),
        ModelLoss(),
        [],
        {},
        r"in its tuple of outputs.* 0 float32 \(2, 3\), 1 flo",
    ),
    (
        OfIndex(),
        ModelLoss(),
        [INDEX],
        {},
        r"features of .* and labels of int64 \(2,\), .*'label' from 0 .* to 2 .*: IndexError",
    ),
    (Returns(only_in_training), CE, [], {}, r"in evaluation mode .* no running mean yet"),
    (Returns(with_labels), ModelLoss(), [], {}, r"evaluation mode .* model\(features\), and"),
    (GrowsLayers(), CE, [WIDE], {}, r"'head.weight' from nothing to \(3, 8\), 'head.bias'"),
    (FillsBuffer(), CE, [WIDE], {}, r"'shift' from nothing to \(16,\)"),
    (Caches(), CE, [], {}, r"'shift' from \(1, 4\) to \(\d+, 4\)"),
    (
        Returns(lambda logits, *_: torch.complex(logits, logits)),
        of_absolute,
        [],
        {},
        r"complex64 \(2, 3\), but columns hold real numbers",
    ),
    (nn.Linear(4, 3), Margin(), [], {}, r"Margin has .* its own, 'scale', .*loss='model'"),
)
def test_a_model_or_loss_that_does_otherwise_is_refused_with_what_it_does(
    model: Any, loss: Any, features: list[ColumnSpec], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        tried(model, loss, *features, **changes)


def test_a_loss_whose_parameters_are_frozen_is_taken() -> None:
    tried(nn.Linear(4, 3), Margin().requires_grad_(False))


def test_a_loss_of_one_tensor_given_several_outputs_is_refused_with_those() -> None:
    pair = Returns(lambda logits, training, labels: (logits, logits))
    with pytest.raises(ModelError) as refused:
        tried(pair, nn.CrossEntropyLoss())
    message = str(refused.value)
    assert "outputs a tuple of 0 float32 (2, 3), 1 float32 (2, 3) and targets int64 (2,)" in message
    assert "give a function" in message


def test_a_loss_that_fails_on_what_validation_gives_it_is_refused_where_there_is_validation() -> (
    None
):
    modes = Returns(lambda logits, training, labels: (logits, logits) if training else (logits,))
    tried(modes, of_two)
    with pytest.raises(ModelError, match="evaluation mode, which validation uses, on outp"):
        tried(modes, of_two, validated=True)


def test_a_model_that_keeps_what_it_once_computed_still_has_its_backward_pass() -> None:
    """As rotary embeddings are kept; torch refuses a backward pass through inference tensors."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.kept: dict[int, Tensor] = {}

        def forward(self, features: Tensor) -> Tensor:
            rows = len(features)
            if rows not in self.kept:
                self.kept[rows] = torch.ones(rows, 1) * 2
            return self.layer(features) * self.kept[rows]

    model = Keeps()
    tried(model, nn.CrossEntropyLoss())
    model.train()(torch.zeros(ROWS, 4)).sum().backward()
    assert model.training


class Cools(nn.Module):
    """Counts its calls, and predicts by a temperature and a mean that it has followed."""

    def __init__(self, *, predicts_by_them: bool) -> None:
        super().__init__()
        self.layer, self.predicts_by_them = nn.Linear(4, 3), predicts_by_them
        self.calls, self.temperature, self.mean = 0, 1.0, torch.zeros(4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        if self.training:
            self.temperature *= 0.5
            self.mean += 0.5 * (features.mean(0) - self.mean)
            self.seen = self.seen + features.sum(0)
        logits = self.layer(features) + self.seen.sum()
        return (logits - self.mean.sum()) / self.temperature if self.predicts_by_them else logits


def test_what_predictions_need_and_fit_does_not_return_is_warned_of_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried(Cools(predicts_by_them=False), functional.cross_entropy)
    assert not caplog.messages
    tried(Cools(predicts_by_them=True), functional.cross_entropy)
    (told,) = caplog.messages
    assert "'temperature', 'mean'" in told
    assert "register_buffer" in told


class Exported(nn.Linear):
    def train(self, mode: bool = True) -> Any:
        raise NotImplementedError("Calling train() is not supported yet.")


@every_row(
    (lambda: Exported(4, 3), r"cannot be built: .*Calling train\(\) is not supported"),
    (
        partial(copy.deepcopy, prune.l1_unstructured(nn.Linear(4, 3), "weight", amount=0.5)),
        "Give a function as model that builds it, instead of",
    ),
    (
        lambda: nn.parallel.DistributedDataParallel(nn.Linear(4, 3)),
        r"init_process_group\. The strategy .* remove Distributed",
    ),
)
def test_a_model_that_cannot_be_built_is_refused_with_the_way_out(make: Any, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        built(make)


def test_a_function_that_returns_one_module_for_all_replicas_is_refused() -> None:
    module, schema = nn.Linear(4, 3), FeedSchema((FEATURES,), LABEL)
    before = module.weight.detach().clone()
    replica, _ = built(lambda: module), built(lambda: module)
    with pytest.raises(ModelError, match="returns the same module each time"):
        Trial(replica, schema, [ColumnStatistics()] * 2).step(head_of(replica.loss))
    assert torch.equal(module.weight, before)


class WarmsUp(nn.Module):
    """Counts in its first calls for less."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("share", torch.tensor(0.0))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        self.share += 0.01
        return functional.cross_entropy(outputs, targets) * self.share.clamp(max=1)


def test_a_loss_that_changes_with_each_call_is_as_it_was_after_the_trial() -> None:
    loss = WarmsUp()
    tried(nn.Linear(4, 3), loss)
    assert (loss.calls, loss.share) == (0, 0)


def test_a_loss_of_the_given_modules_parameters_is_refused_and_leaves_it_no_gradients() -> None:
    given = nn.Sequential(nn.Linear(4, 3))

    def decayed(outputs: Tensor, targets: Tensor) -> Tensor:
        squares = sum(each.square().sum() for each in given.parameters())
        return functional.cross_entropy(outputs, targets) + squares

    replica, schema = (
        built(lambda: copy.deepcopy(given), loss=decayed),
        FeedSchema((FEATURES,), LABEL),
    )
    statistics = [ColumnStatistics(), ColumnStatistics(smallest=0, largest=2)]
    with pytest.raises(ModelError, match=r"the loss computes with '0\.weight' of the module that"):
        Trial(replica, schema, statistics, given).step(head_of(decayed))
    assert all(each.grad is None for each in given.parameters())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.forward = lambda features: self.layer(features)  # type: ignore[method-assign]


def test_a_module_whose_copy_computes_with_it_is_told_to_be_built_by_a_function() -> None:
    given, schema = Branches(), FeedSchema((FEATURES,), LABEL)
    statistics = [ColumnStatistics(), ColumnStatistics(smallest=0, largest=2)]
    with pytest.raises(ModelError, match=r"'layer\.weight' .* lambda .* that builds the module"):
        Trial(built(lambda: copy.deepcopy(given)), schema, statistics, given).step(Head.LOGITS)


class Masked(nn.Module):
    """Adds minus infinity where nothing counts, as torch's masks for attention do."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0, 0, -torch.inf]), persistent=persistent)

    def forward(self, features: Tensor) -> Tensor:
        return (self.layer(features) + self.mask).exp()


def test_an_infinite_buffer_is_refused_unless_it_is_not_exchanged() -> None:
    schema, known = FeedSchema((FEATURES,), LABEL), [ColumnStatistics(), ColumnStatistics()]
    with pytest.raises(ModelError, match=r"1 buffer of .* 'mask'.* with persistent=False"):
        Trial(built(partial(Masked, True)), schema, known).step(Head.LOGITS)
    Trial(built(partial(Masked, False)), schema, known).step(Head.LOGITS)


def test_an_optimizer_of_another_modules_parameters_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1)
    with pytest.raises(ModelError, match="builds a SGD of parameters that are not those of"):
        built(lambda: nn.Linear(4, 3), optimizer=lambda parameters: optimizer)


def test_an_optimizer_that_predicts_with_other_parameters_than_it_trains_is_refused() -> None:
    class ScheduleFree(torch.optim.SGD):
        def eval(self) -> None:
            """Sets the parameters to an average of those that were trained."""

    with pytest.raises(ModelError, match=r"builds a ScheduleFree, which has eval\(\)"):
        built(lambda: nn.Linear(4, 3), optimizer=partial(ScheduleFree, lr=0.1))


@every_row(
    (nn.CrossEntropyLoss(ignore_index=9), 9),
    (nn.CrossEntropyLoss(), -100),
    (functional.cross_entropy, -100),
    (partial(functional.cross_entropy, ignore_index=9), 9),
    (partial(functional.cross_entropy, ignore_index=-1), -1),
)
def test_a_label_that_the_loss_leaves_out_need_be_no_class(loss: Any, label: int) -> None:
    schema = FeedSchema((FEATURES,), LABEL)
    labels = ColumnStatistics(smallest=min(0, label), largest=max(2, label))
    replica = built(lambda: nn.Linear(4, 3), loss=loss)
    outputs = Trial(replica, schema, [ColumnStatistics(), labels]).step(head_of(loss))
    assert outputs.shape == (ROWS, 3)
