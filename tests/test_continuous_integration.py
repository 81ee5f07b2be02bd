"""`.ci/run` runs what failed once more: what passes then is printed, and fails nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_what_passes_the_second_time_is_flaky_and_fails_nothing(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "-n", "1", test_flaky=FLAKY)
    assert status == 0
    assert "FLAKY test_flaky.py::test_second_time" in lines
    assert closing_lines(lines) == ["1 failed, 1 passed", "1 passed"]
    assert "1 passed in " in lines[-1]


def test_what_was_flaky_three_times_fails_the_run(tmp_path: Path) -> None:
    statuses = []
    for _ in range(3):
        (tmp_path / "test_flaky.met").unlink(missing_ok=True)
        statuses.append(run(tmp_path, test_flaky=FLAKY)[0])
    assert statuses == [0, 0, 1]


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
