"""Gradient sharing against numpy, parameter averaging, a formula of bytes, and lost workers."""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import numpy as np
import pytest
import torch
from misbehaving import KillsOnce, die_after
from recorded import recorded_decisions
from simulated import simulated
from torch import nn
from toys import (
    Data,
    average_by_hand,
    batches_by_hand,
    classification,
    make_job,
    mlp,
    relative_error,
    schema,
)

from sparkdl.averager import channel
from sparkdl.averager import decisions as do
from sparkdl.averager.center import Frames
from sparkdl.averager.channel import Channel
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.driver import Outcome
from sparkdl.errors import ConfigError, NonFiniteError
from sparkdl.events import WindowReport
from sparkdl.feed.feed import FeedOptions
from sparkdl.strategies import Contributions, ParameterAveraging, ThresholdGradientSharing
from sparkdl.testing import run_world
from sparkdl.transport.framing import VALUES_KIND, read_prefix
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


def same_bits(first: Outcome, second: Outcome) -> bool:
    pairs = zip(
        first.module.state_dict().values(), second.module.state_dict().values(), strict=True
    )
    return all(torch.equal(mine, other) for mine, other in pairs)


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


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes of values in and out of the driver; the ranks are processes of their own."""
    counted: Counter[str] = Counter()
    send = Channel.send

    def counting_read(octets: bytearray) -> tuple[int, int]:
        kind, length = read_prefix(octets)
        counted["in"] += length if kind == VALUES_KIND else 0
        return kind, length

    def counting_send(
        self: Channel, frames: Frames, then: Callable[[], None] | None = None
    ) -> None:
        send(self, frames, then)
        if len(frames) > 1:
            counted["out"] += sum(map(len, frames[1::2]))

    monkeypatch.setattr(channel, "read_prefix", counting_read)
    monkeypatch.setattr(Channel, "send", counting_send)
    return counted


class Quadratic(nn.Module):
    """x of 1,000 numbers, of which the rows' gradient moves the first ``moving`` by 1 each step."""

    def __init__(self, moving: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1000))
        self.moving = moving

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        total = -self.x[: self.moving].sum().float() + 0 * self.x.sum()
        return total.expand(len(features), 3)


def total_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0].mean()


@pytest.mark.parametrize(
    ("moving", "up", "down"),
    [
        (0, 8, 8),
        (10, 8 + 4 * 10, 8 + 4 * 10),
        (62, 8 + 4 * 62, 8 + 4 * 62),
        (63, 8 + 2 * 125, 8 + 2 * 125),
        (1000, 8 + 2 * 125, 8 + 2 * 125),
    ],
)
def test_the_driver_receives_and_sends_what_the_formula_says(
    moving: int, up: int, down: int, traffic: Counter[str]
) -> None:
    """Every entry that moves does so by the learning rate, which is the threshold."""
    steps, workers = 4, 2
    strategy = ThresholdGradientSharing(2**-5, sparsity=None)
    given = make_job(
        Quadratic(moving),
        strategy=strategy,
        loss=total_of,
        optimizer=partial(torch.optim.SGD, lr=2**-5),
        schema=schema(dtype=torch.float32),
        epochs=2,
    )
    data = classification([4 * steps] * workers, dtype=np.float32)
    outcome = run_world(given, data.shards(), ranks_as="processes")
    expected = torch.zeros(1000)
    expected[:moving] = 2 * steps * 2**-5
    assert torch.equal(outcome.module.x.detach(), expected)
    whole = 4 * 1000
    assert traffic["in"] == 2 * steps * workers * up
    # The center at the start, and at the end of each epoch in place of what has changed.
    assert traffic["out"] == workers * (whole + 2 * ((steps - 1) * down + whole))


def test_executors_send_each_other_the_same_messages() -> None:
    """Counted where they are handed to torch, in the process of rank 0."""
    steps, moving = 4, 10
    counter = CountsGathered(Quadratic(moving))
    given = make_job(
        counter,
        strategy=ThresholdGradientSharing(2**-5, sparsity=None, aggregation="executors"),
        loss=total_of,
        optimizer=partial(torch.optim.SGD, lr=2**-5),
        schema=schema(dtype=torch.float32),
        epochs=2,
    )
    data = classification([4 * steps] * 2, dtype=np.float32)
    outcome = run_world(given, data.shards(), ranks_as="processes")
    lengths, messages = 8, 8 + 4 * moving
    # The count itself is a buffer, of 8 bytes, as integers are; it has every gather but the last,
    # which comes after the last step.
    expected = (2 * steps - 1) * (2 * lengths + messages + 8)
    assert int(outcome.module.octets) == expected


class CountsGathered(nn.Module):
    """Counts in a buffer what its process has given to all others."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("octets", torch.zeros((), dtype=torch.int64))
        self.total = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        from sparkdl.collective import Collective

        if not hasattr(Collective, "counted_by"):
            gather = Collective.all_gather

            def counting(collective: Collective, tensor: torch.Tensor) -> list[torch.Tensor]:
                Collective.counted_by.total += tensor.nbytes  # type: ignore[attr-defined]
                return gather(collective, tensor)

            Collective.all_gather = counting  # type: ignore[method-assign]
        Collective.counted_by = self  # type: ignore[attr-defined]
        self.octets.fill_(self.total)
        return self.net(features)


@pytest.mark.parametrize(
    "windows",
    [pytest.param(4, marks=pytest.mark.slow), 14, pytest.param(25, marks=pytest.mark.slow)],
)
def test_resumed_it_ends_in_the_same_bits(tmp_path: Path, windows: int) -> None:
    whole = run_world(job(), DATA.shards())
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(windows, job(), DATA.shards(), policy)
    assert same_bits(run_world(job(), DATA.shards(), checkpoints=policy), whole)


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
    outcome = run_world(killed, DATA.shards(), ranks_as="processes")
    assert len(os.listdir(tmp_path)) > 12
    assert same_bits(outcome, whole)


class ByHand:
    """What was decided, done in plain torch and numpy: who joins has nothing left over."""

    def __init__(self) -> None:
        self.module = mlp().train()
        self.encoders: dict[int, Encoder] = {}
        self.steps = dict.fromkeys(range(len(SIZES)), 0)
        self.round: list[WindowReport] = []

    def follow(self, decisions: list[do.Decision]) -> nn.Module:
        for decision in decisions:
            if isinstance(decision, do.Report) and isinstance(decision.event, WindowReport):
                self.round.append(decision.event)
                continue
            self.update()
            if isinstance(decision, do.Welcome):
                size = sum(parameter.numel() for parameter in self.module.parameters())
                self.encoders[decision.member.rank] = Encoder(STRATEGY, size)
        return self.module

    def update(self) -> None:
        windows, self.round = self.round, []
        old = nn.utils.parameters_to_vector(self.module.parameters()).detach().numpy().copy()
        total, rows = np.zeros_like(old), 0
        for window in sorted(windows, key=lambda window: window.rank):
            begin = torch.from_numpy(old.copy())
            nn.utils.vector_to_parameters(begin, self.module.parameters())
            self.train(window)
            if window.examples:
                change = begin.numpy() - old
                total += window.examples * self.encoders[window.rank].encode(change)
                rows += window.examples
        new = torch.from_numpy(old + total / max(1, rows))
        nn.utils.vector_to_parameters(new, self.module.parameters())

    def train(self, window: WindowReport) -> None:
        optimizer = SGD(self.module.parameters())
        plan = batches_by_hand(DATA, window.rank, window.epoch, 4)
        for features, targets in plan[self.steps[window.rank] : window.step_of_epoch]:
            optimizer.zero_grad()
            outputs = self.module(torch.from_numpy(features))
            nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
            optimizer.step()
        self.steps[window.rank] = 0 if window.last else window.step_of_epoch


def test_a_killed_worker_comes_back_without_its_residual_and_nothing_else_is_lost(
    tmp_path: Path,
) -> None:
    killed = job(KillsOnce(tmp_path, after=12))
    with recorded_decisions() as decisions:
        outcome = run_world(killed, DATA.shards(), ranks_as="processes")
    assert len(os.listdir(tmp_path)) > 12
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    oracle = ByHand().follow(decisions)
    assert relative_error(outcome.module.get_submodule("net"), oracle) < 1e-9


def test_it_learns_what_all_reduce_learns_with_a_fraction_of_the_bytes(
    traffic: Counter[str],
) -> None:
    data = classification([200, 200], dtype=np.float32, width=64)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 3))
    settings = {"schema": schema(64, torch.float32), "epochs": 5, "batch_size": 20}
    losses, octets = [], []
    for strategy in (ParameterAveraging(1), ThresholdGradientSharing(1e-3, sparsity=(1e-4, 2e-2))):
        traffic.clear()
        torch.manual_seed(0)
        outcome = run_world(
            make_job(copy.deepcopy(model), strategy=strategy, **settings),
            data.shards(),
            ranks_as="processes",
        )
        losses.append(outcome.history[-1].loss)
        octets.append(traffic["in"])
    assert losses[1] < 1.5 * losses[0] < 0.5
    assert octets[1] < 0.1 * octets[0]


def mean_of_changes(
    center: float,
    contributions: Contributions,
    values: Mapping[int, float],
    begun: Mapping[int, float],
) -> float:
    """What workers send are changes, here whatever number they have."""
    total = sum(w * v for w, v in zip(contributions.weights, values.values(), strict=True))
    return center + total / sum(contributions.weights)


@pytest.mark.usefixtures("quiet")
def test_every_schedule_ends_with_the_center_that_its_commits_give() -> None:
    outcomes = simulated(ThresholdGradientSharing(), lambda: mean_of_changes, range(100))
    assert sum(outcome.failure is None for outcome in outcomes) > 75
    assert sum(outcome.losses for outcome in outcomes) > 25


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
