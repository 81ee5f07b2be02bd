"""A worker computes on as many threads as Spark gives its task cores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from subprocesses import printed_by

PROGRAM = """
import functools
import json
import os
import sys
from pathlib import Path

import torch
from pyspark.sql import functions as F
from torch import nn

import sparkdl

class Noting(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.folder = folder

    def forward(self, features):
        Path(self.folder, str(os.getpid())).write_text(str(torch.get_num_threads()))
        return self.layer(features)

def threads():
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

if __name__ == "__main__":
    folder = sys.argv[1]
    conf = {"spark.executor.memory": "1024m", "spark.ui.enabled": "false", "spark.task.cpus": "3"}
    spark = sparkdl.create_session("threads", master="local-cluster[1,3,1024]", conf=conf)
    spark.sparkContext.setLogLevel("OFF")
    told = sparkdl.run(threads, num_workers=1)
    features = F.array(F.rand(1), F.rand(2)).cast("array<float>")
    frame = spark.range(20).select(features.alias("features"), (F.col("id") % 2).alias("label"))
    sparkdl.TorchEstimator(
        model=functools.partial(Noting, folder),
        loss=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        strategy=sparkdl.GradientAllReduce(),
        progress=False,
    ).fit(frame)
    Path(folder, str(os.getpid())).unlink(missing_ok=True)  # the driver tries a step
    print(json.dumps([told, [path.read_text() for path in Path(folder).iterdir()]]))
    spark.stop()
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_task_of_three_cores_computes_on_three_threads(tmp_path: Path) -> None:
    program, notes = tmp_path / "program.py", tmp_path / "notes"
    program.write_text(PROGRAM)
    notes.mkdir()
    printed = printed_by(program, notes)
    called, fitted = json.loads(printed.splitlines()[-1])
    assert called == [[3, "3"]]
    assert fitted == ["3"]
