"""What all workers tell each other: everyone's values by rank, and nothing is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.averager.coordination.gathers import Gathers


@given(st.permutations(range(5)))
def test_the_last_brings_all_values_by_rank_whatever_the_order(order: list[int]) -> None:
    gathers = Gathers(5)
    assert [gathers.give(rank, f"of {rank}") for rank in order[:-1]] == [None] * 4
    assert gathers.give(order[-1], f"of {order[-1]}") == tuple(f"of {rank}" for rank in range(5))


def test_one_follows_another() -> None:
    gathers = Gathers(2)
    for number in range(3):
        assert gathers.give(1, ("b", number)) is None
        assert gathers.give(0, ("a", number)) == (("a", number), ("b", number))
        assert gathers.present is None


def test_it_is_known_who_has_given() -> None:
    gathers = Gathers(3)
    assert gathers.present is None
    gathers.give(2, None)
    gathers.give(0, None)
    assert gathers.present == {0, 2}


def test_what_a_lost_rank_gave_is_forgotten_and_waited_for_again() -> None:
    gathers = Gathers(2)
    gathers.give(0, "before")
    gathers.withdraw(0)
    gathers.withdraw(1)
    assert gathers.present is None
    assert gathers.give(1, "other") is None
    assert gathers.give(0, "after") == ("after", "other")


def test_alone_everybody_is_told_at_once() -> None:
    assert Gathers(1).give(0, 5) == (5,)
