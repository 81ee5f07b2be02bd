"""Outer optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every_row
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import OUTER, STREAMS, Outer
from torch import Tensor, nn
from toys import mlp, relative_error
from trainings import ADAGRAD, ADAM, DATA, MOMENTUM, SGD, SIZES, SLOW_MOMENTUM, job

from sparkdl.averager.values.center_update import new_memory
from sparkdl.errors import WorkerError
from sparkdl.events import WindowReport
from sparkdl.large_batches import LARS
from sparkdl.protocols import Segment
from sparkdl.replica import Replica
from sparkdl.strategies import (
    AsynchronousOuterOptimizer,
    CenterUpdate,
    Contributions,
    DelayedNesterov,
    OuterOptimizer,
    OuterSGD,
    Strategy,
)
from sparkdl.testing import run_world


@every_row(
    *(
        (OuterOptimizer(2, OUTER, state), inner)
        for state, inner in (
            *(("keep", MOMENTUM), ("average", MOMENTUM), ("reset", MOMENTUM)),
            *(("keep", ADAM), ("average", ADAM), ("reset", ADAGRAD)),
        )
    ),
    (OuterOptimizer(((1, 1), (2, 4)), SLOW_MOMENTUM), SGD),
    *zip(STREAMS, cycle([SGD, MOMENTUM, ADAM]), strict=False),
)
def test_it_is_the_algorithm_by_hand_on_unequal_shards(strategy: Any, inner: Any) -> None:
    outcome = run_world(job(strategy=strategy, optimizer=inner), DATA.shards())
    # Adam counts its steps in float32, of which the mean is one too.
    assert relative_error(outcome.module, Outer(strategy, inner).train(3)) < 1e-8
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3


@every_row(
    (OuterOptimizer(4), {0: [4, 8, 10], 1: [4, 8, 9], 2: [4, 6]}),
    (OuterOptimizer(3), {0: [3, 6, 9, 10], 1: [3, 6, 9], 2: [3, 6]}),
    (OuterOptimizer(500), {0: [10], 1: [9], 2: [6]}),
    (OuterOptimizer(((1, 4), (2, 3))), {0: [3, 6, 9, 10], 1: [3, 6, 9], 2: [3, 6]}),
    (OuterOptimizer(((1, 500), (2, 4), (9, 1))), {0: [4, 8, 10], 1: [4, 8, 9], 2: [4, 6]}),
    # Fragments in turn, and all of them at the end.
    (
        OuterOptimizer(4, fragments=2),
        {0: [2, 4, 6, 8, 10, 10], 1: [2, 4, 6, 8, 9, 9], 2: [2, 4, 6, 6]},
    ),
    (
        OuterOptimizer(8, fragments=3, overlap=1),
        {0: [3, 6, 8, 10, 10, 10], 1: [3, 6, 8, 9, 9, 9], 2: [3, 6, 6, 6]},
    ),
    (OuterOptimizer(3, overlap=2), {0: [3, 6, 9, 10], 1: [3, 6, 9], 2: [3, 6]}),
)
def test_rounds_come_after_every_period_and_at_the_end_of_an_epoch(
    strategy: Any, ends: dict[int, list[int]]
) -> None:
    windows: list[WindowReport] = []

    def on_event(event: object) -> None:
        if isinstance(event, WindowReport) and event.epoch == 2:
            windows.append(event)

    run_world(job(strategy=strategy, epochs=2), DATA.shards(), on_event=on_event)
    seen = {rank: [w.step_of_epoch for w in windows if w.rank == rank] for rank in range(3)}
    assert seen == ends
    assert sum(window.examples for window in windows) == sum(SIZES)


def test_an_error_in_training_while_a_round_is_under_way_ends_the_run() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = mlp(), 0

        def forward(self, features: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 4:
                raise ValueError("no more")
            outputs: Tensor = self.net(features)
            return outputs

    with pytest.raises(WorkerError, match="no more"):
        run_world(job(Fails(), strategy=OuterOptimizer(3, overlap=2)), DATA.shards())


# What is no parameter, what changes by itself


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


@settings(max_examples=30, deadline=None)
@given(
    changes=CHANGES,
    rate=st.floats(0.01, 2),
    momentum=st.floats(0, 0.99),
    inner_rate=st.floats(0.001, 1),
    nesterov=st.booleans(),
)
def test_the_center_takes_the_steps_of_torchs_sgd_of_bmuf_and_of_slowmo(
    changes: list[Tensor], rate: float, momentum: float, inner_rate: float, nesterov: bool
) -> None:
    """Torch's on the reversed changes, and the papers' rules.

    Chen and Huo's D(t) = eta D(t-1) + zeta G(t), W(t) = W(t-1) + D(t), sent W(t) + eta D(t); Wang
    et al.'s u = beta u + (x_old - x_mean) / gamma, x_new = x_old - alpha gamma u.
    """
    oracle = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    sgd = torch.optim.SGD([oracle], rate, momentum, nesterov=nesterov and momentum > 0)
    center, model, filtered, slow, slowed = (np.zeros(3) for _ in range(5))
    moves = steps_of(OuterSGD(rate, momentum, nesterov), changes)
    for moved, change in zip(moves, changes, strict=True):
        center = center + moved.numpy()
        oracle.grad = -change
        sgd.step()
        np.testing.assert_allclose(center, oracle.detach().numpy(), rtol=1e-12, atol=1e-12)
        filtered = momentum * filtered + rate * change.numpy()
        model = model + filtered
        sent = model + momentum * filtered if nesterov else model
        np.testing.assert_allclose(center, sent, rtol=1e-9, atol=1e-12)
        slow = momentum * slow + (slowed - (slowed + change.numpy())) / inner_rate
        slowed = slowed - rate * inner_rate * slow
        if not nesterov:
            np.testing.assert_allclose(center, slowed, rtol=1e-9, atol=1e-9)


def sgd(momentum: float) -> partial[torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=0.1, momentum=momentum)


@every_row(
    (OuterOptimizer(5), sgd(0.9), "Set inner_state='reset', or an outer momentum of at most 0.5"),
    (OuterOptimizer(8, fragments=2), sgd(0.9), "Set an outer momentum of at most 0.5"),
    (OuterOptimizer(5), partial(LARS, lr=0.1), "inner_state='reset'"),
    (OuterOptimizer(5, OuterSGD(1, 0.6)), sgd(0.1), "times the workers' change"),
    (OuterOptimizer(5, cutoff=1), sgd(0.9), "inner_state='reset'"),
    (AsynchronousOuterOptimizer(DelayedNesterov(4, 0.7, 0.9)), sgd(0.9), "Set an outer momentum"),
    (OuterOptimizer(5, inner_state="reset"), sgd(0.9), None),
    (OuterOptimizer(5, OuterSGD(1, 0.5)), sgd(0.9), None),
    (OuterOptimizer(5), sgd(0.0), None),
    (OuterOptimizer(5), partial(torch.optim.Adam, lr=0.1), None),
    (AsynchronousOuterOptimizer(DelayedNesterov(4)), sgd(0.9), None),
    (AsynchronousOuterOptimizer(DelayedNesterov(4, 0.7, 0.9)), sgd(0.0), None),
)
def test_outer_momentum_on_inner_momentum_is_warned_of_with_the_remedy(
    caplog: pytest.LogCaptureFixture, strategy: Strategy[Any], optimizer: Any, remedy: str | None
) -> None:
    strategy.require_fits(Replica(nn.Linear(2, 1), optimizer, nn.MSELoss()))
    if remedy is None:
        assert not caplog.records
    else:
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert remedy in caplog.text
