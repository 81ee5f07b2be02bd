"""Outer optimizers."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from interruptions import same_bits
from torch import Tensor, nn
from toys import (
    _average_optimizers,
    _train_by_hand,
    classification,
    mlp,
    relative_error,
    rows_of,
    sgd_on_union,
    windows_by_hand,
)
from trainings import ADAGRAD, ADAM, DATA, MOMENTUM, SGD, SIZES, SLOW_MOMENTUM, job

from sparkdl import strategies
from sparkdl.averager.values.center_update import new_memory
from sparkdl.checkpoint.identity import text_of
from sparkdl.events import WindowReport
from sparkdl.large_batches import LARS
from sparkdl.protocols import Batch, Segment
from sparkdl.replica import Replica
from sparkdl.strategies import (
    AsynchronousOuterOptimizer,
    CenterUpdate,
    Contributions,
    DelayedNesterov,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    Strategy,
)
from sparkdl.testing import run_world


def by_hand(
    epochs: int,
    period: Any = 2,
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
    for _, windows in windows_by_hand(DATA, epochs, 4, period):
        for rank, window in windows.items():
            _train_by_hand(replicas[rank], optimizers[rank], window)
        weights = rows_of(windows)
        trained = [list(replicas[rank].parameters()) for rank in weights]
        for parameter, mine in zip(center.parameters(), zip(*trained, strict=True), strict=True):
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


@every(
    ("inner_state", "inner"),
    [
        *(("keep", MOMENTUM), ("average", MOMENTUM), ("reset", MOMENTUM)),
        *(("keep", ADAM), ("average", ADAM), ("reset", ADAGRAD)),
    ],
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


@every(
    ("period", "ends"),
    [
        (4, {0: [4, 8, 10], 1: [4, 8, 9], 2: [4, 6]}),
        (3, {0: [3, 6, 9, 10], 1: [3, 6, 9], 2: [3, 6]}),
        (500, {0: [10], 1: [9], 2: [6]}),
        (((1, 4), (2, 3)), {0: [3, 6, 9, 10], 1: [3, 6, 9], 2: [3, 6]}),
        (((1, 500), (2, 4), (9, 1)), {0: [4, 8, 10], 1: [4, 8, 9], 2: [4, 6]}),
    ],
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


@every("nesterov", [True, False])
def test_at_period_one_it_is_sgd_with_that_momentum_on_the_union_batch(nesterov: bool) -> None:
    strategy = OuterOptimizer(1, OuterSGD(0.7, 0.9, nesterov))
    outcome = run_world(job(strategy=strategy), DATA.shards())
    momentum = partial(torch.optim.SGD, lr=0.1 * 0.7, momentum=0.9, nesterov=nesterov)
    oracle = sgd_on_union(mlp(), DATA, momentum, epochs=3)
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


def steps_of(update: CenterUpdate, changes: Iterable[Tensor]) -> list[Tensor]:
    """How the center moves in rounds of one contributor."""
    changes = list(changes)
    (memory,) = new_memory(update, (Segment("parameters", changes[0].dtype, len(changes[0])),))
    moved = []
    for change in changes:
        moved.append(change.clone())
        update.step(torch.zeros_like(change), moved[-1], memory, Contributions((1,), 1))
    return moved


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


@every(
    ("update", "times"),
    [(OuterSGD(), 7), (OuterSGD(1, 3 / 4), 4), (OuterSGD(1, 3 / 4, nesterov=False), 4)],
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


def test_the_defaults_are_those_of_diloco() -> None:
    assert OuterOptimizer() == OuterOptimizer(500, OuterSGD(0.7, 0.9, True), "keep", "float32")


def test_its_text_is_the_same_in_every_process_and_it_can_be_pickled() -> None:
    strategy = OuterOptimizer(((1, 1), (31, 16)), OuterSGD(1, 0.5))
    assert text_of(strategy) == (
        "OuterOptimizer(period=((1, 1), (31, 16)), outer=OuterSGD(learning_rate=1, momentum=0.5, "
        "nesterov=True), inner_state='keep', wire_dtype='float32', fragments=1, overlap=0, "
        "merge=0.0, cutoff='none')"
    )
    assert pickle.loads(pickle.dumps(strategy)) == strategy


def documented() -> type[Strategy[Any]]:
    """The strategy that the documentation shows how to write."""
    page = Path(__file__).parents[3] / "docs" / "writing-a-strategy.md"
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


def sgd(momentum: float) -> partial[torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=0.1, momentum=momentum)


@every(
    ("strategy", "optimizer", "remedy"),
    [
        (
            OuterOptimizer(5),
            sgd(0.9),
            "Set inner_state='reset', or an outer momentum of at most 0.5",
        ),
        (OuterOptimizer(8, fragments=2), sgd(0.9), "Set an outer momentum of at most 0.5"),
        (OuterOptimizer(5), partial(LARS, lr=0.1), "inner_state='reset'"),
        (OuterOptimizer(5, OuterSGD(1, 0.6)), sgd(0.1), "times the workers' change"),
        (OuterOptimizer(5, cutoff=1), sgd(0.9), "inner_state='reset'"),
        (
            AsynchronousOuterOptimizer(DelayedNesterov(4, 0.7, 0.9)),
            sgd(0.9),
            "Set an outer momentum",
        ),
        (OuterOptimizer(5, inner_state="reset"), sgd(0.9), None),
        (OuterOptimizer(5, OuterSGD(1, 0.5)), sgd(0.9), None),
        (OuterOptimizer(5), sgd(0.0), None),
        (OuterOptimizer(5), partial(torch.optim.Adam, lr=0.1), None),
        (AsynchronousOuterOptimizer(DelayedNesterov(4)), sgd(0.9), None),
        (AsynchronousOuterOptimizer(DelayedNesterov(4, 0.7, 0.9)), sgd(0.0), None),
    ],
)
def test_outer_momentum_on_inner_momentum_is_warned_of_with_the_remedy(
    strategy: Strategy[Any], optimizer: Any, remedy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    strategy.require_fits(Replica(nn.Linear(2, 1), optimizer, nn.MSELoss()))
    if remedy is None:
        assert not caplog.records
    else:
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert remedy in caplog.text
