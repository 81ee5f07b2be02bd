"""What is around the package: what is called of make, the version, the list of faults."""

from __future__ import annotations

import re
from pathlib import Path

import sparkdl

ROOT = Path(__file__).parents[1]


def test_workflows_hooks_and_pages_call_targets_that_the_makefile_has() -> None:
    texts = [ROOT / ".ci/run", ROOT / ".pre-commit-config.yaml", ROOT / "CONTRIBUTING.md"]
    texts += [*ROOT.glob(".github/workflows/*"), ROOT / "README.md", *ROOT.glob("docs/*.md")]
    calls = re.compile(
        r"(?:^|`|\d |(?:command|run|entry): )make ([a-z-]+)(?=[`;]|$| [A-Z&|])", re.MULTILINE
    )
    called = {target for text in texts for target in calls.findall(text.read_text())}
    assert len(called) > 8
    (declared,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert called - set(declared.split()) == set()


def test_the_version_is_the_newest_of_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)[0] == sparkdl.__version__


def test_every_test_that_holds_a_fault_is_there() -> None:
    page = (ROOT / "docs/notes/faults.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(?:\w+::)?(test_\w+)` \|$", page, re.MULTILINE)
    assert len(named) == page.count("`tests/") - 1  # each is an id, but for this file's name
    texts = {name: path.read_text() for name, _ in named if (path := ROOT / name).exists()}
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^\s*def {name}\(", texts.get(file, ""), re.MULTILINE)
    ]
    assert not missing, f"docs/notes/faults.md names tests that are not there: {missing}"
