"""Malformed input for every port that is opened.

An input is a good message or conversation that was made wrong in its fields, types, lengths,
order, nesting or bytes; ports are called over TCP, local sockets and TLS, with the token and
without. It must be read as if nothing were wrong, or end in an error of the project's own, before
its deadline; memory must not grow, no thread be left, and rejected input change nothing. Of images,
columns, tensors, saved models, checkpoints and headers, tests with ``@given`` say so.

``make test-nightly`` reads ``FUZZ_INPUTS`` of each target, from number ``FUZZ_FIRST`` of seed
``FUZZ_SEED`` on: with those of a failure, that input again.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import fuzzer
import numpy as np
import pytest
from fuzzed_averager import AveragerTarget
from fuzzed_strangers import Handshake, Trainings
from fuzzed_workers import ReshuffleTarget, RunTarget
from fuzzer import Fault, Tally, Target, read_apart, run

SEED = 7
TARGETS = {
    Handshake: 100,
    Trainings: 50,
    AveragerTarget: 30,
    RunTarget: 50,
    ReshuffleTarget: 30,
}
"""How many inputs of each are read in the ordinary run."""
MAX_GROWTH = 1.05
"""Memory after all inputs of a night, over that after a fifth of them."""
HOURS_S = 2.0 * 3600


def require_nothing_found(target: type[Target], seed: int, tally: Tally) -> None:
    again = "python -m pytest -m nightly tests/fuzz"
    told = [
        f"{found.times} x {cause}; the first again: FUZZ_SEED={seed} FUZZ_FIRST={found.index} "
        f"FUZZ_INPUTS=1 {again} -k {target.name}\n{found.text}"
        for cause, found in tally.findings.items()
    ]
    assert not told, "\n".join(told)
    # Inputs of which none is read to its end would say nothing of what reads.
    assert tally.accepted or tally.tried < 30 or target is Trainings


targets = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@targets
def test_no_input_has_another_outcome_than_it_may_have(target: type[Target]) -> None:
    with target() as entered:
        tally = run(entered, SEED, range(TARGETS[target]))
    require_nothing_found(target, SEED, tally)


@pytest.mark.nightly
@pytest.mark.timeout(HOURS_S + 60)
@targets
def test_nor_has_one_of_many_and_memory_does_not_grow(target: type[Target]) -> None:
    asked = {"SEED": "1", "FIRST": "0", "INPUTS": "20000"}
    seed, first, inputs = (int(os.environ.get(f"FUZZ_{name}", asked[name])) for name in asked)
    tally = read_apart(target, seed, range(first, first + inputs), timeout_s=HOURS_S)
    require_nothing_found(target, seed, tally)
    assert tally.tried == inputs
    assert tally.late_mb <= MAX_GROWTH * tally.early_mb or inputs < 1_000


class Scripted(Target):
    """Does what it is told to."""

    name = "scripted"

    def __init__(self, act: Callable[[random.Random], object]) -> None:
        super().__init__()
        self._act = act

    def attempt(self, draw: random.Random) -> bool:
        """Do it."""
        return bool(self._act(draw))


def in_a_thread(_: random.Random) -> None:
    thread = threading.Thread(target=lambda: {}["missing"])
    thread.start()
    thread.join()


def raising(error: Exception) -> Callable[[random.Random], object]:
    def act(_: random.Random) -> object:
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        (raising(KeyError("a")), "KeyError"),
        (raising(Fault("the center has changed")), "the center has changed"),
        (raising(MemoryError()), "MemoryError"),
        (in_a_thread, "a thread of its own: KeyError"),
        (lambda _: np.ones(1 << 23), "memory"),
    ],
    ids=["foreign error", "fault", "no memory", "thread", "growth"],
)
def test_what_must_not_be_is_found(
    act: Callable[[random.Random], object], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzer, "MAX_GROWTH_MB", 32.0)
    calls = 0

    def from_the_second_on(draw: random.Random) -> object:
        nonlocal calls
        calls += 1
        return act(draw) is None if calls > 1 else None

    tally = run(Scripted(from_the_second_on), SEED, range(3))
    (found,) = (found for name, found in tally.findings.items() if cause in name)
    assert found.index == 1
