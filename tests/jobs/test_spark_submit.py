"""The training job, started as on a cluster: by spark-submit, whose session it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from tables import configuration, make_table, write_configuration

ROOT = Path(__file__).parents[2]


@pytest.mark.gate
@pytest.mark.versions
def test_spark_submit_runs_the_training_job(tmp_path: Path) -> None:
    make_table(tmp_path / "table")
    said = configuration(tmp_path)
    said["baselines"] = {}
    said["session"] = {}
    config = write_configuration(tmp_path, said)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    conf = ["spark.ui.enabled=false", "spark.executor.memory=1024m"]
    done = subprocess.run(
        [
            str(submit),
            "--master",
            "local-cluster[2,1,1024]",
            *(word for each in conf for word in ("--conf", each)),
            str(ROOT / "jobs" / "train.py"),
            "--config",
            config,
            "--run_id",
            "1",
        ],
        env=os.environ
        | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "model" / "_result.json").read_text())
    assert (result["status"], len(result["history"])) == ("complete", 6)
