"""Tries versions of Spark and Python, and writes the tables of docs/versions.md.

    python .ci/versions.py spark 3.5 4.3 -- -x      the tests marked ``versions``
    python .ci/versions.py client 4.2 -- -x         those of clients, of pyspark-client alone
    python .ci/versions.py python 3.10 3.12         types, syntax, and what needs no torch
    python .ci/versions.py --write python 3.10      the same, and the page's row

A Spark's environment has its own PySpark, pandas, pyarrow and numpy; everything else comes from the
environment that runs this. A client's has ``pyspark-client`` in place of PySpark, so that there are
neither py4j nor jars: its server, and the fits of a session in the driver that it is compared with,
are in the environment of a Spark. Of Pythons, those that are installed are tried. ``PYTEST`` is
what runs a Spark's tests, as in the Makefile.
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
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
BUILD = ROOT / "build" / "versions"
END = "<!-- end -->"
PACKAGES = {
    # with the oldest of everything that is supported
    "3.5": ["pyspark==3.5.0", "pandas==2.2.3", "pyarrow==18.1.0", "numpy==1.26.4"],
    "4.0": ["pyspark==4.0.0", "pandas==2.2.3", "pyarrow==18.1.0", "numpy==1.26.4"],
    "4.1": ["pyspark==4.1.4", "pandas==2.3.3", "pyarrow==26.0.1", "numpy==2.4.6"],
    "4.2": ["pyspark==4.2.1", "pandas==2.3.3", "pyarrow==26.0.1", "numpy==2.4.6"],
    "4.3": ["pyspark==4.3.0", "pandas==2.3.3", "pyarrow==26.0.1", "numpy==2.4.6"],
}
CLIENTS = {"4.0": "4.0.4", "4.1": "4.1.3", "4.2": "4.2.0", "4.3": "4.2.0"}
"""By the server's Spark: the newest ``pyspark-client`` on PyPI that is not newer."""
OF_CLIENTS = ["tests/estimator/test_in_stage.py", "tests/spark/functions/test_calls_of_clients.py"]
PYTHONS = {
    "tests": [
        *("numpy", "pyarrow", "cryptography", "fsspec", "typing_extensions"),
        *("pytest", "pytest-timeout", "hypothesis"),
    ],
    "files": [
        *("durable/test_lease.py", "feed/test_packed.py", "test_errors.py", "test_phases.py"),
        *("transport/test_streams.py", "volumes/test_patch_grid.py"),
    ],
}
"""What is installed to test a Python without torch, and the tests."""
HEADS = {
    "spark": (
        *("Spark", "Python", "Java", "torch", "pandas", "pyarrow", "numpy"),
        *("tests", "minutes", "on"),
    ),
    "client": ("server", "pyspark-client", "Python", "Java", "torch", "tests", "minutes", "on"),
    "python": ("Python", "types", "syntax", "tests that need no torch", "on"),
}
ASK = """
import json, sys, numpy, pandas, pyarrow, pyspark, torch
found = [pyspark, torch, pandas, pyarrow, numpy]
print(json.dumps([sys.version.split()[0], *(each.__version__ for each in found)]))
"""
ASK_CLIENT = f"""
import importlib.util
import pyspark.util
assert pyspark.util.is_remote_only() and importlib.util.find_spec("py4j") is None
{ASK}
"""


def environment(name: str, packages: list[str], *, without_java: bool = False) -> Path:
    """The Python of an environment with packages, made unless it is there.

    What it lacks comes from the environment that runs this.

    Args:
        name: of its folder.
        packages: what is installed, as pip names them.
        without_java: whether PySpark and py4j are hidden that the environment that runs this has.
    """
    folder = BUILD / name
    python, made = folder / "bin" / "python", folder / "packages"
    wanted = "\n".join(packages)
    others = Path(sysconfig.get_paths()["purelib"])
    if not made.exists() or made.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        if without_java:
            (folder / "others").mkdir()
            for each in others.iterdir():
                if not each.name.startswith(("pyspark", "py4j")):
                    (folder / "others" / each.name).symlink_to(each)
            others = folder / "others"
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "zz_others.pth").write_text(f"{others}\n")
        made.write_text(wanted)
    return python


def asked(python: Path, program: str) -> list[str]:
    """What a program prints as JSON in an environment."""
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def spark_tried(version: str, arguments: list[str]) -> tuple[list[str], bool]:
    """The row of a Spark's table, and whether all tests have passed."""
    python = environment(f"spark-{version}", PACKAGES[version])
    ours, spark, *packages = asked(python, ASK)
    print(f"Spark {spark}", flush=True)
    told, passed = tested(python, f"spark-{version}", ["-m", "versions", *arguments])
    return [spark, ours, java(), *packages, *told], passed


def client_tried(version: str, arguments: list[str]) -> tuple[list[str], bool]:
    """The row of a server's table with a client of its own, and whether all tests have passed."""
    python = environment(f"spark-{version}", PACKAGES[version])
    packages = [f"pyspark-client=={CLIENTS[version]}", *PACKAGES[version][1:]]
    client = environment(f"client-{version}", packages, without_java=True)
    (_, server, *_), (ours, here, torch, *_) = asked(python, ASK), asked(client, ASK_CLIENT)
    print(f"pyspark-client {here} at Spark {server}", flush=True)
    told, passed = tested(
        python, f"client-{version}", [*OF_CLIENTS, *arguments], CLIENT_PYTHON=str(client)
    )
    return [server, here, ours, java(), torch, *told], passed


def tested(
    python: Path, name: str, arguments: list[str], **variables: str
) -> tuple[list[str], bool]:
    """What a table tells of tests in an environment, and whether all have passed.

    Args:
        python: the environment's.
        name: of pytest's report.
        arguments: for pytest.
        **variables: of the tests' environment.
    """
    report = BUILD / f"{name}.xml"
    settings = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": str(python),
        # Spark's JVMs live for minutes here, too short for the optimizing compiler to pay.
        "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        **variables,
    }
    settings.pop("SPARK_HOME", None)
    report.unlink(missing_ok=True)
    pytest = os.environ.get("PYTEST", "-m pytest").split()
    command = [python, *pytest, "-q", f"--junit-xml={report}", *arguments]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=settings, check=False)
    minutes = (time.monotonic() - started) / 60
    told = [counted(report), f"{minutes:.1f}", time.strftime("%Y-%m-%d")]
    return told, done.returncode == 0


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


def write(kind: str, rows: dict[str, list[str]]) -> None:
    """Put rows into a table of the page, in place of those of the same versions."""
    begin = f"<!-- written by .ci/versions.py {kind} -->"
    before, _, rest = PAGE.read_text().partition(begin)
    table, _, after = rest.partition(END)
    for line in table.strip().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.setdefault(series(cells[0]), cells)
    head = HEADS[kind]
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
        if kind == "python":
            rows[version], passed = python_tried(version)
        else:
            tried = spark_tried if kind == "spark" else client_tried
            rows[version], passed = tried(version, chosen.split())
        if not passed:
            failed.append(version)
    if writes:
        right = {version: row for version, row in rows.items() if version not in failed}
        write(kind, right)
    for row in rows.values():
        print(f"{kind} {' | '.join(row)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
