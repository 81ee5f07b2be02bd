"""An optimizer's state is flat, of one layout from the start, and is used from where it lies."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every, every_row
from interruptions import same_bits
from replicas import (
    OPTIMIZERS,
    batch,
    batch_norm_net,
    replica_of,
    state_of,
    train_plainly,
    views_of,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from toys import classification, make_job, mlp, schema

from sparkdl.errors import TrainingError
from sparkdl.replica import Replica, optimizer_state
from sparkdl.strategies import OuterOptimizer, OuterSGD, ParameterAveraging, Strategy
from sparkdl.testing import run_world
from sparkdl.worker import Job


@every("name", OPTIMIZERS)
def test_the_layout_is_the_same_before_training_and_asking_for_it_moves_nothing(name: str) -> None:
    trained, untrained = (replica_of(batch_norm_net(), OPTIMIZERS[name]) for _ in range(2))
    trained.step(batch(0))
    trained.step(batch(1))
    assert trained.layout(with_optimizer=True) == untrained.layout(with_optimizer=True)
    assert same_values(untrained.module, batch_norm_net())


def same_values(one: nn.Module, other: nn.Module, rtol: float = 0) -> bool:
    """Raises what differs."""
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=rtol, atol=rtol)
    return True


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3).double()
        self.unused = nn.Linear(2, 2).double()

    def forward(self, features: Tensor) -> Tensor:
        return self.used(features)


@every("name", OPTIMIZERS)
def test_a_parameter_that_forward_does_not_use_keeps_its_value_and_its_place(name: str) -> None:
    replica = replica_of(PartlyUsed(), OPTIMIZERS[name])
    before = replica.module.unused.weight.detach().clone()
    layouts = set()
    for seed in range(3):
        replica.step(batch(seed))
        replica.segments(with_optimizer=True)
        layouts.add(replica.layout(with_optimizer=True))
    assert torch.equal(replica.module.unused.weight, before)
    assert layouts == {replica_of(PartlyUsed(), OPTIMIZERS[name]).layout(with_optimizer=True)}


LAZY: dict[str, Any] = {
    **OPTIMIZERS,
    "dampening": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01, t0=2),
}


class LateHead(nn.Module):
    """Uses a second layer from its third minibatch on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 3).double()
        self.late = nn.Linear(6, 3).double()
        self.used = 0

    def forward(self, features: Tensor) -> Tensor:
        self.used += 1
        outputs = self.first(features)
        return outputs + self.late(features) if self.used > 2 else outputs


def require_the_steps_of_plain_torch(model: Any, build: Any) -> None:
    replica, oracle = replica_of(model(), build), model()
    oracle.load_state_dict(replica.module.state_dict())
    optimizer = build(oracle.parameters())
    for seed in range(6):
        replica.segments(with_optimizer=True)
        replica.step(batch(seed))
        train_plainly(oracle, optimizer, batch(seed).features[0], batch(seed).targets)
        assert same_values(replica.module, oracle, 1e-12)


@every("name", LAZY)
def test_a_parameter_with_a_late_first_gradient_is_trained_as_in_plain_torch(name: str) -> None:
    require_the_steps_of_plain_torch(LateHead, LAZY[name])


class CountsSteps(torch.optim.SGD):
    """Shortens its steps by counts that are no parameter's, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        self.seen = getattr(self, "seen", 0) + 1  # made by the first step
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / (group["count"] + self.taken + self.seen)
        return super().step(closure)


def counted_by_a_hook(parameters: Any) -> torch.optim.Optimizer:
    """Takes smaller and smaller steps, by a count that only its hook knows."""
    optimizer, taken = torch.optim.SGD(parameters, lr=0.1, momentum=0.9), [0]

    def shorten(of: torch.optim.Optimizer, *_: Any) -> None:
        taken[0] += 1
        for group in of.param_groups:
            group["lr"] = 0.1 / taken[0]

    optimizer.register_step_pre_hook(shorten)
    return optimizer


@every(
    ("model", "build"),
    [
        (model, build)
        for model in (PartlyUsed, LateHead)
        for build in (CountsSteps, counted_by_a_hook)
    ],
)
def test_counts_of_an_optimizers_own_steps_are_those_of_plain_torch(model: Any, build: Any) -> None:
    require_the_steps_of_plain_torch(model, build)


@every("name", LAZY)
def test_state_that_another_replica_has_is_taken_over_with_its_parameter(name: str) -> None:
    late, early = replica_of(LateHead(), LAZY[name]), replica_of(LateHead(), LAZY[name])
    early.module.used = 10
    late.step(batch(0))
    early.step(batch(0))
    mine, other = (one.segments(with_optimizer=True) for one in (late, early))
    for values, others in zip(mine, other, strict=True):
        values.copy_(others)
    late.module.used = 10
    for seed in (1, 2):
        late.step(batch(seed))
        early.step(batch(seed))
        assert same_values(late.module, early.module)
    assert views_of(state_of(late.optimizer), late.segments(with_optimizer=True))


def test_a_new_optimizer_has_nothing_of_the_one_before() -> None:
    replica, fresh = replica_of(LateHead(), LAZY["adam"]), replica_of(LateHead(), LAZY["adam"])
    replica.step(batch(0))
    replica.segments(with_optimizer=True)
    replica.module.load_state_dict(LateHead().state_dict())
    replica.module.used = 0
    replica.rebuild_optimizer()
    for seed in range(4):
        replica.segments(with_optimizer=True)
        replica.step(batch(seed))
        fresh.step(batch(seed))
    assert same_values(replica.module, fresh.module)


@every("flatten_first", [True, False])
@every("name", OPTIMIZERS)
def test_an_optimizer_without_its_state_steps_like_a_new_one_where_its_schedule_stands(
    name: str, flatten_first: bool
) -> None:
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    replica = Replica(
        mlp(), OPTIMIZERS[name], nn.CrossEntropyLoss(), scheduler=schedule, scheduler_every="step"
    )
    for seed in range(3):
        replica.step(batch(seed))
    if flatten_first:
        replica.segments(with_optimizer=True)
    oracle = copy.deepcopy(replica.module)

    replica.reset_optimizer_state()
    for seed in range(3, 5):
        replica.step(batch(seed))

    optimizer = OPTIMIZERS[name](oracle.parameters())
    optimizer.param_groups[0]["lr"] *= 0.5**3
    plain = Replica(oracle, lambda parameters: optimizer, nn.CrossEntropyLoss())
    for seed in range(3, 5):
        plain.step(batch(seed))
        optimizer.param_groups[0]["lr"] *= 0.5
    assert same_values(replica.module, oracle)
    assert replica.schedule.steps == 5


class GrowsLate(torch.optim.SGD):
    """Keeps a second copy of the parameters from a step on."""

    def __init__(self, parameters: Any, *, grows_at: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["steps"] = 0
        self.grows_at = grows_at

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        group = self.param_groups[0]
        group["steps"] += 1
        if group["steps"] >= self.grows_at:
            for parameter in group["params"]:
                self.state[parameter].setdefault("slow", parameter.detach().clone())


def test_state_that_grows_after_it_was_counted_which_is_no_step_is_refused_by_name() -> None:
    replica = replica_of(mlp(), partial(GrowsLate, grows_at=3))
    numel = sum(parameter.numel() for parameter in replica.module.parameters())
    replica.count_optimizer_state()
    assert replica.optimizer.param_groups[0]["steps"] == 0
    replica.step(batch(0))
    replica.segments(with_optimizer=True)
    replica.step(batch(1))
    replica.step(batch(2))
    replica.segments(with_optimizer=False)
    for _ in range(2):
        with pytest.raises(TrainingError, match=f"GrowsLate .*0 values of 'slow'.*{numel} now"):
            replica.segments(with_optimizer=True)


class Lingering(TorchDispatchMode):
    """Counts, at each copy, how many of some tensors have not been freed."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._storages = [StorageWeakRef(each.untyped_storage()) for each in tensors]
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.counts.append(sum(not each.expired() for each in self._storages))
        return func(*args, **(kwargs or {}))


def test_state_is_freed_one_tensor_after_the_other_while_it_moves() -> None:
    replica = replica_of(nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]), torch.optim.Adam)
    for parameter in replica.trainable():
        parameter.grad = torch.ones_like(parameter)
    replica.update()
    state = [each for one in replica.optimizer.state.values() for each in one.values()]
    with Lingering(state) as lingering:
        del state
        replica.segments(with_optimizer=True)
    assert lingering.counts[0] == 30
    assert lingering.counts[-1] == 1


DATA = classification([22, 17], dtype=np.float32)
NAMES = ["Adam", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD"]


def keep_counters_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "is_away", lambda tensor, device: tensor.dim() == 0)


def optimizer(name: str) -> Any:
    return partial(getattr(torch.optim, name), lr=0.01)


class Scaled(nn.Module):
    """One of its parameters is a number, with moments that are no larger than a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * self.layer(features)


# The first step of the others does not run on the meta device.
@every("name", ["SGD", *NAMES[:-1], "AdamW", "Adamax"])
def test_a_replica_on_another_device_has_the_layout_that_the_driver_has(name: str) -> None:
    driver, worker = (
        Replica(Scaled(), optimizer(name), nn.CrossEntropyLoss(), device)
        for device in ("cpu", "meta")
    )
    assert worker.layout(with_optimizer=True) == driver.layout(with_optimizer=True)


def job_of(strategy: Strategy[Any], name: str) -> Job:
    changes: dict[str, Any] = {"strategy": strategy, "optimizer": optimizer(name), "epochs": 3}
    return make_job(Scaled(), schema=schema(6, torch.float32), **changes)


@every_row(
    *((name, ParameterAveraging(2)) for name in NAMES),
    ("Adam", ParameterAveraging(2, wire_dtype="bfloat16")),
    ("ASGD", OuterOptimizer(2, OuterSGD(0.7, 0.5), inner_state="average")),
)
def test_it_changes_no_bit_of_what_is_learned(
    monkeypatch: pytest.MonkeyPatch, name: str, strategy: Strategy[Any]
) -> None:
    job = job_of(strategy, name)
    expected = run_world(job, DATA.shards())
    keep_counters_elsewhere(monkeypatch)
    assert same_bits(run_world(job, DATA.shards()), expected)


def test_a_parameter_that_gets_its_first_gradient_late_takes_over_the_counter_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_counters_elsewhere(monkeypatch)
    replica = replica_of(Scaled().double(), optimizer("Adam"))
    (flat,) = [f for f in replica.segments(with_optimizer=True)[1:] if f.dtype == torch.float32]
    flat.fill_(4.0)
    replica.step(batch(0))
    assert {float(state["step"]) for state in replica.optimizer.state.values()} == {5.0}


def test_a_group_of_parameters_may_be_empty() -> None:
    def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": []}, {"params": parameters}]
        return torch.optim.Adam(groups, lr=0.01)

    replicas = replica_of(Scaled(), grouped), replica_of(Scaled(), optimizer("Adam"))
    layouts = [replica.layout(with_optimizer=True) for replica in replicas]
    assert layouts[0] == layouts[1]
