"""State that optimizers keep on the CPU beside a GPU's moments is exchanged as if it were there.

A machine without a GPU has one device. So the meta device stands for another where only kinds and
sizes matter; where values do, whatever is a single number counts as being on another one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from interruptions import die_after, policy, same_bits
from replicas import batch, replica_of
from torch import Tensor, nn
from toys import classification, make_job, schema

from sparkdl.replica import Replica, optimizer_state
from sparkdl.strategies import OuterOptimizer, OuterSGD, ParameterAveraging, Strategy
from sparkdl.testing import run_world
from sparkdl.worker import Job

DATA = classification([22, 17], dtype=np.float32)
OPTIMIZERS = ["Adam", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD"]


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
@every("name", ["SGD", *OPTIMIZERS[:-1], "AdamW", "Adamax"])
def test_a_replica_on_another_device_has_the_layout_that_the_driver_has(name: str) -> None:
    driver, worker = (
        Replica(Scaled(), optimizer(name), nn.CrossEntropyLoss(), device)
        for device in ("cpu", "meta")
    )
    assert worker.layout(with_optimizer=True) == driver.layout(with_optimizer=True)


def test_counters_are_where_they_are_exchanged_and_come_back_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_counters_elsewhere(monkeypatch)
    replica = replica_of(Scaled().double(), optimizer("Adam"))
    for seed in range(3):
        replica.step(batch(seed))
    segments = replica.segments(with_optimizer=True)
    counters = [state["step"] for state in replica.optimizer.state.values()]
    (shown,) = [flat for flat in segments[1:] if flat.dtype == torch.float32]
    assert shown.tolist() == [3.0] * 3
    shown.copy_(torch.tensor([5.0, 6.0, 7.0]))
    replica.step(batch(4))
    counted = [float(state["step"]) for state in replica.optimizer.state.values()]
    assert sorted(counted) == [6.0, 7.0, 8.0]
    assert sorted(map(float, counters)) == counted  # the same tensors
    replica.segments(with_optimizer=True)
    assert sorted(shown.tolist()) == [6.0, 7.0, 8.0]


def job_of(strategy: Strategy[Any], name: str) -> Job:
    return make_job(
        Scaled(),
        schema=schema(6, torch.float32),
        strategy=strategy,
        optimizer=optimizer(name),
        epochs=3,
    )


STRATEGIES: dict[str, Strategy[Any]] = {
    "averaging": ParameterAveraging(2),
    "bfloat16": ParameterAveraging(2, wire_dtype="bfloat16"),
    "outer": OuterOptimizer(2, OuterSGD(0.7, 0.5), inner_state="average"),
}


@every("name", OPTIMIZERS)
@every("strategy", STRATEGIES)
def test_it_changes_no_bit_of_what_is_learned(
    name: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(STRATEGIES[strategy], name)
    expected = run_world(job, DATA.shards())
    keep_counters_elsewhere(monkeypatch)
    assert same_bits(run_world(job, DATA.shards()), expected)


@every("windows", [2, 7])
def test_nor_of_what_is_learned_after_an_interruption(
    tmp_path: Path, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(ParameterAveraging(2), "Adam")
    expected = run_world(job, DATA.shards())
    keep_counters_elsewhere(monkeypatch)
    assert die_after(job, DATA, tmp_path / "c", windows, every_rounds=1)
    resumed = run_world(job, DATA.shards(), checkpoints=policy(tmp_path / "c", every_rounds=1))
    assert same_bits(resumed, expected)


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


class Replacing(torch.optim.Adam):
    """Makes a new counter in each step, in place of writing to the one it has."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["step"] = state["step"].clone()


def test_counters_that_are_replaced_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    adam = job_of(ParameterAveraging(2), "Adam")
    expected = run_world(adam, DATA.shards())
    job = replace(adam, optimizer=partial(Replacing, lr=0.01))
    keep_counters_elsewhere(monkeypatch)
    assert same_bits(run_world(job, DATA.shards()), expected)
