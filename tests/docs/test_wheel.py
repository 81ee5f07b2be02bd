"""The wheel installs where nothing of ours is, and what it installed trains."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "conf/constraints.txt"
PROGRAM = """
from functools import partial

import sparkdl
import torch
from torch import nn

assert "site-packages" in sparkdl.__file__, sparkdl.__file__
for name in sparkdl.__all__:
    getattr(sparkdl, name)
spark = sparkdl.create_session("wheel", master="local[2]", conf={"spark.ui.enabled": "false"})
df = spark.range(400).selectExpr("array(id / 400D, 1D) AS features", "id / 200D + 3D AS label")
model = sparkdl.TorchEstimator(
    model=nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)),
    loss=nn.MSELoss(),
    optimizer=partial(torch.optim.SGD, lr=0.3),
    epochs=20,
    numWorkers=2,
    progress=False,
).fit(df)
worst = model.transform(df).selectExpr("max(abs(prediction - label))").first()[0]
assert worst < 0.05, worst  # the label is a line, which least squares finds
print("trained from the wheel")
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


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_wheel_trains_in_an_environment_of_its_own(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sparkdl/py.typed" in names
    assert not [n for n in names if n.startswith(("tests/", "jobs/", "benchmarks/", "docs/"))]

    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, wheel, cwd=tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert "trained from the wheel" in run(python, program, cwd=tmp_path)
    assert "sparkdl-prepare" in run(tmp_path / "venv/bin/sparkdl-prepare", "--help", cwd=tmp_path)
