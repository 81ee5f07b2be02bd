"""What is around the package: its public names, make, the list of faults, what runs twice."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from subprocesses import printed_by

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


LIST = ast.parse((ROOT / "sparkdl" / "__init__.pyi").read_text()).body[1:]


def listed() -> dict[str, str]:
    """The home of each name, by Python's own parser."""
    homes = {}
    for node in LIST:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        (alias,) = node.names
        assert alias.name == alias.asname
        homes[alias.name] = node.module
    return homes


def test_all_has_the_names_of_the_list() -> None:
    assert sparkdl.__all__ == sorted(listed()) == dir(sparkdl)
    assert "TorchEstimator" in sparkdl.__all__


def test_a_name_is_what_its_home_has() -> None:
    for name, home in listed().items():
        assert getattr(sparkdl, name) is getattr(importlib.import_module(home), name), name


@pytest.mark.gate
def test_no_name_of_the_list_needs_a_package_of_an_extra() -> None:
    extras = ["PIL", "cryptography", "imagehash", "matplotlib", "mlflow", "scipy", "tensorboard"]
    extras += ["tensorstore", "torchmetrics", "yaml"]
    program = f"import sys, sparkdl; sys.modules.update(dict.fromkeys({extras})); "
    program += "print(*(getattr(sparkdl, name) for name in sparkdl.__all__), sep='\\n')"
    assert len(printed_by("-c", program).splitlines()) >= len(sparkdl.__all__)


@pytest.mark.gate
def test_other_pythons_are_tried_with_tests_that_are_there_and_need_no_torch() -> None:
    program = (
        "import sys, pytest, versions; sys.modules['torch'] = None; "
        "files = [f'tests/{each}' for each in versions.PYTHONS['files']]; "
        "options = ['--collect-only', '-q', '--noconftest', '-c', '/dev/null', '--rootdir=.']; "
        "sys.exit(pytest.main([*options, *files]))"
    )
    path = os.pathsep.join(str(ROOT / each) for each in (".ci", ".", "tests"))
    printed_by("-c", program, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'sparkdl' has no attribute 'TorchEstimater'"):
        sparkdl.TorchEstimater  # type: ignore[attr-defined]  # noqa: B018


def test_the_reference_has_every_name() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.rst"))
    documented = re.findall(r"^\.\. auto(?:class|function):: (?:sparkdl\.)?(\w+)$", pages, re.M)
    assert set(listed()) - set(documented) == {"__version__"}


def test_the_list_is_found_in_a_package_that_is_zipped(tmp_path: Path) -> None:
    for name in ("__init__.py", "__init__.pyi", "version.py"):
        (tmp_path / "sparkdl").mkdir(exist_ok=True)
        shutil.copy(ROOT / "sparkdl" / name, tmp_path / "sparkdl" / name)
    zipped = shutil.make_archive(str(tmp_path / "package"), "zip", tmp_path, "sparkdl")
    program = f"import sys; sys.path.insert(0, {zipped!r}); import sparkdl; "
    program += "print(sparkdl.__file__, sparkdl.__version__, len(sparkdl.__all__))"
    found = [f"{zipped}/sparkdl/__init__.py", sparkdl.__version__, str(len(listed()))]
    assert printed_by("-c", program).split() == found


PYTEST_TWICE = Path(__file__).parents[1] / ".ci" / "pytest_twice.py"
FLAKY = """
from pathlib import Path

def test_passes(): pass

def test_second_time():
    met = Path(__file__).with_suffix(".met")
    if not met.exists():
        met.touch()
        assert False
"""
FAILING = "def test_fails(): assert False"
CRASHING = "import os\ndef test_crashes(): os._exit(1)"
SKIPPED_LATER = FLAKY + "    import pytest\n    pytest.skip('not twice')"
NOT_TORN_DOWN = """
import pytest

@pytest.fixture
def broken():
    yield
    assert False

def test_before_a_broken_fixture(broken): pass
"""


def run(directory: Path, *arguments: str, **files: str) -> tuple[int, list[str]]:
    """The exit status, and the lines that were printed."""
    (directory / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    command = [sys.executable, str(PYTEST_TWICE), "-p", "xdist", *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=150
    )
    return done.returncode, done.stdout.splitlines()


def closing_lines(lines: list[str]) -> list[str]:
    """How each run of pytest ended, in words without its seconds."""
    ends = [line.strip("= ") for line in lines if line.startswith("=") and " in " in line]
    return [end.partition(" in ")[0] for end in ends]


@pytest.mark.gate
def test_what_passes_the_second_time_is_flaky_and_fails_nothing(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "-n", "1", test_flaky=FLAKY)
    assert status == 0
    assert "FLAKY test_flaky.py::test_second_time" in lines
    assert closing_lines(lines) == ["1 failed, 1 passed", "1 passed"]
    assert "1 passed in " in lines[-1]


@pytest.mark.gate
def test_what_was_flaky_three_times_fails_the_run(tmp_path: Path) -> None:
    statuses = []
    for _ in range(3):
        (tmp_path / "test_flaky.met").unlink(missing_ok=True)
        statuses.append(run(tmp_path, test_flaky=FLAKY)[0])
    assert statuses == [0, 0, 1]


@pytest.mark.gate
def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    files = {"test_flaky": FLAKY, "test_failing": FAILING, "test_teardown": NOT_TORN_DOWN}
    status, lines = run(tmp_path, test_skipped=SKIPPED_LATER, **files)
    assert status == 1
    assert [line for line in lines if line.startswith(("FLAKY", "FAILED TWICE"))] == [
        "FAILED TWICE test_failing.py::test_fails",
        "FLAKY test_flaky.py::test_second_time",
        "FAILED TWICE test_skipped.py::test_second_time",
        "FAILED TWICE test_teardown.py::test_before_a_broken_fixture",
    ]
    first, second = closing_lines(lines)
    assert first == "3 failed, 3 passed, 1 error"
    assert second == "1 failed, 2 passed, 1 skipped, 1 error"


@pytest.mark.gate
def test_what_is_no_failed_test_is_not_run_again(tmp_path: Path) -> None:
    cases = {
        "error in collecting": ([], "test_broken", "import a_module_that_nobody_has"),
        "the same in workers": (["-n", "1"], "test_broken", "import a_module_that_nobody_has"),
        "crashed worker": (["-n", "1"], "test_crashing", CRASHING),
        "ended early": (["-x"], "test_failing", FAILING),
    }
    found = {}
    for name, (arguments, file, text) in cases.items():
        (directory := tmp_path / name).mkdir()
        status, lines = run(directory, *arguments, **{"test_flaky": FLAKY, file: text})
        found[name] = (status, any("Once more" in line for line in lines))
    assert all(status != 0 and not again for status, again in found.values()), found
