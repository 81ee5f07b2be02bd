"""Jobs that are killed with all their processes at random moments and started again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from tables import configuration, make_table, write_configuration

JOBS = Path(__file__).parents[2] / "jobs"
OWN_LOSS = """
import time
import torch

def loss(outputs, targets):
    time.sleep(0.02)  # so that there is something to interrupt
    return torch.nn.functional.cross_entropy(outputs, targets)
"""


def started(folder: Path, *arguments: str, job: str = "train") -> subprocess.Popen[bytes]:
    """A job with the settings of conf/, in a process group of its own, beside mymodule.py."""
    script = str(JOBS / f"{job}.py")
    command = [sys.executable, script, "--config", "job.yaml", "--log_format", "json", *arguments]
    environment = {**os.environ, "SPARK_CONF_DIR": str(JOBS.parent / "conf")}
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, process_group=0, env=environment
        )


def log(folder: Path) -> str:
    return (folder / "log.txt").read_text()


def kill(job: subprocess.Popen[bytes]) -> None:
    os.killpg(job.pid, signal.SIGKILL)
    job.wait(30)


def wait(job: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return job.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def weights(folder: Path) -> dict[str, Any]:
    found = load_file(folder / "model" / "module.safetensors")
    return {name: tensor.numpy() for name, tensor in found.items()}


def predictions(folder: Path) -> dict[str, Any]:
    table = pq.read_table(folder / "predictions").sort_by("id")
    # A prediction is an array here: the loss does not say what the outputs mean.
    return {name: np.array(table[name].to_pylist()) for name in ("id", "prediction")}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(map(np.array_equal, one.values(), other.values()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_table(tmp_path / "table")
    (tmp_path / "mymodule.py").write_text(OWN_LOSS)
    said = configuration(tmp_path, loss="mymodule.loss", checkpointRounds=1)
    for section in ("stages", "baselines", "evaluators"):
        said[section] = type(said[section])()
    said["rows"] = {"select": ["id", "color", "array(x) as features", "label"]}
    said["estimator"]["model"]["init_args"]["in_features"] = 1
    write_configuration(tmp_path, said)
    return tmp_path


KILLS = 5
"""Of each seed; 20 in all."""


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "seed"), [("train", 0), ("train", 1), ("predict", 2), ("predict", 3)]
)
def test_killed_at_random_moments_and_started_again_it_leaves_one_right_output(
    folder: Path, name: str, seed: int
) -> None:
    generator = random.Random(seed)
    output, contents = {"train": ("model", weights), "predict": ("predictions", predictions)}[name]
    if name == "predict":
        assert wait(started(folder, "--run_id", "model"), 120) == 0, log(folder)
    began = time.monotonic()
    expected = started(folder, "--run_id", "calm", job=name)
    assert wait(expected, 120) == 0, log(folder)
    lasts = time.monotonic() - began
    calm = contents(folder)

    def complete() -> str:
        """Whose output is there. It is always a whole one: the run's before, or this one's."""
        assert same(contents(folder), calm)
        return json.loads((folder / output / "_result.json").read_text())["run_id"]

    killed, runs, is_first = 0, 0, True
    while killed < KILLS:
        run_id = f"stormy {runs}"
        began = time.monotonic()
        job = started(folder, "--run_id", run_id, job=name)
        code = wait(job, generator.uniform(0.1, 1.1) * lasts)
        if code is None:
            kill(job)
        else:
            assert code == 0, log(folder)
            if is_first:  # the machine may be less busy than it was
                lasts = time.monotonic() - began
        if complete() != run_id:
            assert code is None
            killed, is_first = killed + 1, False
        else:
            # A kill behind this would interrupt nothing, in this run no more.
            runs, is_first = runs + 1, True
            assert runs < 4 * KILLS
    last = started(folder, "--run_id", f"stormy {runs}", job=name)
    assert wait(last, 120) == 0, log(folder)
    assert complete() == f"stormy {runs}"
    left = {path.name for path in folder.iterdir() if path.name.startswith(output)}
    assert left == {output}
