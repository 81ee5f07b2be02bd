"""The wheel installs where nothing of ours is; what it installed runs the README and jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from test_pages import programs

import sparkdl

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "conf/constraints.txt"
CHECKS = """
import sparkdl
assert "site-packages" in sparkdl.__file__, sparkdl.__file__
for name in sparkdl.__all__:
    getattr(sparkdl, name)
right = model.transform(df).where("label = prediction").count()
print(right, "of 4000 are right")
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYSPARK_PYTHON"}}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_wheel_runs_the_readme_in_an_environment_of_its_own(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert sdist.name.startswith(f"sparkdl_torch-{sparkdl.__version__}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        described = Parser().parsestr(archive.read(metadata).decode())
    assert "sparkdl/py.typed" in names
    assert not [n for n in names if n.startswith(("tests/", "jobs/", "benchmarks/", "docs/"))]
    assert described["License-Expression"] == "Apache-2.0"
    assert not [n for n in described.get_all("Requires-Dist") if re.match(r"pyspark[^;]*$", n)]
    # A package index shows the README without the files beside it.
    links = re.findall(r"\]\(([^)]+)\)", described.get_payload())
    assert len(links) > 10
    assert not [link for link in links if not link.startswith("https://")]
    with tarfile.open(sdist) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"tests", "conf", "docs", "jobs", "Makefile", "CHANGELOG.md"} <= top

    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    install = (python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS)
    run(*install, wheel, cwd=tmp_path)
    program = "import sparkdl\ntry: sparkdl.TorchEstimator\nexcept ImportError as e: print(e)"
    assert "pip install 'sparkdl-torch[spark]'" in run(python, "-c", program, cwd=tmp_path)
    run(*install, f"{wheel}[spark,jobs]", cwd=tmp_path)
    path = run(python, "-m", "sparkdl.jobs", "--path", cwd=tmp_path).strip()
    for jobs in ([tmp_path / "venv/bin/sparkdl-jobs"], [python, path]):
        assert "--config FILE" in run(*jobs, "evaluate", "--help", cwd=tmp_path)
    (notebook,) = programs("README.md", "In a notebook")
    script = tmp_path / "program.py"
    script.write_text(notebook + CHECKS)
    *table, right = run(python, script, cwd=tmp_path).splitlines()
    assert "|label|prediction|count|" in table
    assert int(right.split()[0]) > 3800
    assert "What each worker did when" in (tmp_path / "report.html").read_text()
