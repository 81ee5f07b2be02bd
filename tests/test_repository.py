"""What is around the package: workflows, hooks, the version."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

import sparkdl

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def commands(workflow: Path) -> list[str]:
    """What the steps of a workflow run."""
    found = []
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        steps = [step["run"] for step in job["steps"] if "run" in step]
        if "${{ matrix.command }}" in steps:
            found += [each["command"] for each in job["strategy"]["matrix"]["include"]]
        found += [step for step in steps if "matrix" not in step]
    return found


def targets() -> set[str]:
    (declared,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(declared.split())


def test_workflows_hooks_and_pages_call_targets_that_the_makefile_has() -> None:
    called = [command for workflow in WORKFLOWS for command in commands(workflow)]
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    called += [hook["entry"] for hook in hooks["hooks"]]
    assert hooks["repo"] == "local"  # nothing is downloaded
    assert len(called) >= 8
    assert all(command.startswith("make ") for command in called), called
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in [*pages, ROOT / ".ci/run"]:
        called += re.findall(
            r"(?:^|`)(make [a-z-]+)(?=`|$| [A-Z]+=)", page.read_text(), re.MULTILINE
        )
    missing = {name for command in called if (name := shlex.split(command)[1]) not in targets()}
    assert not missing


def test_the_workflow_of_a_change_has_a_job_for_each_step_of_ci_run() -> None:
    steps = re.findall(r"step .*? \d+ make ([a-z-]+)", (ROOT / ".ci/run").read_text())
    jobs = [each.split()[1] for each in commands(ROOT / ".github/workflows/ci.yml")]
    assert steps == jobs


def test_the_version_is_the_newest_of_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert versions[0] == sparkdl.__version__
    numbers: list[Any] = [tuple(map(int, version.split("."))) for version in versions]
    assert numbers == sorted(numbers, reverse=True)


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
