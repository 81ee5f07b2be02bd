"""What stands for a value kept elsewhere is described, saved and sent as that value."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkdl.checkpoint.identity import describe
from sparkdl.checkpoint.object_spec import LOSS, load_object, save_object
from sparkdl.user_code import stand_ins
from sparkdl.user_code.stand_ins import Uncounted, ValueOf, pickled_apart, stands_in


class Remote:
    """Like a broadcast variable: it is pickled by its number alone."""

    def __init__(self, number: int, value: Any) -> None:
        self.number, self.value = number, value

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_number, (self.number,)


def _of_number(number: int) -> Remote:
    raise LookupError(f"no number {number} here")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "_MAKERS", {})
    stands_in(Remote, lambda each: ValueOf(each.value))
    return


def uses(remote: Remote) -> Callable[[], Any]:
    return lambda: remote.value


def test_a_process_outside_the_application_is_sent_the_value() -> None:
    nested = {"functions": [uses(Remote(1, {"rate": 2.0}))]}
    assert pickle.loads(pickled_apart(nested))["functions"][0]() == {"rate": 2.0}


def test_a_training_is_told_by_the_value_and_not_by_its_number() -> None:
    first, same, other = (describe(uses(Remote(*each))) for each in [(1, 5), (2, 5), (1, 6)])
    assert first == same != other


def test_what_is_saved_has_the_value(tmp_path: Path) -> None:
    saved = save_object(uses(Remote(1, 5)), tmp_path, "loss")
    assert load_object(saved, tmp_path, "loss", expected=LOSS, trust=True)() == 5


def test_nothing_is_counted_outside_the_application() -> None:
    counter = Uncounted("how to add")
    counter.add(1)
    before = counter
    counter += 1
    assert counter is before
