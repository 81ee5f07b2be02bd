"""The knapsack: one option for each layer under a memory budget."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from every_row import every
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ConfigError
from sparkdl.planner.step.knapsack import Constraint, Option, Selection, fastest

Table = list[list[Option]]


def taken(chosen: tuple[Option, ...], constraint: str) -> int:
    """By the definition, one layer at a time."""
    if constraint == "sum":
        return sum(o.held + o.working for o in chosen)
    if constraint == "max":
        return sum(o.held for o in chosen) + max(o.working for o in chosen)
    return max(sum(o.held for o in chosen[: k + 1]) + o.working for k, o in enumerate(chosen))


def by_brute_force(table: Table, budget: int, constraint: str) -> float | None:
    fits = [
        math.fsum(o.seconds for o in chosen)
        for chosen in itertools.product(*table)
        if taken(chosen, constraint) <= budget
    ]
    return min(fits, default=None)


def tables(layers: int, options: int, largest: int) -> st.SearchStrategy[Table]:
    option = st.builds(
        Option,
        st.just("an option"),
        st.integers(0, 60).map(float),
        st.integers(0, largest),
        st.integers(0, largest),
    )
    return st.lists(st.lists(option, min_size=1, max_size=options), min_size=1, max_size=layers)


def require_equal(table: Table, budget: int, constraint: Constraint, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ConfigError, match="too small"):
            fastest(table, budget, constraint)
        return
    found = fastest(table, budget, constraint)
    chosen = tuple(layer[pick] for layer, pick in zip(table, found.picks, strict=True))
    assert found.seconds == pytest.approx(seconds)
    assert math.fsum(o.seconds for o in chosen) == found.seconds
    assert found.memory == taken(chosen, constraint) <= budget


@given(tables(5, 3, 12), st.integers(0, 90), st.sampled_from(["sum", "max", "order"]))
def test_the_choice_is_that_of_trying_all(table: Table, budget: int, kind: Constraint) -> None:
    require_equal(table, budget, kind, by_brute_force(table, budget, kind))


@given(tables(5, 3, 12), st.sampled_from(["sum", "max", "order"]))
def test_the_error_names_the_smallest_budget_that_is_enough(table: Table, kind: Constraint) -> None:
    least = min(taken(chosen, kind) for chosen in itertools.product(*table))
    with pytest.raises(ConfigError, match=rf"least take {least:,}\."):
        fastest(table, least - 1, kind)
    assert fastest(table, least, kind).memory == least


def test_three_layers_by_hand() -> None:
    """A layer holds 8 bytes and takes 1 s, or holds 1 and needs 8 for the while and takes 2 s.

    If the first one recomputes, 1 + 8 + 8 = 17 bytes are held, and its own 8 come when those of the
    other two are given up; if the last one does, its 8 come on top of 8 + 8 + 1.
    """
    options = [Option("keep", 1.0, 8), Option("recompute", 2.0, 1, 8)]
    assert fastest([options] * 3, 24, "order") == Selection((0, 0, 0), 3.0, 24)
    found = fastest([options] * 3, 23, "order")
    assert (found.seconds, found.memory, found.picks[2]) == (4.0, 17, 0)
    assert fastest([options] * 3, 23, "max").seconds == 5.0  # 8 + 1 + 1 held, 8 for the while
    assert fastest([options] * 3, 23, "max").memory == 18
    assert fastest([options] * 3, 26, "sum") == Selection((0, 0, 0), 3.0, 24)


def test_a_hundred_times_as_many_layers_are_still_exact() -> None:
    """Layers that are all alike have a closed form: as many keep as fit."""
    options = [Option("keep", 1.0, 7), Option("recompute", 1.5, 2)]
    found = fastest([options] * 2000, 2 * 2000 + 5 * 1234 + 3, "sum")
    assert found.seconds == 2000 + 0.5 * (2000 - 1234)
    assert found.memory == 2 * 2000 + 5 * 1234


def test_no_layers_take_nothing() -> None:
    for kind in ("sum", "max", "order"):
        assert fastest([], 0, kind) == Selection((), 0.0, 0)


@every(
    "wrong, said",
    [
        (lambda: fastest([], 10.5), "a whole number of bytes, got 10.5"),
        (lambda: fastest([], 10, "min"), "constraint must be one of"),
        (lambda: fastest([[Option("a", 1.0, 1)], []], 10), "layer 1 has no options"),
        (lambda: fastest([[Option("a", 1.0, 1)]], -5), "least take 1"),
        (lambda: Option("a", -1.0, 1), "'a' takes -1.0 seconds"),
        (lambda: Option("a", math.nan, 1), "takes nan seconds"),
        (lambda: Option("a", 1.0, -1), "held=-1"),
        (lambda: Option("a", 1.0, 1, 2**50), "working=1125899906842624"),
    ],
)
def test_bad_input_is_said(wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wrong()
