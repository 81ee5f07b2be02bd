"""The knapsack: one option for each layer under a memory budget."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ConfigError
from sparkdl.planner.memory import fastest

Option = tuple[float, int]
Table = list[list[Option]]
OPTIONS = st.tuples(st.integers(0, 60).map(float), st.integers(0, 12))
TABLES = st.lists(st.lists(OPTIONS, min_size=1, max_size=3), min_size=1, max_size=5)


def seconds(chosen: tuple[Option, ...]) -> float:
    return math.fsum(each for each, _ in chosen)


def taken(chosen: tuple[Option, ...]) -> int:
    return sum(size for _, size in chosen)


def solved(table: Table, budget: int) -> tuple[Option, ...]:
    picks = fastest(table, budget)
    return tuple(layer[pick] for layer, pick in zip(table, picks, strict=True))


@given(TABLES, st.integers(0, 60))
def test_the_choice_is_that_of_trying_all(table: Table, budget: int) -> None:
    fits = [each for each in itertools.product(*table) if taken(each) <= budget]
    if not fits:
        with pytest.raises(ConfigError, match="too small"):
            fastest(table, budget)
        return
    found = solved(table, budget)
    assert seconds(found) == pytest.approx(min(map(seconds, fits)))
    assert taken(found) <= budget


@given(TABLES)
def test_the_error_names_the_smallest_budget_that_is_enough(table: Table) -> None:
    least = min(map(taken, itertools.product(*table)))
    with pytest.raises(ConfigError, match=rf"least take {least:,}\."):
        fastest(table, least - 1)
    assert taken(solved(table, least)) == least


def test_a_hundred_times_as_many_layers_are_still_exact() -> None:
    """Layers that are all alike have a closed form: as many keep as fit."""
    table = [[(1.0, 7), (1.5, 2)]] * 2000
    found = solved(table, 2 * 2000 + 5 * 1234 + 3)
    assert seconds(found) == 2000 + 0.5 * (2000 - 1234)
    assert taken(found) == 2 * 2000 + 5 * 1234


def test_options_that_the_solver_takes_for_equally_large_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A terabyte and a byte more; the solver may be asked a few times, not once for each byte."""
    solve, asked = scipy.optimize.milp, itertools.count(1)

    def few_times(*given: Any, **options: Any) -> Any:
        assert next(asked) < 5
        return solve(*given, **options)

    monkeypatch.setattr(scipy.optimize, "milp", few_times)
    assert fastest([[(0.0, 10**12 + 9), (1.0, 10**12)]], 10**12) == [1]
    assert fastest([[(0.0, 10**12 + 9), (1.0, 10**12)]] * 2, 2 * 10**12 + 9) in ([0, 1], [1, 0])


def test_no_layers_take_nothing_and_a_layer_without_options_is_refused() -> None:
    assert fastest([], 0) == []
    with pytest.raises(ConfigError, match="no options to choose from"):
        fastest([[(1.0, 1)], []], 10)
