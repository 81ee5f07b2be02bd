"""OuterOptimizer against plain torch, against the papers' own formulas, and through losses."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import pickle
import random
import re
import time
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from misbehaving import KillsOnce, die_after
from simulated import Oracle, simulated
from torch import Tensor, nn
from toys import (
    _average_optimizers,
    _train_by_hand,
    batches_by_hand,
    classification,
    make_job,
    mlp,
    relative_error,
    sgd_on_union,
)

from sparkdl import strategies
from sparkdl.averager.center_update import new_memory
from sparkdl.checkpoint.identity import text_of
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.checkpoint.recipe import load_recipe, save_recipe
from sparkdl.driver import Outcome
from sparkdl.errors import ConfigError
from sparkdl.estimator.persistence import PLACES
from sparkdl.events import WindowReport
from sparkdl.feed.feed import FeedOptions
from sparkdl.protocols import Batch, Segment
from sparkdl.strategies import (
    CenterUpdate,
    Contributions,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    Strategy,
)
from sparkdl.testing import run_world
from sparkdl.testing.replay import recorded_commits, relative_difference, replay
from sparkdl.worker import Job

cloudpickle.register_pickle_by_value(misbehaving)

SIZES = [40, 33, 21]
"""Of batches of 4: 10, 9 and 6 steps an epoch."""
DATA = classification(SIZES)
SLOW_MOMENTUM = OuterSGD(0.7, 0.6, nesterov=False)
STRATEGY = OuterOptimizer(period=2, outer=SLOW_MOMENTUM)
SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.02)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1)


def job(model: nn.Module | None = None, **changes: Any) -> Job:
    settings = {"strategy": STRATEGY, "epochs": 3, "max_failures": 1, **changes}
    return make_job(model or mlp(), **settings)


def named(value: Any) -> str:
    """A parameter of a test, for its name."""
    return value.func.__name__ if isinstance(value, partial) else str(value)


def same_bits(first: Outcome, second: Outcome) -> bool:
    pairs = zip(
        first.module.state_dict().values(), second.module.state_dict().values(), strict=True
    )
    return all(torch.equal(mine, other) for mine, other in pairs)


def steps_of(update: CenterUpdate, changes: Iterable[Tensor]) -> list[Tensor]:
    """How the center moves in rounds of one contributor."""
    changes = list(changes)
    (memory,) = new_memory(update, (Segment("parameters", changes[0].dtype, len(changes[0])),))
    moved = []
    for change in changes:
        moved.append(change.clone())
        update.step(torch.zeros_like(change), moved[-1], memory, Contributions((1,), 1))
    return moved


# The rule

CHANGES = st.lists(
    st.lists(st.floats(-3, 3), min_size=3, max_size=3).map(
        lambda numbers: torch.tensor(numbers, dtype=torch.float64)
    ),
    min_size=1,
    max_size=6,
)
RATES = st.floats(0.01, 2)
MOMENTA = st.floats(0, 0.99)


@settings(max_examples=30, deadline=None)
@given(changes=CHANGES, rate=RATES, momentum=MOMENTA, nesterov=st.booleans())
def test_the_center_takes_the_steps_of_torchs_sgd_on_the_reversed_changes(
    changes: list[Tensor], rate: float, momentum: float, nesterov: bool
) -> None:
    oracle = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    sgd = torch.optim.SGD([oracle], rate, momentum, nesterov=nesterov and momentum > 0)
    center = torch.zeros(3, dtype=torch.float64)
    for moved, change in zip(
        steps_of(OuterSGD(rate, momentum, nesterov), changes), changes, strict=True
    ):
        center += moved
        oracle.grad = -change
        sgd.step()
        torch.testing.assert_close(center, oracle.detach(), rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(changes=CHANGES, rate=RATES, momentum=MOMENTA, nesterov=st.booleans())
def test_the_center_is_what_bmuf_sends_its_workers(
    changes: list[Tensor], rate: float, momentum: float, nesterov: bool
) -> None:
    """Chen and Huo's D(t) = eta D(t-1) + zeta G(t), W(t) = W(t-1) + D(t), sent W(t) + eta D(t)."""
    model, filtered, center = np.zeros(3), np.zeros(3), np.zeros(3)
    for moved, change in zip(
        steps_of(OuterSGD(rate, momentum, nesterov), changes), changes, strict=True
    ):
        center = center + moved.numpy()
        filtered = momentum * filtered + rate * change.numpy()
        model = model + filtered
        sent = model + momentum * filtered if nesterov else model
        np.testing.assert_allclose(center, sent, rtol=1e-9, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(changes=CHANGES, rate=RATES, momentum=MOMENTA, inner_rate=st.floats(0.001, 1))
def test_without_nesterov_it_is_slowmo_at_any_inner_learning_rate(
    changes: list[Tensor], rate: float, momentum: float, inner_rate: float
) -> None:
    """Wang et al.'s u = beta u + (x_old - x_mean) / gamma, x_new = x_old - alpha gamma u."""
    slow, center, oracle = np.zeros(3), np.zeros(3), np.zeros(3)
    for moved, change in zip(
        steps_of(OuterSGD(rate, momentum, nesterov=False), changes), changes, strict=True
    ):
        mean = oracle + change.numpy()
        slow = momentum * slow + (oracle - mean) / inner_rate
        oracle = oracle - rate * inner_rate * slow
        center = center + moved.numpy()
        np.testing.assert_allclose(center, oracle, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("update", "times"),
    [(OuterSGD(), 7), (OuterSGD(1, 3 / 4), 4), (OuterSGD(1, 3 / 4, nesterov=False), 4)],
    ids=str,
)
def test_changes_that_stay_the_same_move_the_center_so_many_times_as_far(
    update: CenterUpdate, times: float
) -> None:
    moved = steps_of(update, [torch.ones(1, dtype=torch.float64)] * 400)
    assert moved[-1].item() == pytest.approx(times, rel=1e-12)


def test_without_momentum_nothing_is_kept() -> None:
    layout = (Segment("parameters", torch.float32, 4), Segment("buffers", torch.float32, 2))
    assert new_memory(OuterSGD(0.5, 0), layout) == [{}, {}]
    assert [[*kept] for kept in new_memory(OuterSGD(), layout)] == [["velocity"], []]


# Whole runs


def by_hand(
    epochs: int,
    period: Any = lambda epoch: 2,
    outer: OuterSGD = SLOW_MOMENTUM,
    inner: Any = SGD,
    inner_state: str = "keep",
) -> nn.Module:
    """Plain torch in one process, the outer optimizer too."""
    center = mlp().train()
    step_center = torch.optim.SGD(
        center.parameters(), outer.learning_rate, outer.momentum, nesterov=outer.nesterov
    )
    replicas = [copy.deepcopy(center) for _ in SIZES]
    optimizers = [inner(replica.parameters()) for replica in replicas]
    for epoch in range(1, epochs + 1):
        plans = [batches_by_hand(DATA, rank, epoch, 4) for rank in range(len(SIZES))]
        for start in range(0, max(map(len, plans)), period(epoch)):
            weights = {}
            for rank, plan in enumerate(plans):
                if window := plan[start : start + period(epoch)]:
                    _train_by_hand(replicas[rank], optimizers[rank], window)
                    weights[rank] = sum(len(targets) for _, targets in window)
            trained = [list(replicas[rank].parameters()) for rank in weights]
            for parameter, mine in zip(
                center.parameters(), zip(*trained, strict=True), strict=True
            ):
                mean = np.average([p.detach().numpy() for p in mine], 0, list(weights.values()))
                parameter.grad = parameter.detach() - torch.from_numpy(mean)
            step_center.step()
            for replica in replicas:
                replica.load_state_dict(center.state_dict())
            if inner_state == "average":
                _average_optimizers(optimizers, weights)
            if inner_state == "reset":
                optimizers = [inner(replica.parameters()) for replica in replicas]
    return center


@pytest.mark.parametrize(
    ("inner_state", "inner"),
    [
        *(("keep", MOMENTUM), ("average", MOMENTUM), ("reset", MOMENTUM)),
        *(("keep", ADAM), ("average", ADAM), ("reset", ADAGRAD)),
    ],
    ids=named,
)
def test_it_is_the_algorithm_by_hand_on_unequal_shards(inner_state: Any, inner: Any) -> None:
    outer = OuterSGD(0.7, 0.5)
    strategy = OuterOptimizer(2, outer, inner_state)
    outcome = run_world(job(strategy=strategy, optimizer=inner), DATA.shards())
    oracle = by_hand(3, outer=outer, inner=inner, inner_state=inner_state)
    # Adam counts its steps in float32, of which the mean is one too.
    assert relative_error(outcome.module, oracle) < 1e-8


def test_each_inner_state_gives_another_model() -> None:
    """Else the oracle above would show nothing."""
    ends = [by_hand(1, inner=MOMENTUM, inner_state=each) for each in ("keep", "average", "reset")]
    for first, second in pairwise([*ends, ends[0]]):
        assert relative_error(first, second) > 1e-3


def test_the_period_changes_with_the_epoch() -> None:
    strategy = OuterOptimizer(((1, 1), (2, 4)), SLOW_MOMENTUM)
    outcome = run_world(job(strategy=strategy), DATA.shards())
    oracle = by_hand(3, period=lambda epoch: 1 if epoch == 1 else 4)
    assert relative_error(outcome.module, oracle) < 1e-12


@pytest.mark.parametrize(
    ("period", "ends"),
    [
        (4, {0: [4, 8, 10], 1: [4, 8, 9], 2: [4, 6]}),
        (3, {0: [3, 6, 9, 10], 1: [3, 6, 9], 2: [3, 6]}),
        (500, {0: [10], 1: [9], 2: [6]}),
        (((1, 4), (2, 3)), {0: [3, 6, 9, 10], 1: [3, 6, 9], 2: [3, 6]}),
        (((1, 500), (2, 4), (9, 1)), {0: [4, 8, 10], 1: [4, 8, 9], 2: [4, 6]}),
    ],
    ids=str,
)
def test_rounds_come_after_every_period_and_at_the_end_of_an_epoch(
    period: Any, ends: dict[int, list[int]]
) -> None:
    windows: list[WindowReport] = []

    def on_event(event: object) -> None:
        if isinstance(event, WindowReport) and event.epoch == 2:
            windows.append(event)

    run_world(job(strategy=OuterOptimizer(period), epochs=2), DATA.shards(), on_event=on_event)
    seen = {rank: [w.step_of_epoch for w in windows if w.rank == rank] for rank in range(3)}
    assert seen == ends
    assert sum(window.examples for window in windows) == sum(SIZES)


# Limits


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("average", [True, False], ids=["average", "keep"])
def test_a_rate_of_one_without_momentum_is_parameter_averaging_to_the_bit(
    average: bool, wire_dtype: Any
) -> None:
    outer = OuterOptimizer(2, OuterSGD(1, 0), "average" if average else "keep", wire_dtype)
    averaging = ParameterAveraging(2, average_optimizer_state=average, wire_dtype=wire_dtype)
    mine, other = (
        run_world(job(strategy=strategy, optimizer=MOMENTUM), DATA.shards())
        for strategy in (outer, averaging)
    )
    assert same_bits(mine, other)


@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "heavy ball"])
def test_at_period_one_it_is_sgd_with_that_momentum_on_the_union_batch(nesterov: bool) -> None:
    strategy = OuterOptimizer(1, OuterSGD(0.7, 0.9, nesterov))
    outcome = run_world(job(strategy=strategy), DATA.shards())
    oracle = copy.deepcopy(mlp())
    sgd = torch.optim.SGD(oracle.parameters(), 0.1 * 0.7, 0.9, nesterov=nesterov)
    for epoch in range(1, 4):
        plans = [batches_by_hand(DATA, rank, epoch, 4) for rank in range(3)]
        for step in range(max(map(len, plans))):
            parts = [plan[step] for plan in plans if step < len(plan)]
            union = tuple(np.concatenate(part) for part in zip(*parts, strict=True))
            _train_by_hand(oracle, sgd, [union])  # type: ignore[list-item]
    assert relative_error(outcome.module, oracle) < 1e-10


def test_at_period_one_without_momentum_it_is_sgd_at_the_product_of_the_rates() -> None:
    outcome = run_world(job(strategy=OuterOptimizer(1, OuterSGD(0.5, 0))), DATA.shards())
    oracle = sgd_on_union(mlp(), DATA, lr=0.05, epochs=3, batch_size=4, dtype=torch.float64)
    assert relative_error(outcome.module, oracle) < 1e-10


# What is no parameter, what changes by itself


def normalized() -> nn.Module:
    torch.manual_seed(2)
    linear = nn.Linear(6, 5, bias=False)  # BatchNorm would take it out again
    return nn.Sequential(linear, nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def test_buffers_become_the_workers_mean() -> None:
    """In the first round, to which both strategies come with the same replicas."""
    data = classification([40, 32, 20])  # no minibatch of one row
    states = [
        run_world(job(normalized(), strategy=strategy, epochs=1), data.shards()).module.state_dict()
        for strategy in (OuterOptimizer(500), ParameterAveraging(500))
    ]
    differ = {key for key in states[0] if not torch.equal(states[0][key], states[1][key])}
    assert differ == {name for name, _ in normalized().named_parameters()}


@pytest.mark.parametrize("every", ["step", "epoch"])
def test_where_there_is_no_state_a_reset_changes_nothing_of_the_learning_rate(every: Any) -> None:
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)
    given = {"scheduler": schedule, "scheduler_every": every}
    reset = dataclasses.replace(STRATEGY, inner_state="reset")
    kept = run_world(job(**given), DATA.shards())
    assert same_bits(run_world(job(strategy=reset, **given), DATA.shards()), kept)
    assert not same_bits(run_world(job(), DATA.shards()), kept)


class SlowAtRandom(nn.Module):
    """Makes the ranks arrive in another order each time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, features: Tensor) -> Tensor:
        time.sleep(random.SystemRandom().uniform(0, 0.003))
        outputs: Tensor = self.net(features)
        return outputs


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_bits_whoever_comes_first(wire_dtype: Any) -> None:
    strategy = dataclasses.replace(STRATEGY, wire_dtype=wire_dtype)
    first, second = (
        run_world(job(SlowAtRandom(), strategy=strategy, epochs=2), DATA.shards()) for _ in range(2)
    )
    assert same_bits(first, second)


def test_bfloat16_ends_close_to_float32() -> None:
    exact, rounded = (
        run_world(
            job(strategy=OuterOptimizer(2, OuterSGD(0.7, 0.5), wire_dtype=wire_dtype)),
            DATA.shards(),
        ).module
        for wire_dtype in ("float32", "bfloat16")
    )
    start = mlp()
    moved = max(
        float((p - q).detach().abs().max())
        for p, q in zip(exact.parameters(), start.parameters(), strict=True)
    )
    for mine, other in zip(rounded.parameters(), exact.parameters(), strict=True):
        # The velocity carries what a round has rounded no further than 1 / (1 - momentum) times.
        assert float((mine - other).detach().abs().max()) <= moved / 32
    assert relative_error(rounded, exact) > 0


# Losses and checkpoints


@pytest.mark.parametrize(
    ("inner_state", "inner", "windows"),
    [
        ("keep", SGD, 20),
        ("keep", MOMENTUM, 4),
        ("keep", ADAM, 14),
        ("average", ADAM, 20),
        ("reset", ADAGRAD, 14),
    ],
    ids=named,
)
def test_resumed_it_ends_in_the_same_bits(
    tmp_path: Path, inner_state: Any, inner: Any, windows: int
) -> None:
    strategy = dataclasses.replace(STRATEGY, inner_state=inner_state)
    given = job(strategy=strategy, optimizer=inner)
    whole = run_world(given, DATA.shards())
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(windows, given, DATA.shards(), policy)
    assert same_bits(run_world(given, DATA.shards(), checkpoints=policy), whole)


@pytest.mark.parametrize(
    ("changes", "was"),
    [
        ({"outer": OuterSGD(0.7, 0.5, nesterov=False)}, "momentum=0.6"),
        ({"period": ((1, 2), (3, 4))}, "period=2"),
        ({"inner_state": "reset"}, "inner_state='keep'"),
    ],
)
def test_with_other_settings_a_checkpoint_is_refused(
    tmp_path: Path, changes: dict[str, Any], was: str
) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(14, job(), DATA.shards(), policy)
    other = job(strategy=dataclasses.replace(STRATEGY, **changes))
    with pytest.raises(ConfigError, match=rf"strategy: was OuterOptimizer\(.*{re.escape(was)}"):
        run_world(other, DATA.shards(), checkpoints=policy)


class SlowMomentum:
    """The oracle of the center's update, in float64 numpy."""

    def __init__(self) -> None:
        self.velocity: list[np.ndarray] = []

    def move(self, center: list[Tensor], mean: list[Tensor]) -> list[Tensor]:
        old = [values.double().numpy().copy() for values in center]
        changes = [new.double().numpy() - values for new, values in zip(mean, old, strict=True)]
        before = self.velocity or [np.zeros_like(change) for change in changes]
        self.velocity = [0.6 * v + c for v, c in zip(before, changes, strict=True)]
        return [torch.from_numpy(o + 0.7 * v) for o, v in zip(old, self.velocity, strict=True)]


def test_a_killed_worker_comes_back_and_the_center_is_what_was_committed(tmp_path: Path) -> None:
    killed = job(KillsOnce(tmp_path, after=12))
    with recorded_commits() as commits:
        outcome = run_world(killed, DATA.shards(), ranks_as="processes")
    assert len(os.listdir(tmp_path)) > 12
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    oracle = replay(job(), DATA.shards(), commits, SlowMomentum().move)
    assert relative_difference(outcome.module.get_submodule("net"), oracle) < 1e-12


@pytest.mark.parametrize(
    ("inner_state", "inner"),
    [("keep", SGD), ("reset", MOMENTUM), ("average", MOMENTUM)],
    ids=named,
)
def test_when_all_start_again_the_velocity_goes_on(
    tmp_path: Path, inner_state: Any, inner: Any
) -> None:
    """Workers that deal their rows anew cannot be replaced one by one."""
    given = {
        "feed": FeedOptions(reshuffle_every=1),
        "strategy": dataclasses.replace(STRATEGY, inner_state=inner_state),
        "optimizer": inner,
    }
    whole = run_world(job(**given), DATA.shards(), ranks_as="processes")
    killed = job(KillsOnce(tmp_path, after=12), **given)
    outcome = run_world(killed, DATA.shards(), ranks_as="processes")
    assert len(os.listdir(tmp_path)) > 12
    assert same_bits(outcome, whole)


def velocity_by_hand(nesterov: bool) -> Oracle:
    """The update once more, for one number."""
    velocity = 0.0

    def move(
        center: float,
        contributions: Contributions,
        values: Mapping[int, float],
        begun: Mapping[int, float],
    ) -> float:
        nonlocal velocity
        assert {begun[rank] for rank in values} == {center}
        total = sum(w * v for w, v in zip(contributions.weights, values.values(), strict=True))
        change = total / sum(contributions.weights) - center
        velocity = 0.6 * velocity + change
        return center + 0.7 * (change + 0.6 * velocity if nesterov else velocity)

    return move


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "heavy ball"])
def test_every_schedule_ends_with_the_center_that_its_commits_give(nesterov: bool) -> None:
    strategy = OuterOptimizer(outer=OuterSGD(0.7, 0.6, nesterov))
    outcomes = simulated(strategy, partial(velocity_by_hand, nesterov), range(200))
    assert sum(outcome.failure is None for outcome in outcomes) > 150
    assert sum(outcome.losses for outcome in outcomes) > 50


# Arguments, and how the strategy is written down


@pytest.mark.parametrize(
    "period",
    [
        *(0, -1, 2.5, "5", None, True),
        *((), (5,), [(1, 5)], ([1, 5],), ((1, 5, 6),)),
        *(((1, 0),), ((1, True),), ((1, 2.0),)),
        *(((0, 5),), ((2, 5),), ((1, 5), (1, 6)), ((1, 5), (9, 6), (3, 7))),
    ],
    ids=repr,
)
def test_a_period_that_is_neither_steps_nor_pairs_by_epoch_is_refused(period: Any) -> None:
    with pytest.raises(ConfigError, match=r"period must be a whole number >= 1 .*pairs.*got"):
        OuterOptimizer(period)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0}, r"learning_rate must be a number > 0, got 0"),
        ({"learning_rate": -1.0}, r"learning_rate must be a number > 0, got -1.0"),
        ({"learning_rate": math.inf}, r"learning_rate must be a number > 0, got inf"),
        ({"learning_rate": math.nan}, r"learning_rate must be a number > 0, got nan"),
        ({"learning_rate": "1"}, r"learning_rate must be a number > 0, got '1'"),
        ({"learning_rate": True}, r"learning_rate must be a number > 0, got True"),
        ({"momentum": 1}, r"momentum must be a number >= 0 and < 1, got 1"),
        ({"momentum": -0.1}, r"momentum must be a number >= 0 and < 1, got -0.1"),
        ({"momentum": math.nan}, r"momentum must be a number >= 0 and < 1, got nan"),
        ({"momentum": False}, r"momentum must be a number >= 0 and < 1, got False"),
        ({"nesterov": 1}, r"nesterov must be a bool, got 1"),
    ],
    ids=str,
)
def test_an_outer_rule_out_of_range_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterSGD(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outer": 0.9}, r"outer must be a CenterUpdate such as OuterSGD\(\), got 0.9"),
        ({"outer": OuterSGD}, r"outer must be a CenterUpdate such as OuterSGD\(\), got <class"),
        ({"inner_state": "maintain"}, r"one of keep, average, reset, got 'maintain'"),
        ({"wire_dtype": "int8"}, r"wire_dtype must be one of float32, bfloat16, got 'int8'"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterOptimizer(**arguments)


def test_the_defaults_are_those_of_diloco() -> None:
    assert OuterOptimizer() == OuterOptimizer(500, OuterSGD(0.7, 0.9, True), "keep", "float32")


def test_its_text_is_the_same_in_every_process_and_it_can_be_pickled() -> None:
    strategy = OuterOptimizer(((1, 1), (31, 16)), OuterSGD(1, 0.5))
    assert text_of(strategy) == (
        "OuterOptimizer(period=((1, 1), (31, 16)), outer=OuterSGD(learning_rate=1, momentum=0.5, "
        "nesterov=True), inner_state='keep', wire_dtype='float32')"
    )
    assert pickle.loads(pickle.dumps(strategy)) == strategy


def test_a_saved_estimators_strategy_comes_back_without_trust(tmp_path: Path) -> None:
    strategy = OuterOptimizer(((1, 1), (31, 16)), OuterSGD(1, 0.5), "reset", "bfloat16")
    saved = save_recipe(strategy, tmp_path, "strategy")
    place = PLACES["strategy"]
    assert load_recipe(saved, tmp_path, "strategy", place=place, trust=False) == strategy
    assert not list(tmp_path.iterdir())


def documented() -> type[Strategy[Any]]:
    """The strategy that the documentation shows how to write."""
    page = Path(__file__).parents[2] / "docs" / "strategies.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (source,) = [block for block in blocks if "class OuterMomentum" in block]
    names: dict[str, Any] = {"__name__": __name__, **vars(strategies)}
    names |= {"dataclass": dataclasses.dataclass, "Mapping": Mapping}
    names |= {"Tensor": Tensor, "Batch": Batch}
    exec(source, names)
    return names["OuterMomentum"]  # type: ignore[no-any-return]


def test_the_documented_example_of_a_strategy_does_as_this_one() -> None:
    shown = documented()(period=2, momentum=0.6, rate=0.7)  # type: ignore[call-arg]
    assert same_bits(run_world(job(strategy=shown), DATA.shards()), run_world(job(), DATA.shards()))
