"""The minibatch that is chosen is the first to reach a loss, by McCandlish's law and in fact."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from every_row import every
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ConfigError
from sparkdl.planner.step.batch import choose_batch, learning_rate

SIZES = [2**k for k in range(12)]


def line(fixed: float, by_row: float) -> dict[int, float]:
    return {rows: fixed + by_row * rows for rows in SIZES}


@given(st.floats(1e-4, 1.0), st.floats(1e-5, 1e-2), st.floats(1.0, 1e4), st.integers(1, 64))
def test_steps_of_fixed_and_proportional_parts_have_a_closed_form(
    fixed: float, by_row: float, noise: float, workers: int
) -> None:
    """(a + b B)(1 + N / k B) is least at B = sqrt(a N / k b), of which a neighbour is chosen."""
    best = math.sqrt(fixed * noise / workers / by_row)
    found = choose_batch(line(fixed, by_row), workers=workers, noise_scale=noise).batch_size
    clipped = min(max(best, SIZES[0]), SIZES[-1])
    assert clipped / 2 <= found <= clipped * 2


@given(st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=6), st.floats(0.0, 1e3), st.booleans())
def test_more_memory_never_means_a_smaller_minibatch(
    seconds: list[float], noise: float, known: bool
) -> None:
    """Whatever the measured times are."""
    step_s = {2**k: s for k, s in enumerate(seconds)}
    chosen = [
        choose_batch(step_s, noise_scale=noise if known else None, largest=n).batch_size
        for n in range(1, 2 ** len(seconds))
    ]
    assert chosen == sorted(chosen)
    assert all(size <= limit for limit, size in enumerate(chosen, 1))


def test_without_a_noise_scale_it_is_the_smallest_of_nearly_most_rows_a_second() -> None:
    found = choose_batch({8: 1.0, 16: 1.1, 32: 1.3, 64: 2.4, 128: 4.75})
    expected = [8, 14.5454545, 24.6153846, 26.6666667, 26.9473684]
    assert np.allclose(found.table["rows_a_second"], expected)
    assert found.batch_size == 32
    assert "90%" in found.because
    assert "to_target" not in found.table


def test_the_table_has_the_seconds_to_a_loss_over_the_best() -> None:
    """Noise of 64 rows: 8 rows take 9 times the steps of all rows, 64 rows 2, 512 rows 1.125."""
    found = choose_batch({8: 1.0, 64: 1.5, 512: 8.0}, noise_scale=64)
    assert found.batch_size == 64
    assert np.allclose(found.table["to_target"], [9 / 3, 1.0, 9 / 3])


def test_a_choice_at_the_edge_says_so() -> None:
    step_s = {8: 1.0, 16: 1.0, 32: 1.0}
    assert choose_batch(step_s, noise_scale=100.0).because.endswith("may be better still")
    limited = choose_batch(step_s, noise_scale=100.0, largest=20)
    assert limited.batch_size == 16
    assert limited.because.endswith("but does not fit into memory")


def test_learning_rates_by_hand() -> None:
    assert learning_rate(0.1, rows=256, to_rows=8192) == pytest.approx(3.2)  # Goyal et al. 2017
    assert learning_rate(0.1, rows=256, to_rows=1024, rule="adam") == pytest.approx(0.2)
    assert learning_rate(0.3, rows=32, to_rows=64, noise_scale=32) == pytest.approx(0.4)
    assert learning_rate(0.3, rows=32, to_rows=10**12, noise_scale=32) == pytest.approx(0.6)
    assert learning_rate(0.3, rows=32, to_rows=64, noise_scale=0) == 0.3


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0.0, 1e6))
def test_a_rate_that_is_scaled_back_and_forth_is_the_same(a: int, b: int, noise: float) -> None:
    there = learning_rate(0.1, rows=a, to_rows=b, noise_scale=noise)
    assert learning_rate(there, rows=b, to_rows=a, noise_scale=noise) == pytest.approx(0.1)
    linear = 0.1 * b / a
    assert min(0.1, linear) * (1 - 1e-9) <= there <= max(0.1, linear) * (1 + 1e-9)


@every(
    "wrong, said",
    [
        (lambda: choose_batch({}), "none has at most inf rows"),
        (lambda: choose_batch({8: 1.0}, largest=4), r"\[8\], of which none has at most 4 rows"),
        (lambda: choose_batch({0: 1.0}), "rows in step_s must be"),
        (lambda: choose_batch({8: 0.0}), "seconds must be a number > 0"),
        (lambda: choose_batch({8: math.nan}), "seconds must be a number > 0"),
        (lambda: choose_batch({8: 1.0}, noise_scale=-1.0), "noise_scale must be a number >= 0"),
        (lambda: choose_batch({8: 1.0}, workers=0), "workers must be"),
        (lambda: learning_rate(0.0, rows=1, to_rows=2), "rate must be a number > 0"),
        (lambda: learning_rate(0.1, rows=0, to_rows=2), "rows must be"),
        (lambda: learning_rate(0.1, rows=1, to_rows=2, rule="rmsprop"), "rule must be one of"),
    ],
)
def test_bad_input_is_said(wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wrong()
