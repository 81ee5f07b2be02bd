"""Runs pytest, and then what failed once more, without other tests beside it.

    python .ci/pytest_twice.py [arguments of pytest]

What passes the second time is printed as FLAKY, and added to ``build/ci/flaky.txt``, which CI keeps
from run to run; it fails the run when the file has it three times. Only tests are run again: an
error in collecting them, a worker that crashed, or a run that ended early fails it at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

RECORD = Path("build/ci/flaky.txt")
TIMES = 3


class Outcomes:
    """A plugin of pytest that keeps which tests passed and failed.

    Args:
        before: the ids of those that failed the first time, to which this run is limited; empty
            for the first run.
    """

    def __init__(self, before: list[str]) -> None:
        self.before = before
        self.files = {each.partition("::")[0] for each in before}
        self.failed: dict[str, None] = {}
        self.passed: set[str] = set()
        self.complete = True

    @property
    def flaky(self) -> set[str]:
        """Those that failed the first time and not the second."""
        return {each for each in self.before if each in self.passed and each not in self.failed}

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        if not self.before or collection_path.is_dir():
            return None
        path = os.path.relpath(collection_path, config.rootpath).replace(os.sep, "/")
        return True if path not in self.files else None

    # Not by --last-failed, with which a test's other variants are not even collected: which of them
    # are nightly depends on their places.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.before:
            items[:] = [each for each in items if each.nodeid in self.before]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.complete &= not report.failed

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object) -> None:
        self.complete &= error is None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.complete &= not (session.shouldfail or session.shouldstop)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.before:
            terminalreporter.section("failed, and run once more")
            for each in self.before:
                word = "FLAKY" if each in self.flaky else "FAILED TWICE"
                terminalreporter.line(f"{word} {each}")


def often_flaky(found: set[str]) -> list[str]:
    """Add the tests to the record, and return which of them it has too often."""
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    with RECORD.open("a+") as file:
        file.writelines(f"{each}\n" for each in sorted(found))
        file.seek(0)
        met = Counter(file.read().splitlines())
    return [each for each in sorted(found) if met[each] >= TIMES]


def once(record: Path, arguments: list[str]) -> int:
    """Run in this process; write what failed to ``record``, or run what is written there."""
    sys.path[0] = os.getcwd()  # as python -m pytest has it
    if record.exists():
        outcomes = Outcomes(json.loads(record.read_text()))
        # The report is that of the first run.
        arguments = [each for each in arguments if not each.startswith("--junit-xml=")]
        status = pytest.main([*arguments, "-n", "0"], plugins=[outcomes])
        if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            often = often_flaky(outcomes.flaky)
            for each in often:
                print(f"FLAKY {TIMES} times and more: {each}")
            return 0 if outcomes.flaky == set(outcomes.before) and not often else 1
        return status
    outcomes = Outcomes([])
    status = pytest.main(arguments, plugins=[outcomes])
    if status == pytest.ExitCode.TESTS_FAILED and outcomes.complete:
        record.write_text(json.dumps(list(outcomes.failed)))
    return status


def main(arguments: list[str]) -> int:
    """Return the exit status of the run that decides."""
    with TemporaryDirectory() as directory:
        record = Path(directory) / "failed.json"
        command = [sys.executable, __file__, "--once", str(record), *arguments]
        status = subprocess.run(command).returncode
        if record.exists():
            print("Once more, alone, what failed:", flush=True)
            status = subprocess.run(command).returncode
        return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        sys.exit(once(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main(sys.argv[1:]))
