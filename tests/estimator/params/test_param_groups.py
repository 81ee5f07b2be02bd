"""The estimator's arguments come in the same groups wherever they are listed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from sparkdl import TorchEstimator

ROOT = Path(__file__).parents[3]
ARGUMENTS = list(inspect.signature(TorchEstimator.__init__).parameters)[1:]


def group_of(name: str) -> str:
    """The file of the most basic of our classes that has the Param."""
    homes = [
        kind.__module__.rpartition(".")[2].capitalize()
        for kind in TorchEstimator.__mro__
        if hasattr(kind, name) and kind.__module__.startswith("sparkdl.estimator.params.")
    ]
    return homes[-1]


def by_group(lines: list[str], heading: str, item: str) -> list[tuple[str, str]]:
    """Each argument with the heading above it."""
    found, group = [], ""
    for line in lines:
        if match := re.match(heading, line):
            group = match[1]
        elif match := re.match(item, line):
            found += [(group, name) for name in re.findall(r"\w+", match[1])]
    return found


def in_docstring() -> list[tuple[str, str]]:
    text = inspect.getdoc(TorchEstimator) or ""
    return by_group(text.partition("Raises:")[0].splitlines(), r"(\w+):$", r"    (\w+): ")


def in_signature() -> list[tuple[str, str]]:
    text = inspect.getsource(TorchEstimator).partition("        *,\n")[2].partition(") -> None")[0]
    return by_group(text.splitlines(), r" {8}# (\w+)$", r" {8}(\w+): ")


def in_the_page() -> list[tuple[str, str]]:
    text = (ROOT / "docs/parameters.md").read_text()
    return by_group(text.splitlines(), r"\| \*\*(\w+)\*\*", r"\| ((?:`\w+`(?:, )?)+) \|")


@pytest.mark.parametrize("listed", [in_docstring, in_signature, in_the_page])
def test_arguments_are_listed_in_order_under_the_file_of_their_param(listed: object) -> None:
    assert callable(listed)
    assert listed() == [(group_of(name), name) for name in ARGUMENTS]


def test_each_group_is_listed_once() -> None:
    groups = [group_of(name) for name in ARGUMENTS]
    starts = [now for now, before in zip(groups, ["", *groups[:-1]], strict=True) if now != before]
    assert len(starts) == len(set(starts)) == 9
