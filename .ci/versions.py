"""Tries versions of Spark and Python, and writes the tables of docs/versions.md.

    python .ci/versions.py spark 3.5 4.3 -- -x      the tests marked ``versions``
    python .ci/versions.py python 3.10 3.12         types, syntax, and what needs no torch
    python .ci/versions.py --write python 3.10      the same, and the page's row

A Spark's environment has its own PySpark, pandas, pyarrow and numpy; everything else comes from the
environment that runs this. Of Pythons, those that are installed are tried. ``PYTEST`` is what runs
a Spark's tests, as in the Makefile.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
BUILD = ROOT / "build" / "versions"
END = "<!-- end -->"
PACKAGES = {
    # with the oldest of everything that is supported
    "3.5": ["pyspark==3.5.9", "pandas==2.2.3", "pyarrow==18.1.0", "numpy==1.26.4"],
    "4.0": ["pyspark==4.0.5", "pandas==2.2.3", "pyarrow==18.1.0", "numpy==1.26.4"],
    "4.1": ["pyspark==4.1.4", "pandas==2.3.3", "pyarrow==26.0.1", "numpy==2.4.6"],
    "4.2": ["pyspark==4.2.1", "pandas==2.3.3", "pyarrow==26.0.1", "numpy==2.4.6"],
    "4.3": ["pyspark==4.3.0", "pandas==2.3.3", "pyarrow==26.0.1", "numpy==2.4.6"],
}
PYTHONS = {
    "tests": [
        *("numpy", "pyarrow", "cryptography", "fsspec", "typing_extensions"),
        *("pytest", "pytest-timeout", "hypothesis"),
    ],
    "files": [
        *("checkpoint/test_storage.py", "durable/test_lease.py", "planner/test_link_speeds.py"),
        *(f"feed/record_batches/test_{name}.py" for name in ("packed", "parquet_rows")),
        *("test_errors.py", "test_events.py", "test_phases.py"),
        *("transport/test_streams.py", "volumes/test_patch_grid.py"),
    ],
}
"""What is installed to test a Python without torch, and the tests."""
OF_PYTHONS = ("Python", "types", "syntax", "tests that need no torch", "on")
HEAD = ("Spark", "Python", "Java", "torch", "pandas", "pyarrow", "numpy", "tests", "minutes", "on")
ASK = """
import json, sys, numpy, pandas, pyarrow, pyspark, torch
found = [pyspark, torch, pandas, pyarrow, numpy]
print(json.dumps([sys.version.split()[0], *(each.__version__ for each in found)]))
"""


def environment(version: str) -> Path:
    """The Python of a version's environment, made unless it is there."""
    folder = BUILD / f"spark-{version}"
    python, made = folder / "bin" / "python", folder / "packages"
    wanted = "\n".join(PACKAGES[version])
    if not made.exists() or made.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", *PACKAGES[version]]
        subprocess.run(install, check=True)
        ours = sysconfig.get_paths()["purelib"]
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "zz_others.pth").write_text(f"{ours}\n")
        made.write_text(wanted)
    return python


def tested(version: str, arguments: list[str]) -> tuple[list[str], bool]:
    """The row of a version's table, and whether all tests have passed."""
    python, report = environment(version), BUILD / f"{version}.xml"
    settings = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": str(python),
        # Spark's JVMs live for minutes here, too short for the optimizing compiler to pay.
        "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    settings.pop("SPARK_HOME", None)
    report.unlink(missing_ok=True)
    asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True)
    ours, spark, *packages = json.loads(asked.stdout)
    print(f"Spark {spark}", flush=True)
    pytest = os.environ.get("PYTEST", "-m pytest").split()
    marked = ["-q", "-m", "versions", f"--junit-xml={report}", *arguments]
    started = time.monotonic()
    done = subprocess.run([python, *pytest, *marked], cwd=ROOT, env=settings, check=False)
    minutes = (time.monotonic() - started) / 60
    told = [counted(report), f"{minutes:.1f}", time.strftime("%Y-%m-%d")]
    row = [spark, ours, java(), *packages, *told]
    return row, done.returncode == 0


def java() -> str:
    """The version of Java that Spark uses."""
    home = os.environ.get("JAVA_HOME")
    command = [f"{home}/bin/java" if home else "java", "-version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (version,) = re.findall(r'version "([^"]+)"', told)
    return str(version)


def python_tried(version: str) -> tuple[list[str], bool]:
    """The row of a Python's table, and whether all that could be tried was right."""
    program = installed(version)
    checked = [sys.executable, "-m", "mypy", "--python-version", version]
    types = subprocess.run(checked, cwd=ROOT, check=False).returncode == 0
    row = [version, "checked" if types else "wrong"]
    if program is None:
        return [*row, "not installed", "not installed", time.strftime("%Y-%m-%d")], types
    compiles = [program, "-m", "compileall", "-q", "-f", "sparkdl", "jobs"]
    elsewhere = os.environ | {"PYTHONPYCACHEPREFIX": str(BUILD / "pycache")}
    syntax = subprocess.run(compiles, cwd=ROOT, env=elsewhere, check=False).returncode == 0
    folder, report = BUILD / f"python-{version}", BUILD / f"python-{version}.xml"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([program, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", *PYTHONS["tests"]]
        subprocess.run(install, check=True)
    # hypothesis' profile "ci" has no deadlines
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    pytest.append("--hypothesis-profile=ci")
    files = [str(ROOT / "tests" / each) for each in PYTHONS["files"]]
    settings = elsewhere | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [python, *pytest, f"--rootdir={ROOT}", f"--junit-xml={report}", *files]
    done = subprocess.run(command, cwd=ROOT, env=settings, check=False)
    row += ["compiled" if syntax else "wrong", counted(report)]
    return [*row, time.strftime("%Y-%m-%d")], types and syntax and done.returncode == 0


def installed(version: str) -> str | None:
    """The program of a version of Python, on the PATH or of pyenv; None if there is none."""
    pyenvs = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for program in (shutil.which(f"python{version}"), *map(str, pyenvs)):
        if program and not subprocess.run([program, "-c", ""], capture_output=True).returncode:
            return program
    return None


def counted(report: Path) -> str:
    """How many tests have passed, and how many not, by pytest's report."""
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    others = {name: int(suite.attrib[name]) for name in ("failures", "errors", "skipped")}
    told = f"{int(suite.attrib['tests']) - sum(others.values())} passed"
    return told + "".join(f", {number} {name}" for name, number in others.items() if number)


def write(kind: str, head: Sequence[str], rows: dict[str, list[str]]) -> None:
    """Put rows into a table of the page, in place of those of the same versions."""
    begin = f"<!-- written by .ci/versions.py {kind} -->"
    before, _, rest = PAGE.read_text().partition(begin)
    table, _, after = rest.partition(END)
    for line in table.strip().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.setdefault(series(cells[0]), cells)
    lines = [head, ["---"] * len(head), *(rows[each] for each in sorted(rows, key=numbers))]
    written = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    PAGE.write_text(f"{before}{begin}\n\n{written}\n\n{END}{after}")


def series(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def numbers(version: str) -> list[int]:
    """What versions are sorted by."""
    return list(map(int, version.split(".")))


def main(arguments: list[str]) -> int:
    """Try the versions before ``--``, with what is behind it for pytest."""
    writes = arguments[0] == "--write"
    kind, *rest = arguments[writes:]
    versions, _, chosen = " ".join(rest).partition("--")
    rows, failed = {}, []
    for version in versions.split():
        if kind == "spark":
            rows[version], passed = tested(version, chosen.split())
        else:
            rows[version], passed = python_tried(version)
        if not passed:
            failed.append(version)
    if writes:
        right = {version: row for version, row in rows.items() if version not in failed}
        write(kind, HEAD if kind == "spark" else OF_PYTHONS, right)
    for row in rows.values():
        print(f"{kind} {' | '.join(row)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
