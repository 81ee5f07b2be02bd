"""What hypothesis draws is the same in each run of the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st


def drawn() -> list[int]:
    values: list[int] = []

    @given(st.lists(st.integers()))
    def draw(examples: list[int]) -> None:
        values.extend(examples)

    draw()
    return values


def load_module_of_numbers(path: Path) -> None:
    path.write_text("\n".join(f"N{number} = {number}" for number in range(1000, 2000)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def test_examples_are_the_same_whatever_modules_are_loaded(tmp_path: Path) -> None:
    before = drawn()
    load_module_of_numbers(tmp_path / "numbers_of_ours.py")
    try:
        assert drawn() == before
    finally:
        del sys.modules["numbers_of_ours"]
