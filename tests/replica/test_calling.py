"""What a model is called with, and what of its outputs and the labels its loss is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_row import every
from models import ModelOutput, OwnLoss
from replicas import SGD
from torch import Tensor, nn

from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.replica.losses import ModelLoss


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
