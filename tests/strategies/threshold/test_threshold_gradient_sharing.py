"""Gradient sharing against numpy, parameter averaging, a formula of bytes, and lost workers."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from every_row import every
from thresholds import STRATEGY, Encoder, job
from torch import Tensor, nn
from toys import (
    Data,
    _train_by_hand,
    classification,
    make_job,
    mlp,
    relative_error,
    rows_of,
    windows_by_hand,
)
from trainings import DATA, SGD, SIZES

from sparkdl.errors import NonFiniteError
from sparkdl.events import WindowReport
from sparkdl.replica import Replica
from sparkdl.strategies import ParameterAveraging, Run, ThresholdGradientSharing
from sparkdl.testing import run_world


def shared_by_hand(
    strategy: ThresholdGradientSharing, data: Data, model: nn.Module, epochs: int, optimizer: Any
) -> nn.Module:
    """In one process; workers' messages are averaged by rows, in the order of ranks."""
    center = copy.deepcopy(model).train()
    ranks = range(len(data.sizes))
    modules = [copy.deepcopy(center) for _ in ranks]
    optimizers = [optimizer(module.parameters()) for module in modules]
    flat = nn.utils.parameters_to_vector
    encoders = [Encoder(strategy, len(flat(center.parameters()))) for _ in ranks]
    for _, windows in windows_by_hand(data, epochs, 4, strategy.period):
        old = flat(center.parameters()).detach().numpy().copy()
        total, weights = np.zeros_like(old), rows_of(windows)
        for rank, window in windows.items():
            begin = torch.from_numpy(old.copy())  # parameters become views of it
            nn.utils.vector_to_parameters(begin, modules[rank].parameters())
            _train_by_hand(modules[rank], optimizers[rank], window)
            change = flat(modules[rank].parameters()).detach().numpy() - old
            total += weights[rank] * encoders[rank].encode(change)
        new = torch.from_numpy(old + total / sum(weights.values()))
        nn.utils.vector_to_parameters(new, center.parameters())
    return center


@pytest.mark.parametrize(
    "strategy",
    [
        STRATEGY,
        ThresholdGradientSharing(0.02, sparsity=None, clip=None),
        ThresholdGradientSharing(0.005, sparsity=(0.01, 0.1), clip=1.0, period=3),
    ],
    ids=["everything", "strom", "windows"],
)
@pytest.mark.parametrize(
    "aggregation", ["driver", pytest.param("executors", marks=pytest.mark.nightly)]
)
def test_it_is_the_rule_in_numpy(strategy: Any, aggregation: Any) -> None:
    given = replace(strategy, aggregation=aggregation)
    ranks_as: Any = "threads" if aggregation == "driver" else "processes"
    outcome = run_world(job(strategy=given), DATA.shards(), ranks_as=ranks_as)
    oracle = shared_by_hand(strategy, DATA, mlp(), 3, SGD)
    assert relative_error(outcome.module, oracle) < 1e-9
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3


class Normed(nn.Module):
    """With buffers, of numbers and of integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.seen.fill_(True)
        return self.net(features)


cloudpickle.register_pickle_by_value(__import__(__name__))


@every("aggregation", ["driver", "executors"])
def test_buffers_are_averaged_and_never_encoded(aggregation: Any) -> None:
    data = classification([24, 24, 16])
    averaging = ParameterAveraging(period=2, average_optimizer_state=False)
    expected = run_world(make_job(Normed(), strategy=averaging, epochs=2), data.shards())
    strategy = ThresholdGradientSharing(0, period=2, aggregation=aggregation)
    given = make_job(Normed(), strategy=strategy, epochs=2)
    outcome = run_world(given, data.shards(), ranks_as="processes")
    assert relative_error(outcome.module, expected.module) < 1e-9
    mine, other = outcome.module.state_dict(), expected.module.state_dict()
    assert mine["net.1.num_batches_tracked"] == other["net.1.num_batches_tracked"] > 0
    assert mine["seen"]


class Alone:
    """A driver, and a group, of one worker, by what shares of which the center moves."""

    index, members, deadline_s, device = 0, (0,), 30.0, torch.device("cpu")
    commit_wanted = False

    def __init__(self, center: Tensor) -> None:
        self.center = center

    def exchange(self, segments: list[Tensor], window: WindowReport) -> None:
        self.center += segments[0]
        segments[0].copy_(self.center)

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        return [value]

    def all_gather(self, values: Tensor) -> list[Tensor]:
        return [values]


def half_precision_run() -> Run:
    """Of a replica of ones, which takes no steps."""
    module = nn.Linear(2, 1, bias=False).bfloat16()
    nn.init.ones_(module.weight)
    replica = Replica(module, partial(torch.optim.SGD, lr=0.0), nn.MSELoss())
    alone: Any = Alone(torch.ones(2))
    return Run(0, replica, alone, rows=100, collective=alone)


def learn_once(run: Run) -> None:
    """More than the replica can hold; each message has less."""
    for values in run.replica.segments(with_optimizer=False):
        values += 2.0**-6


def share(run: Run, state: Any, times: int) -> None:
    for _ in range(times):
        run.examples = 1
        state.exchange(run, last=False)


@every("aggregation", ["driver", "executors"])
def test_thresholds_below_half_precision_add_up_in_the_center(aggregation: Any) -> None:
    strategy = ThresholdGradientSharing(2.0**-10, None, None, aggregation=aggregation)
    run = half_precision_run()
    state = strategy.start(run)
    learn_once(run)
    share(run, state, 20)
    (held,) = run.replica.segments(with_optimizer=False)
    assert held.tolist() == [1 + 2.0**-6] * 2


def test_a_center_of_half_precision_goes_on_among_executors() -> None:
    strategy = ThresholdGradientSharing(2.0**-10, None, None, aggregation="executors")
    run = half_precision_run()
    state = strategy.start(run)
    learn_once(run)
    for _ in range(4):  # none of which reaches the replica if it starts from there
        share(run, state, 2)
        saved = {key: copy.deepcopy(value) for key, value in strategy.saved_state(state).items()}
        (held,) = run.replica.segments(with_optimizer=False)
        run = half_precision_run()
        run.replica.segments(with_optimizer=False)[0].copy_(held)
        state = strategy.start(run)
        strategy.restore_state(state, saved)
    share(run, state, 12)
    (held,) = run.replica.segments(with_optimizer=False)
    assert held.tolist() == [1 + 2.0**-6] * 2


class TurnsBad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.passes = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        with torch.no_grad():
            if self.passes == 6:
                self.net[0].weight[0, 0] = float("nan")
        return self.net(features)


def test_what_is_not_finite_does_not_hide_in_a_residual() -> None:
    with pytest.raises(NonFiniteError, match="step 6"):
        run_world(job(TurnsBad(), max_failures=0), DATA.shards())
