"""What all workers tell each other: everyone's values by rank, and nothing is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.averager.coordination.decisions import Tell
from sparkdl.averager.coordination.events import Member
from sparkdl.averager.coordination.reports import Gathers
from sparkdl.errors import TrainingError

MEMBERS = [Member(rank, f"host-{rank}") for rank in range(5)]


@given(st.permutations(range(5)))
def test_the_last_brings_all_values_by_rank_whatever_the_order(order: list[int]) -> None:
    gathers = Gathers(5)
    told = [gathers.give(MEMBERS[rank], f"of {rank}") for rank in order]
    values = tuple(f"of {rank}" for rank in range(5))
    assert told == [None] * 4 + [Tell(tuple(MEMBERS[rank] for rank in order), values)]


def test_one_follows_another() -> None:
    gathers = Gathers(2)
    for number in range(3):
        assert gathers.give(MEMBERS[1], ("b", number)) is None
        told = gathers.give(MEMBERS[0], ("a", number))
        assert told == Tell((MEMBERS[1], MEMBERS[0]), (("a", number), ("b", number)))
        assert gathers.present is None
        assert gathers.waiting == {}


def test_it_is_known_who_has_given() -> None:
    gathers = Gathers(3)
    assert gathers.present is None
    gathers.give(MEMBERS[2], None)
    gathers.give(MEMBERS[0], None)
    assert gathers.present == gathers.waiting.keys() == {0, 2}


def test_what_a_lost_rank_gave_is_forgotten_and_waited_for_again() -> None:
    gathers = Gathers(2)
    gathers.give(MEMBERS[0], "before")
    gathers.withdraw(0)
    gathers.withdraw(1)
    assert gathers.present is None
    assert gathers.give(MEMBERS[1], "other") is None
    told = gathers.give(MEMBERS[0], "after")
    assert told is not None
    assert told.gathered == ("after", "other")


def test_alone_everybody_is_told_at_once() -> None:
    assert Gathers(1).give(MEMBERS[0], 5) == Tell((MEMBERS[0],), (5,))


def test_all_are_asked_for_a_commit_by_what_the_last_brings() -> None:
    assert Gathers(1).give(MEMBERS[0], 5, commit=True) == Tell((MEMBERS[0],), (5,), commit=True)


def test_nobody_gives_twice_before_all_have_given() -> None:
    gathers = Gathers(2)
    gathers.give(MEMBERS[0], "first")
    with pytest.raises(TrainingError, match="rank 0 on host-0 contributed twice"):
        gathers.give(MEMBERS[0], "second")
