"""Values that are not finite are seen, and said to be whose they are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.averager.values.finite import (
    PLACES,
    WHOLE,
    count_non_finite,
    looks_finite,
    require_finite,
)
from sparkdl.errors import NonFiniteError
from sparkdl.events import WindowReport

WINDOW = WindowReport(rank=3, epoch=2, step=7, examples=4, loss_sum=8.0, last=False)


@settings(max_examples=40, deadline=None)
@given(
    bad=st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
)
def test_every_value_that_is_not_finite_is_counted(bad: list[float], dtype: torch.dtype) -> None:
    values = torch.full((1000,), 60_000.0).to(dtype)  # whose sum is more than float16 holds
    for place, value in enumerate(bad):
        values[place * 137] = value
    assert count_non_finite(values) == len(bad)
    assert looks_finite(values) == (not bad)


@pytest.mark.filterwarnings("error")
def test_nobody_is_warned_of_large_values() -> None:
    assert count_non_finite(torch.full((5,), 3e30)) == 0


def test_whole_numbers_are_finite() -> None:
    assert count_non_finite(torch.arange(5)) == 0
    assert looks_finite(torch.arange(5))


def test_a_glance_at_a_large_tensor_sees_any_stretch_of_it() -> None:
    numel = 3 * WHOLE + 5
    stretch = numel // PLACES
    for start in (0, 1, 777_777, numel - stretch):
        values = torch.zeros(numel)
        values[start : start + stretch] = math.nan
        assert not looks_finite(values)
    assert looks_finite(torch.zeros(numel))


def test_what_one_has_is_told_from_what_all_have_agreed_on() -> None:
    values = torch.tensor([1.0, math.nan])
    with pytest.raises(NonFiniteError, match=r"^rank 3 has 1 NaN .* epoch 2, step 7 .*: 2\)"):
        require_finite(values, WINDOW)
    with pytest.raises(NonFiniteError, match=r"^rank 3 has 1 NaN"):
        require_finite(values, replace(WINDOW, group_weight=1))
    agreed = WindowReport(
        rank=0, epoch=2, step=7, examples=4, loss_sum=8.0, last=True, group_weight=12
    )
    with pytest.raises(NonFiniteError, match=r"^rank 0, which reports for all workers averaged"):
        require_finite(values, agreed)
