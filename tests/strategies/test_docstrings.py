"""What a strategy's docstring has to say, so that one can be chosen, set and checked by it."""

from __future__ import annotations

import dataclasses
import inspect
import re

from every_row import every

from sparkdl import strategies
from sparkdl.strategies import Barrier, Compression, KFACPreconditioner, Strategy

PUBLIC = [getattr(strategies, name) for name in strategies.__all__]
ALGORITHMS = [
    each
    for each in PUBLIC
    if issubclass(each, (Strategy, Compression, KFACPreconditioner))
    and not inspect.isabstract(each)
    and each is not Strategy
]
BARRIERS = [each for each in PUBLIC if issubclass(each, Barrier) and each is not Barrier]
CHOICE = {"When", "When not"}


def sections(of: type) -> dict[str, str]:
    """The sections of a docstring, by name."""
    text = inspect.cleandoc(of.__doc__ or "")
    parts = re.split(r"^([A-Z][A-Za-z ]*):\n(?= )", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def arguments(of: type) -> set[str]:
    """Those that the docstring speaks of."""
    names = re.findall(r"^ {4}([a-z_]+(?:, [a-z_]+)*):", sections(of)["Args"], re.MULTILINE)
    return {each for line in names for each in line.split(", ")}


def test_there_are_as_many_as_the_pages_have() -> None:
    """So that the others are not of nothing."""
    assert {each.__name__ for each in ALGORITHMS} >= {"ElasticAveraging", "PowerSGD", "AdaScale"}
    assert len(ALGORITHMS) >= 13
    assert len(BARRIERS) >= 6


@every("algorithm", ALGORITHMS)
def test_an_algorithm_has_its_rule_its_phases_and_when_to_choose_it(algorithm: type) -> None:
    found = sections(algorithm)
    assert {"Rule", "Phases", *CHOICE, "Args"} <= found.keys()
    assert "<-" in found["Rule"]
    steps = [int(number) for number in re.findall(r"^ {4}(\d+)\. ", found["Phases"], re.MULTILINE)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 3


@every("barrier", BARRIERS)
def test_a_barrier_says_when_to_choose_it(barrier: type) -> None:
    assert sections(barrier).keys() >= CHOICE


@every("public", [*ALGORITHMS, *BARRIERS])
def test_each_argument_is_spoken_of_and_nothing_that_is_none(public: type) -> None:
    names = {field.name for field in dataclasses.fields(public) if field.init}
    assert (arguments(public) if names else names) == names


@every("public", [*ALGORITHMS, *BARRIERS])
def test_whether_to_choose_it_is_said_in_sentences(public: type) -> None:
    for name in CHOICE:
        said = " ".join(sections(public)[name].split())
        assert said.endswith(".")
        assert len(said.split()) >= 8
