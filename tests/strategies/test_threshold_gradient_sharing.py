"""Gradient sharing and its encoding against numpy, averaging and formulas of bytes."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from fractions import Fraction as Exact
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import trainings
from by_hand import Encoder, Shared, recorded_decisions
from decided import do
from every_row import every, every_row
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import classification, make_job, mlp, relative_error, schema
from trainings import DATA, SHARED, SIZES

from sparkdl.errors import NonFiniteError
from sparkdl.events import WindowReport
from sparkdl.replica import Replica
from sparkdl.strategies import ParameterAveraging, Run, ThresholdGradientSharing
from sparkdl.strategies.threshold_gradient_sharing import ThresholdEncoder
from sparkdl.testing import run_world

job = partial(trainings.job, strategy=SHARED)


@every_row(
    SHARED,
    ThresholdGradientSharing(0.02, sparsity=None, clip=None),
    ThresholdGradientSharing(0.005, sparsity=(0.01, 0.1), clip=1.0, period=3),
)
def test_it_is_the_rule_in_numpy(strategy: ThresholdGradientSharing) -> None:
    with recorded_decisions() as decisions:
        outcome = run_world(job(strategy=strategy), DATA.shards())
    assert relative_error(outcome.module, Shared(DATA, strategy).follow(decisions)) < 1e-9
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    commits = [each.contributions for each in decisions if isinstance(each, do.commit)]
    # Of 10, 9 and 6 steps an epoch: nobody is left out of a round while it has rows.
    steps = [-(-n // strategy.period) for n in (10, 9, 6)]
    expected = [sum(number < count for count in steps) for number in range(max(steps))]
    assert [len(each.weights) for each in commits if each.weights] == expected * 3


def executors_differ_from_the_driver_by(
    strategy: ThresholdGradientSharing, **changes: Any
) -> float:
    driver = run_world(job(strategy=strategy, **changes), DATA.shards()).module
    among = job(strategy=replace(strategy, aggregation="executors"), **changes)
    return relative_error(run_world(among, DATA.shards(), ranks_as="processes").module, driver)


@pytest.mark.nightly
def test_among_executors_it_is_what_it_is_in_the_driver() -> None:
    strategy = ThresholdGradientSharing(0.005, sparsity=(0.01, 0.1), clip=1.0, period=3)
    assert executors_differ_from_the_driver_by(strategy) < 1e-9


def test_executors_weigh_what_they_send_by_what_the_loss_divides_by() -> None:
    strategy = ThresholdGradientSharing(0.0, sparsity=None, clip=None, period=2)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64))
    assert executors_differ_from_the_driver_by(strategy, loss=loss, epochs=1) < 1e-9


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
    replica.use_loss("rows")
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


LENGTHS = (70_001, 3)
"""More than one block, and less."""


def encoding(threshold: float = 0.25, **changes: Any) -> ThresholdGradientSharing:
    return ThresholdGradientSharing(
        **{"threshold": threshold, "sparsity": None, "clip": None, "shake_every": None, **changes}
    )


def changes(
    seed: int, dtype: torch.dtype = torch.float32, scale: float = 0.2
) -> list[torch.Tensor]:
    generator = np.random.default_rng(seed)
    return [torch.from_numpy(generator.normal(scale=scale, size=n)).to(dtype) for n in LENGTHS]


def shared(encoder: ThresholdEncoder, produced: list[torch.Tensor]) -> list[torch.Tensor]:
    zero = [torch.zeros_like(values) for values in produced]
    encoder.encode(produced, zero, zero)
    return zero


@every_row(
    encoding(),
    encoding(0.0),
    encoding(shake_every=3),
    encoding(clip=2.0),
    encoding(0.1, sparsity=(0.01, 0.1), clip=5.0, shake_every=4),
)
def test_a_message_is_the_rule_in_numpy(given: ThresholdGradientSharing) -> None:
    first, *_ = changes(0, torch.float64)
    encoder, oracle = ThresholdEncoder(given, [first]), Encoder(given, len(first))
    for seed in range(12):
        change, _ = changes(seed, torch.float64)
        expected = oracle.encode(change.numpy().copy())
        (share,) = shared(encoder, [change])
        np.testing.assert_array_equal(share.numpy(), expected)
        np.testing.assert_array_equal(encoder.residuals[0].numpy(), oracle.residual)
        assert encoder.threshold == oracle.threshold


@settings(max_examples=60, deadline=None)
@given(
    threshold=st.floats(1e-6, 10),
    numbers=st.lists(
        st.lists(st.integers(-(2**12), 2**12), min_size=3, max_size=3), min_size=1, max_size=12
    ),
    grid=st.integers(-12, 0),
    shake_every=st.sampled_from([None, 2]),
)
def test_sent_and_residual_are_what_was_produced_exactly(
    threshold: float, numbers: list[list[int]], grid: int, shake_every: int | None
) -> None:
    """Exactly: changes on a grid, so that their sum has no rounding of its own."""
    encoder = ThresholdEncoder(
        encoding(threshold, shake_every=shake_every), [torch.zeros(3, dtype=torch.float64)]
    )
    total_sent = np.zeros(3, object)
    total_produced = np.zeros(3, object)
    for row in numbers:
        produced = torch.tensor(row, dtype=torch.float64) * 2.0**grid
        (share,) = shared(encoder, [produced])
        total_sent += [Exact(value) for value in share.tolist()]
        total_produced += [Exact(value) for value in produced.tolist()]
    (residual,) = encoder.residuals
    left = np.array([Exact(value) for value in residual.tolist()], object)
    assert (total_sent + left == total_produced).all()


@settings(max_examples=100, deadline=None)
@given(
    threshold=st.floats(1e-8, 1e3),
    times=st.lists(st.floats(-60_000, 60_000), min_size=1, max_size=20),
)
def test_taking_a_threshold_away_rounds_nothing_in_float32(
    threshold: float, times: list[float]
) -> None:
    produced = torch.tensor([each * threshold for each in times], dtype=torch.float32)
    encoder = ThresholdEncoder(encoding(threshold), [produced])
    (share,) = shared(encoder, [produced])
    (residual,) = encoder.residuals
    assert torch.equal(share.double() + residual.double(), produced.double())


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


@every_row(
    (0, 8, 8),
    (10, 8 + 4 * 10, 8 + 4 * 10),
    (63, 8 + 4 * 63, 8 + 4 * 63),
    (1000, 8 + 4 * 1000, 8 + 4 * 1000),
)
def test_the_driver_receives_and_sends_what_the_formula_says(
    traffic: Counter[str], moving: int, up: int, down: int
) -> None:
    """Every entry that moves does so by the learning rate, which is the threshold."""
    traffic.clear()
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


def test_executors_send_each_other_the_same_messages(
    sent: list[tuple[str, torch.dtype, int]],
) -> None:
    steps, moving = 4, 10
    given = make_job(
        Quadratic(moving),
        strategy=ThresholdGradientSharing(2**-5, sparsity=None, aggregation="executors"),
        loss=total_of,
        optimizer=partial(torch.optim.SGD, lr=2**-5),
        schema=schema(dtype=torch.float32),
        epochs=2,
    )
    run_world(given, classification([4 * steps], dtype=np.float32).shards())
    messages, of_a_number = 8 + 4 * moving, 2 * 2 * steps  # weights and lengths
    assert Counter(octets for *_, octets in sent) == {8: of_a_number, messages: 2 * steps}
