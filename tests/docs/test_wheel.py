"""The wheel installs where nothing of ours is; what it installed runs the README and jobs."""

from __future__ import annotations

import os
import re
import runpy
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
df.write.mode("overwrite").parquet("rows")
model.write().overwrite().save("model")
right = model.transform(spark.read.parquet("rows")).where("label = prediction").count()
print(spark.version, right)
"""
LOADED = """
from sparkdl import TorchModel, create_session
spark = create_session("later", master="local[2]")
rows = spark.read.parquet("rows")
# Its builder is a lambda, hence a pickle.
print(TorchModel.load("model", trust=True).transform(rows).where("label = prediction").count())
"""
MODULE = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
"""
JOB = """
source: {class_path: sparkdl.jobs.Files, init_args: {path: rows, format: parquet}}
estimator:
  model: own_net.Net
  loss: torch.nn.functional.cross_entropy
  optimizer: Adam
  learningRate: 0.05
  numWorkers: 2
  progress: false
model: job-model
trust: [own_net]
predictions: predictions
"""
SPARKS = ("3.5", "4.3")
"""The oldest and the newest; what a program saves with one is loaded with the next."""


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
@pytest.mark.timeout(1200)
def test_a_wheel_runs_readme_and_jobs_where_only_it_is_installed(tmp_path: Path) -> None:
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
    script, right = tmp_path / "program.py", ""
    script.write_text(notebook + CHECKS)
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as sent:
        sent.writestr("own_net.py", MODULE)
    (tmp_path / "job.yaml").write_text(JOB)
    submit = (tmp_path / "venv/bin/spark-submit", "--master", "local[2]", "--py-files", "own.zip")
    packages = runpy.run_path(str(ROOT / ".ci/versions.py"))["PACKAGES"]
    for spark in SPARKS:
        run(python, "-m", "pip", "install", "-q", *packages[spark], cwd=tmp_path)
        if right:
            *_, again = run(python, "-c", LOADED, cwd=tmp_path).splitlines()
            assert again == right
        *table, last = run(python, script, cwd=tmp_path).splitlines()
        version, right = last.split()
        assert version.startswith(spark)
        assert "|label|prediction|count|" in table
        assert int(right) > 3800
        assert "What each worker did when" in (tmp_path / "report.html").read_text()
        for job in ("train", "predict"):
            step = (*submit, path, job, "--config", "job.yaml")
            run(*step, cwd=tmp_path, PYSPARK_PYTHON=str(python))
        assert (tmp_path / "predictions/_result.json").exists()
