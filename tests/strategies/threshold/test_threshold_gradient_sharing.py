"""Gradient sharing against numpy, parameter averaging, a formula of bytes, and lost workers."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import numpy as np
import pytest
import torch
from interruptions import same_bits
from misbehaving import KillsOnce, kill_once, resume_after
from recorded import recorded_decisions
from replayed import Replay
from torch import Tensor, nn
from toys import (
    Data,
    average_by_hand,
    batches_by_hand,
    classification,
    make_job,
    mlp,
    relative_error,
)

from sparkdl.errors import ConfigError, NonFiniteError
from sparkdl.events import WindowReport
from sparkdl.feed.feed import FeedOptions
from sparkdl.replica import Replica
from sparkdl.strategies import ParameterAveraging, Run, ThresholdGradientSharing
from sparkdl.testing import run_world
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(misbehaving)

SIZES = [40, 33, 21]
"""Of batches of 4: 10, 9 and 6 steps an epoch."""
DATA = classification(SIZES)
SGD = partial(torch.optim.SGD, lr=0.1)
STRATEGY = ThresholdGradientSharing(0.01, sparsity=(0.05, 0.3), clip=5.0, shake_every=4)
AMONG = replace(STRATEGY, aggregation="executors")


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    settings = {"strategy": STRATEGY, "epochs": 3, "max_failures": 1, **changes}
    return make_job(model or mlp(), **settings)


class Encoder:
    """The rule, in float64 numpy, once more."""

    def __init__(self, strategy: ThresholdGradientSharing, size: int) -> None:
        self.strategy = strategy
        self.residual = np.zeros(size)
        self.threshold = rounded(strategy.threshold)
        self.messages = 0

    def encode(self, change: np.ndarray) -> np.ndarray:
        strategy = self.strategy
        self.messages += 1
        shake = strategy.shake_every is not None and self.messages % strategy.shake_every == 0
        threshold = rounded(self.threshold / 3) if shake else self.threshold
        self.residual = self.residual + change
        large = np.abs(self.residual) >= threshold
        share = np.where(large, np.sign(self.residual) * threshold, 0.0)
        if not threshold:
            share, large = self.residual.copy(), np.ones(len(change), bool)
        self.residual = self.residual - share
        if strategy.clip is not None and self.messages % 5 == 0 and threshold:
            most = strategy.clip * self.threshold
            self.residual = np.clip(self.residual, -most, most)
        if strategy.sparsity is not None and not shake:
            least, most = strategy.sparsity
            if large.mean() > most:
                self.threshold = rounded(self.threshold * 2 ** (1 / 20))
            elif large.mean() < least:
                self.threshold = rounded(self.threshold / 2 ** (1 / 20))
        return share


def rounded(threshold: float) -> float:
    """To 8 significant bits."""
    if not threshold:
        return 0.0
    fraction, exponent = math.frexp(threshold)
    return round(fraction * 256) / 256 * 2.0**exponent


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
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(data, rank, epoch, 4) for rank in ranks]
        for start in range(0, max(map(len, plans)), strategy.period):
            old = flat(center.parameters()).detach().numpy().copy()
            total, rows = np.zeros_like(old), 0
            for rank in ranks:
                begin = torch.from_numpy(old.copy())  # parameters become views of it
                nn.utils.vector_to_parameters(begin, modules[rank].parameters())
                window = plans[rank][start : start + strategy.period]
                for features, targets in window:
                    optimizers[rank].zero_grad()
                    outputs = modules[rank](torch.from_numpy(features))
                    nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
                    optimizers[rank].step()
                count = sum(len(targets) for _, targets in window)
                if count:
                    change = flat(modules[rank].parameters()).detach().numpy() - old
                    total += count * encoders[rank].encode(change)
                    rows += count
            new = torch.from_numpy(old + total / rows)
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
    "aggregation", ["driver", pytest.param("executors", marks=pytest.mark.slow)]
)
def test_it_is_the_rule_in_numpy(strategy: Any, aggregation: Any) -> None:
    given = replace(strategy, aggregation=aggregation)
    ranks_as: Any = "threads" if aggregation == "driver" else "processes"
    outcome = run_world(job(strategy=given), DATA.shards(), ranks_as=ranks_as)
    oracle = shared_by_hand(strategy, DATA, mlp(), 3, SGD)
    assert relative_error(outcome.module, oracle) < 1e-9
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    assert outcome.history[-1].loss < outcome.history[0].loss
    again = run_world(job(strategy=given), DATA.shards(), ranks_as=ranks_as)
    assert same_bits(outcome, again)


@pytest.mark.parametrize("aggregation", ["driver", "executors"])
@pytest.mark.parametrize("period", [1, 3])
def test_without_a_threshold_it_is_parameter_averaging(aggregation: Any, period: int) -> None:
    strategy = ThresholdGradientSharing(0, period=period, aggregation=aggregation)
    momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    given = job(strategy=strategy, optimizer=momentum)
    outcome = run_world(given, DATA.shards(), ranks_as="processes")
    oracle = average_by_hand(
        mlp(),
        momentum,
        DATA,
        period=period,
        epochs=3,
        batch_size=4,
        average_optimizer_state=False,
    )
    assert relative_error(outcome.module, oracle) < 1e-9


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


@pytest.mark.parametrize("aggregation", ["driver", "executors"])
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


@pytest.mark.parametrize(
    ("strategy", "windows"),
    [
        pytest.param(STRATEGY, 4, marks=pytest.mark.slow),
        (STRATEGY, 14),
        pytest.param(STRATEGY, 25, marks=pytest.mark.slow),
        pytest.param(AMONG, 7, marks=pytest.mark.slow),
        (replace(AMONG, commit_every=3), 7),
    ],
    ids=["4", "14", "25", "executors", "executors' commits"],
)
def test_resumed_it_ends_in_the_same_bits(tmp_path: Path, strategy: Any, windows: int) -> None:
    given = job(strategy=strategy)
    ranks_as: Any = "threads" if strategy is STRATEGY else "processes"
    whole = run_world(given, DATA.shards(), ranks_as=ranks_as)
    again = resume_after(windows, given, DATA.shards(), tmp_path, ranks_as)
    assert same_bits(again, whole)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"feed": FeedOptions(reshuffle_every=1)}, marks=pytest.mark.slow),
        pytest.param({"strategy": AMONG}, marks=pytest.mark.slow),
        {"strategy": replace(AMONG, commit_every=3)},
    ],
    ids=["driver", "executors", "commits"],
)
def test_when_all_start_again_residuals_go_on(tmp_path: Path, given: dict[str, Any]) -> None:
    whole = run_world(job(**given), DATA.shards(), ranks_as="processes")
    killed = job(KillsOnce(tmp_path, after=12), **given)
    outcome = kill_once(killed, DATA.shards())
    assert same_bits(outcome, whole)


class ByHand(Replay):
    """Encoded in numpy: who joins has nothing left over."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.encoders: dict[int, Encoder] = {}

    def send_center(self, rank: int, *, joins: bool) -> None:
        if joins:
            self.encoders[rank] = Encoder(STRATEGY, sum(map(torch.numel, self.center)))

    def commit(self, windows: list[WindowReport]) -> None:
        old = nn.utils.parameters_to_vector(self.center).numpy()
        total, rows = np.zeros_like(old), 0
        for window in sorted(windows, key=lambda window: window.rank):
            self.put(self.center)
            self.train(window)
            if window.examples:
                mine = nn.utils.parameters_to_vector(self.module.parameters()).detach().numpy()
                total += window.examples * self.encoders[window.rank].encode(mine - old)
                rows += window.examples
        new = torch.from_numpy(old + total / max(1, rows))
        nn.utils.vector_to_parameters(new, self.center)


def test_a_killed_worker_comes_back_without_its_residual_and_nothing_else_is_lost(
    tmp_path: Path,
) -> None:
    killed = job(KillsOnce(tmp_path, after=12))
    with recorded_decisions() as decisions:
        outcome = kill_once(killed, DATA.shards())
    oracle = ByHand(DATA).follow(decisions)
    assert relative_error(outcome.module.get_submodule("net"), oracle) < 1e-9


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
        state.exchange(run)


@pytest.mark.parametrize("aggregation", ["driver", "executors"])
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threshold": -1.0}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"threshold": True}, "threshold"),
        ({"sparsity": (0.1, 0.01)}, "sparsity"),
        ({"sparsity": (0, 0.1)}, "sparsity"),
        ({"sparsity": 0.1}, "sparsity"),
        ({"clip": 0.5}, "clip"),
        ({"shake_every": 0}, "shake_every"),
        ({"period": 0}, "period"),
        ({"aggregation": "mesh"}, "aggregation"),
        ({"commit_every": 5}, "commit_every"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ThresholdGradientSharing(**changes)
