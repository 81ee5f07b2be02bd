"""Tests over a table: one test for all rows, whose message has every row that fails."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

Test = Callable[..., None]


def every(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test for each row, as ``pytest.mark.parametrize`` takes them, within one test.

    ``tmp_path``, ``monkeypatch`` and ``caplog`` are of each row's own.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    table = list(rows)

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def check(*owner: Any, **fixtures: Any) -> None:
            failed = []
            for index, row in enumerate(table):
                values = row if len(arguments) > 1 else (row,)
                given = dict(zip(arguments, values, strict=True))
                try:
                    with ExitStack() as until_done:
                        test(*owner, **_of_the_row(fixtures, index, until_done), **given)
                except (Exception, pytest.fail.Exception) as error:
                    shown = ", ".join(f"{name}={reprlib.repr(v)}" for name, v in given.items())
                    failed.append(f"{shown}: {type(error).__name__}: {error}")
            if failed:
                pytest.fail(f"{len(failed)} of {len(table)} rows:\n" + "\n".join(failed))

        others = [each for each in signature.parameters.values() if each.name not in arguments]
        check.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return check

    return decorate


def every_row(*table: Any) -> Callable[[Test], Test]:
    """Call a test for each row, within one test: a tuple has the values of its last arguments.

    Of rows that are no tuples each is the value of the last argument alone.
    """
    (width,) = {len(row) if isinstance(row, tuple) else 0 for row in table}

    def decorate(test: Test) -> Test:
        arguments = list(inspect.signature(test).parameters)[-max(width, 1) :]
        return every(arguments, table)(test)

    return decorate


def _of_the_row(fixtures: dict[str, Any], index: int, until_done: ExitStack) -> dict[str, Any]:
    given = dict(fixtures)
    if "tmp_path" in given:
        given["tmp_path"] = given["tmp_path"] / f"row-{index}"
        given["tmp_path"].mkdir()
    if "monkeypatch" in given:
        given["monkeypatch"] = until_done.enter_context(pytest.MonkeyPatch.context())
    if "caplog" in given:
        given["caplog"].clear()
    return given
