"""Executors whose Python lacks torch or sparkdl, or has others: the fit says so, with the fix.

One process runs all cases, for its executors need another Python than the test session's. That
Python is a script that puts a directory of fakes before the real packages; each task starts over.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
import torch
from every_row import every
from subprocesses import printed_by

import sparkdl

FAKES = {
    "no-torch": ("torch", "raise ModuleNotFoundError(\"No module named 'torch'\")"),
    "no-pyarrow": ("pyarrow", "raise ModuleNotFoundError(\"No module named 'pyarrow'\")"),
    "other-torch": ("torch", "__version__ = '1.2.3'"),
    "no-sparkdl": ("sparkdl", "raise ModuleNotFoundError(\"No module named 'sparkdl'\")"),
    "other-sparkdl": ("sparkdl", "__version__ = '0.0.1'"),
    "foreign-sparkdl": ("sparkdl", "class HorovodRunner: pass"),
}

SCRIPT = """
import json, pathlib, sys, time
from functools import partial
import torch
from pyspark.sql import functions as F
from torch import nn
from sparkdl import TorchEstimator, TorchModel, create_session

directory, *cases = sys.argv[1:]
spark = create_session(
    "foreign", "local[2]",
    {"spark.python.use.daemon": "false", "spark.python.worker.reuse": "false",
     "spark.ui.enabled": "false"},
)
spark.sparkContext.setLogLevel("OFF")
rows = spark.range(0, 20, 1, 2).select(
    (F.col("id") / 20).alias("features"), (F.col("id") % 2).cast("double").alias("label"))
rows = rows.withColumn("features", F.array("features"))
estimator = TorchEstimator(
    model=nn.Linear(1, 1), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
    numWorkers=2, progress=False, timeout=60)
model = TorchModel.from_module(nn.Linear(1, 1), torch.zeros(1, 1))
answers = {}
for case in cases:
    (pathlib.Path(directory) / "which").write_text(case)
    started = time.monotonic()
    try:
        estimator.fit(rows)
        answers[case] = ["none", "trained", 0]
    except Exception as error:
        answers[case] = [type(error).__name__, str(error), time.monotonic() - started]
    try:
        model.transform(rows).collect()
    except Exception as error:
        answers[case].append(str(error))
print(json.dumps(answers))
spark.stop()
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Name, message and seconds of the error of fit, and the message of transform, by case."""
    directory = tmp_path_factory.mktemp("foreign")
    for case, (package, text) in FAKES.items():
        (directory / case / package).mkdir(parents=True)
        (directory / case / package / "__init__.py").write_text(text + "\n")
    (directory / "true").mkdir()
    python = directory / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'export PYTHONPATH="{directory}/$(cat {directory}/which):$PYTHONPATH"\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (directory / "which").write_text("true")
    environment = {**os.environ, "PYSPARK_PYTHON": str(python)}
    environment["PYSPARK_DRIVER_PYTHON"] = sys.executable
    environment["SPARK_LOCAL_DIRS"] = str(directory / "local")
    printed = printed_by(
        "-c", SCRIPT, directory, *FAKES, "true", env=environment, cwd=directory, timeout=170
    )
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return found


EXPECTED = {
    "no-torch": "the package 'torch' cannot be imported",
    "no-pyarrow": "lacks what PySpark itself needs: No module named 'pyarrow'",
    "other-torch": f"'torch' is 1.2.3 here but {torch.__version__} on the driver",
    "no-sparkdl": "the package 'sparkdl' cannot be imported",
    "other-sparkdl": f"'sparkdl' is 0.0.1 here but {sparkdl.__version__} on the driver",
    "foreign-sparkdl": "'sparkdl' is without a version here",
}


@pytest.mark.nightly
@every("case", EXPECTED)
def test_an_executor_with_another_environment_is_named_with_the_fix(
    answers: dict[str, Any], case: str
) -> None:
    """The same session trains once its executors have the packages."""
    kind, message, _, of_transform = answers[case]
    assert kind == "SetupError"
    for part in (EXPECTED[case], "PYSPARK_PYTHON", sys.executable):
        assert part in message
    assert "Traceback" not in message
    # Spark's own check comes first where pyarrow is missing.
    assert ("No module named 'pyarrow'" if case == "no-pyarrow" else EXPECTED[case]) in of_transform
    assert answers["true"][0] == "none", answers["true"][1]
