"""OuterSGD: the steps of torch's SGD, and what the papers' own formulas give."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparkdl.averager.values.center_update import new_memory
from sparkdl.protocols import Segment
from sparkdl.strategies import CenterUpdate, Contributions, OuterSGD


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
