"""Malformed input for every port that is opened and many files that are read.

An input is a good message, conversation or file that was made wrong in its fields, types, lengths,
order, nesting or bytes; ports are called over TCP, local sockets and TLS, with the token and
without. It must be read as if nothing were wrong, or end in an error of the project's own, before
its deadline; memory must not grow, no thread be left, and rejected input change nothing. Of images,
columns, tensors, saved models and headers, tests with ``@given`` say so.

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
from calling import as_text, mutated, mutated_bytes, mutated_order
from fuzzed_averager import AveragerTarget
from fuzzed_checkpoints import CheckpointTarget
from fuzzed_strangers import Handshake, Trainings
from fuzzed_workers import ConsoleTarget, ReshuffleTarget, RunTarget, StacksTarget
from fuzzer import Fault, Tally, Target, read_apart, run

from sparkdl.errors import TrainingError

SEED = 7
TARGETS = {
    Handshake: 100,
    Trainings: 50,
    AveragerTarget: 30,
    RunTarget: 50,
    ConsoleTarget: 50,
    StacksTarget: 50,
    ReshuffleTarget: 30,
    CheckpointTarget: 150,
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


@pytest.mark.nightly_variants(daily=5)
@targets
def test_no_input_has_another_outcome_than_it_may_have(target: type[Target]) -> None:
    with target() as entered:
        tally = run(entered, SEED, range(TARGETS[target]), limited=False)
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
    deadline_s = 0.2

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

    tally = run(Scripted(from_the_second_on), SEED, range(3), limited=False)
    (found,) = (found for name, found in tally.findings.items() if cause in name)
    assert found.index == 1


def test_an_error_of_the_projects_own_is_no_finding() -> None:
    tally = run(Scripted(raising(TrainingError("no"))), SEED, range(3), limited=False)
    assert (tally.tried, tally.accepted, tally.findings) == (3, 0, {})


def test_an_input_that_takes_too_long_is_interrupted_and_found() -> None:
    forever = threading.Event()
    tally = run(Scripted(lambda _: forever.wait(30)), SEED, range(1))
    assert [name.partition(" ")[0] for name in tally.findings] == ["Hung"]


def test_an_input_is_made_again_by_its_number_alone() -> None:
    drawn: list[float] = []
    target = Scripted(lambda draw: drawn.append(draw.random()))
    run(target, SEED, range(5), limited=False)
    run(target, SEED, [3], limited=False)
    assert drawn[3] == drawn[5]
    assert len(set(drawn)) == 5


def test_mutations_leave_what_they_change_as_it_was_and_are_of_every_kind() -> None:
    good = {"rank": 0, "window": {"examples": 2, "last": False}, "lines": ["a", "b"], "loss": 0.5}
    before = as_text(good)
    draw = random.Random(SEED)
    texts = {as_text(mutated(draw, good)) for _ in range(300)}
    assert as_text(good) == before
    assert len(texts) > 100
    octets = before.encode()
    assert len({mutated_bytes(draw, octets) for _ in range(100)}) > 60
    orders = {tuple(mutated_order(draw, [1, 2, 3])) for _ in range(100)}
    assert {(2, 3), (1, 1, 2, 3), (2, 1, 3), ()} <= orders


class Deadly(Target):
    """Ends the process at its third input."""

    name = "deadly"

    def __enter__(self) -> Deadly:
        self._read = 0
        return self

    def attempt(self, draw: random.Random) -> bool:
        """Count it."""
        self._read += 1
        if self._read == 3:
            os.abort()
        return True


@pytest.mark.nightly
def test_an_input_that_ends_the_process_is_found_and_named_with_what_reads_it_again() -> None:
    tally = read_apart(Deadly, SEED, range(40, 50), timeout_s=150)
    (found,) = tally.findings.values()
    assert (tally.tried, found.index) == (2, 42)
    assert "in attempt" in found.text
    again = r"FUZZ_SEED=7 FUZZ_FIRST=42 FUZZ_INPUTS=1 .* -k deadly"
    with pytest.raises(AssertionError, match=again):
        require_nothing_found(Deadly, SEED, tally)
    assert read_apart(Deadly, SEED, range(40, 42), timeout_s=150).accepted == 2
