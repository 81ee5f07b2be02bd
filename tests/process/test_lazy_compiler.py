"""torch's compiler is not imported by what does not compile, and is all there for what does.

Whether a module was imported is a fact about a process, so each fact has one of its own, forked
from one that has imported torch and nothing else.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from subprocesses import printed_by

from sparkdl.process.lazy_compiler import COMPILER, defer_compiler


@pytest.mark.slow
def test_the_compiler_is_imported_when_it_is_used_and_not_before() -> None:
    """Each function of the program states a fact, and a process that fails names its own."""
    program = Path(__file__).with_name("compiler_facts.py")
    printed_by(program, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize(
    ("version", "stands_in"),
    [("2.13.0", True), ("2.14.1+cpu", True), ("2.12.1", False), ("2.130.0", False), ("3.0", False)],
)
def test_it_is_stood_in_for_only_in_versions_of_torch_with_which_that_was_tested(
    version: str, stands_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", version)
    monkeypatch.setitem(sys.modules, COMPILER, sys)
    del sys.modules[COMPILER]
    defer_compiler()
    assert (COMPILER in sys.modules) is stands_in
