"""Every script of benchmarks/ still starts: what it imports is there, and it says what it does.

Those of studies/ too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
IN_ONE_PROCESS = """
import contextlib, importlib, io, runpy, sys, traceback

sys.path[:0] = [sys.argv[1], sys.argv[1] + "/studies"]
for name in sys.argv[2:]:
    sys.argv, said = [name, "--help"], io.StringIO()
    try:
        # Of a module that is no script nothing runs but its definitions.
        with contextlib.redirect_stdout(said):
            runpy.run_path(name, run_name="__main__")
        problem = "" if "__main__" not in open(name).read() else "does not know --help"
    except SystemExit as end:
        problem = f"ends with {end.code}" if end.code or "usage:" not in said.getvalue() else ""
    except Exception:
        problem = traceback.format_exc()
    if problem:
        print(f"{name}: {problem}")
"""
"""torch and Spark are imported once for all of them: a process each would take three minutes."""


@pytest.mark.slow
def test_every_script_starts_and_has_a_help() -> None:
    scripts = sorted(map(str, [*FOLDER.glob("*.py"), *FOLDER.glob("studies/*.py")]))
    assert len(scripts) > 40
    command = [sys.executable, "-c", IN_ONE_PROCESS, str(FOLDER), *scripts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
