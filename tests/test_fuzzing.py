"""A few inputs of every target of the fuzzer: it finds nothing, and would if there were something.

``python benchmarks/fuzz.py`` reads a hundred thousand of each.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from fuzzing import TARGETS, loop, target_of
from fuzzing.loop import Fault, Target, run
from fuzzing.mutation import as_text, mutated, mutated_bytes, mutated_order

import sparkdl
from sparkdl.errors import TrainingError

FUZZ = Path(__file__).parent.parent / "benchmarks" / "fuzz.py"
SOURCES = Path(sparkdl.__file__).parent
SEED = 7
INPUTS = {
    "handshake": 100,
    "trainings": 50,
    "averager": 30,
    "run": 50,
    "console": 50,
    "stacks": 50,
    "reshuffle": 30,
    "object_spec": 60,
    "model": 80,
    "manifest": 150,
    "checkpoint": 150,
    "state": 100,
    "tensors": 300,
    "columns": 200,
    "images": 100,
}


@pytest.mark.slow_variants(fast=5)
@pytest.mark.parametrize("name", INPUTS)
def test_no_input_has_another_outcome_than_it_may_have(name: str) -> None:
    with target_of(name) as target:
        tally = run(target, SEED, range(INPUTS[name]), limited=False)
    assert not {cause: found.text for cause, found in tally.findings.items()}
    # Inputs of which none is read to its end would say nothing of what reads.
    assert tally.accepted or name == "trainings"


def test_every_target_is_tried_here_and_names_what_reads_its_inputs() -> None:
    assert INPUTS.keys() == TARGETS.keys()
    for name in TARGETS:
        reads = target_of(name).reads
        assert reads
        assert not [file for file in reads if not (SOURCES / file).is_file()]


class Scripted(Target):
    """Does what it is told to."""

    name = "scripted"
    reads = ()
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
    monkeypatch.setattr(loop, "MAX_GROWTH_MB", 32.0)
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


@pytest.mark.slow
def test_the_command_shares_the_inputs_among_processes_and_ends_in_a_line_of_json() -> None:
    command = [sys.executable, str(FUZZ), "tensors", "--inputs", "41"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "tensors: 41 inputs in" in done.stdout
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["benchmark"] == "fuzz"
    assert line["detail"]["found"] == {"tensors": 0}
    assert line["detail"]["claims"][0]["met"]
