"""A step of a replica is the step that plain torch takes."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from every_row import every
from replicas import OPTIMIZERS, SGD, batch, batch_norm_net, replica_of, train_plainly
from torch import Tensor, nn
from toys import mlp

from sparkdl.errors import ModelError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica


@every("name", OPTIMIZERS)
@every("flatten_first", [False, True])
def test_training_equals_plain_torch(name: str, flatten_first: bool) -> None:
    replica = replica_of(batch_norm_net(), OPTIMIZERS[name])
    oracle = batch_norm_net()
    optimizer = OPTIMIZERS[name](oracle.parameters())
    for seed in range(5):
        if flatten_first and seed:  # once there is state, moving it must not disturb it
            replica.segments(with_optimizer=True)
        loss = replica.step(batch(seed))
        assert not loss.requires_grad
        features, targets = batch(seed).features[0], batch(seed).targets
        expected = train_plainly(oracle, optimizer, features, targets)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(
        replica.module.state_dict(), oracle.state_dict(), rtol=1e-9, atol=1e-12
    )


@every("fails", [False, True])
def test_layers_kept_in_evaluation_mode_stay_in_it_and_others_train_on_after_evaluating(
    fails: bool,
) -> None:
    replica = replica_of(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), mlp()).double())
    replica.module[1].eval()  # type: ignore[index]
    before = [each.training for each in replica.module.modules()]

    def watch(*_: object) -> None:
        if fails:
            raise ArithmeticError

    with pytest.raises(ArithmeticError) if fails else nullcontext():
        replica.evaluate([batch()], watch)
    assert [each.training for each in replica.module.modules()] == before


def test_a_loss_with_weights_of_its_own_works() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    replica = Replica(mlp(), SGD, loss)
    (features,) = batch().features
    expected = loss(mlp()(features), batch().targets)
    assert replica.step(batch()).item() == pytest.approx(expected.item())


def test_gradients_are_clipped_by_their_norm_before_the_step() -> None:
    module = nn.Linear(3, 2).double()
    expected = copy.deepcopy(module)
    replica = Replica(module, partial(torch.optim.SGD, lr=1.0), nn.MSELoss(), clip_norm=0.01)
    features, targets = torch.ones(4, 3).double(), torch.full((4, 2), 9.0).double()

    replica.step(Batch((features,), targets, last=True))

    nn.functional.mse_loss(expected(features), targets).backward()
    norm = torch.cat([p.grad.flatten() for p in expected.parameters()]).norm()
    assert norm > 1
    for mine, other in zip(module.parameters(), expected.parameters(), strict=True):
        step = other.grad * (0.01 / norm)
        assert torch.allclose(mine, other - step, rtol=0, atol=1e-8)


def test_bf16_computes_under_autocast_and_keeps_the_parameters_dtype() -> None:
    seen: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(features)
            seen.append(outputs.dtype)
            return outputs

    optimizer = partial(torch.optim.SGD, lr=0.1)
    for precision in ("float32", "bf16"):
        module = Watched(3, 2)
        replica = Replica(module, optimizer, nn.CrossEntropyLoss(), precision=precision)
        replica.step(Batch((torch.randn(4, 3),), torch.tensor([0, 1, 0, 1]), last=True))
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert seen == [torch.float32, torch.bfloat16]


def test_a_model_may_differentiate_itself_where_it_is_evaluated() -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp(6)

        def forward(self, features: Tensor) -> Tensor:
            with torch.enable_grad():
                places = features.requires_grad_()
                (slope,) = torch.autograd.grad(self.layer(places).sum(), places)
            return slope[:, :3]

    loss, weight = replica_of(Slope()).evaluate([batch()])
    places = batch().features[0].requires_grad_()
    (slope,) = torch.autograd.grad(mlp(6)(places).sum(), places)
    expected = nn.functional.cross_entropy(slope[:, :3], batch().targets)
    assert loss / weight == pytest.approx(expected.item())


def test_a_replica_without_anything_to_train_is_refused_before_its_optimizer_is_built() -> None:
    with pytest.raises(ModelError, match="Sequential has no parameter that requires a gradient"):
        replica_of(mlp().requires_grad_(False))
