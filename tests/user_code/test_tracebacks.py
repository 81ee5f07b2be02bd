"""A traceback begins with the user's code, and says what it leaves out."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.user_code.tracebacks import message_of, shortened, text_of, traceback_of


class Explodes(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        return self.deeper(features)

    def deeper(self, features: Tensor) -> Tensor:
        raise ZeroDivisionError("the reactor is empty")


def raised(call: Callable[[], Any]) -> Exception:
    """With the frames from where a worker's own code would catch it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    calls = caught.value.__traceback__
    assert calls is not None
    assert calls.tb_next is not None
    return caught.value.with_traceback(calls.tb_next.tb_next)


def step_of(module: nn.Module, width: int = 4) -> Callable[[], Any]:
    replica = Replica(module, torch.optim.SGD, nn.CrossEntropyLoss())  # type: ignore[arg-type]
    batch = Batch((torch.zeros(2, width),), torch.tensor([0, 1]), last=False)
    return lambda: replica.step(batch)


def test_it_begins_with_the_users_code_and_says_what_came_before() -> None:
    lines = traceback_of(raised(step_of(Explodes(4, 3)))).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "test_tracebacks.py" in lines[1]
    assert lines[1].endswith("in forward")
    assert "ZeroDivisionError: the reactor is empty" in lines
    assert lines[-1].startswith("(Before this come ")
    assert "the first in replica/replica.py, line " in lines[-1]
    assert not any("replica.py" in line for line in lines[:-1])


def test_without_code_of_the_user_it_begins_where_ours_ends() -> None:
    lines = traceback_of(raised(step_of(nn.Linear(5, 3)))).splitlines()
    assert "torch/nn/modules" in lines[1]
    assert "replica/replica.py" in lines[-1]


def test_an_error_of_ours_alone_is_told_whole() -> None:
    def build() -> Replica:
        return Replica(nn.Identity(), torch.optim.SGD, nn.MSELoss())  # type: ignore[arg-type]

    text = traceback_of(raised(build))
    assert "replica.py" in text
    assert "Before this" not in text


def test_what_caused_an_error_is_told_as_well() -> None:
    class Explains(Explodes):
        def forward(self, features: Tensor) -> Tensor:
            try:
                return self.deeper(features)
            except ZeroDivisionError as error:
                raise ValueError("no power") from error

    text = traceback_of(raised(step_of(Explains(4, 3))))
    assert text.index("the reactor is empty") < text.index("ValueError: no power")


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("y")])
def test_an_error_that_was_never_raised_is_its_name(error: Exception) -> None:
    assert traceback_of(error) == "".join(f"{type(error).__name__}: {error}")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class NoNotes(Exception):
    @property
    def __notes__(self) -> list[str]:
        raise ValueError("no notes")


class NoException(BaseException):
    pass


def group_of(depth: int) -> BaseException:
    error: Exception = ValueError("innermost")
    for level in range(depth):
        error = ExceptionGroup(f"level {level}", [error, *map(ValueError, range(1_000))])  # noqa: F821 # Python 3.11
    return error


def chain_of(length: int) -> BaseException:
    error = ValueError("first")
    for number in range(length):
        following = ValueError(f"number {number}")
        following.__cause__, error = error, following
    return error


def with_notes(note: str, count: int) -> BaseException:
    error = ValueError("noted")
    for _ in range(count):
        error.add_note(note)
    return error


HOSTILE = {
    "Silent: <exception str() failed>": Silent(),
    "NoText: <exception str() failed>": NoText(),
    "NoNotes: it has text": NoNotes("it has text"),
    "NoException: base": NoException("base"),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit: 3": SystemExit(3),
    "GeneratorExit": GeneratorExit(),
    "ValueError: xx": ValueError("x" * 50_000_000),
    "ValueError: half \\ud800": ValueError("half \ud800 a pair"),
    "ValueError: noted": with_notes("n" * 1_000_000, 10),
    "ValueError: number 9999": chain_of(10_000),
    "ExceptionGroup: level 19": group_of(20),
}


def test_whatever_is_raised_is_named_and_cut_to_size(subtests: pytest.Subtests) -> None:
    for begins in HOSTILE:
        with subtests.test(begins=begins):
            try:
                raise HOSTILE[begins]
            except BaseException as error:
                name, told, text = message_of(error), traceback_of(error), text_of(error)
            assert begins in name
            assert begins.partition(":")[0] in told
            assert "test_tracebacks.py" in told
            assert max(map(len, (name, told, text))) < 21_000
            for each in (name, told, text):
                each.encode()


def test_what_is_cut_keeps_its_beginning_and_its_end() -> None:
    text = shortened("a" * 1_000 + "b" * 1_000_000 + "c" * 1_000, 900)
    assert text.startswith("a" * 600)
    assert text.endswith("c" * 300)
    assert "[1001100 characters left out]" in text
    assert shortened("short", 900) == "short"


def test_a_short_error_is_told_as_python_tells_it() -> None:
    for error in (ValueError("no"), KeyError("x"), ValueError(), with_notes("see there", 1)):
        expected = "".join(traceback.format_exception_only(error)).strip()
        assert message_of(error) == expected
