"""train.py, killed with all its processes at random moments and started again."""

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

import pytest
from job_case import configuration, make_table, write_configuration
from safetensors.torch import load_file

JOB = Path(__file__).parents[2] / "jobs" / "train.py"
OWN_LOSS = """
import time
import torch

def loss(outputs, targets):
    time.sleep(0.02)  # so that there is something to interrupt
    return torch.nn.functional.cross_entropy(outputs, targets)
"""


def started(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """train.py with the settings of conf/, in a process group of its own, beside mymodule.py."""
    command = [sys.executable, str(JOB), "--config", "job.yaml", "--log_format", "json", *arguments]
    log = open(folder / "log.txt", "ab")  # noqa: SIM115
    environment = {**os.environ, "SPARK_CONF_DIR": str(JOB.parents[1] / "conf")}
    return subprocess.Popen(
        command, cwd=folder, stdout=log, stderr=log, process_group=0, env=environment
    )


def kill(job: subprocess.Popen[bytes]) -> None:
    os.killpg(job.pid, signal.SIGKILL)
    job.wait(30)


def wait(job: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return job.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def weights(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "model" / "module.safetensors"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_table(tmp_path / "table")
    (tmp_path / "mymodule.py").write_text(OWN_LOSS)
    said = configuration(tmp_path, loss="mymodule.loss", checkpointRounds=1)
    for section in ("stages", "baselines", "evaluators"):
        said[section] = type(said[section])()
    said["rows"] = {"select": ["array(x) as features", "label"]}
    said["estimator"]["model"]["init_args"]["in_features"] = 1
    write_configuration(tmp_path, said)
    return tmp_path


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments_and_started_again_it_leaves_one_right_model(
    folder: Path, seed: int
) -> None:
    generator = random.Random(seed)
    began = time.monotonic()
    expected = started(folder, "--run_id", "calm")
    assert wait(expected, 120) == 0, (folder / "log.txt").read_text()
    lasts = time.monotonic() - began
    calm = weights(folder)
    killed = 0
    for _ in range(5):
        job = started(folder, "--run_id", "stormy")
        code = wait(job, generator.uniform(0.1, 1.1) * lasts)
        if code is None:
            killed += 1
            kill(job)
        else:
            assert code == 0, (folder / "log.txt").read_text()
        # What is there is always one whole model: the old one, or the new one.
        result = json.loads((folder / "model" / "_result.json").read_text())
        assert result["run_id"] in ("calm", "stormy")
        assert weights(folder).keys() == calm.keys()
    last = started(folder, "--run_id", "stormy")
    assert wait(last, 120) == 0, (folder / "log.txt").read_text()
    assert json.loads((folder / "model" / "_result.json").read_text())["run_id"] == "stormy"
    assert all((weights(folder)[name] == value).all() for name, value in calm.items())
    left = {path.name for path in folder.iterdir() if path.name.startswith("model")}
    assert left == {"model"}
    assert killed > 0


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_of_two_at_once_one_is_told_to_come_back_later(folder: Path) -> None:
    first = started(folder, "--run_id", "a")
    deadline = time.monotonic() + 60
    while not (folder / "model.sparkdl-job" / "in-use.json").exists():
        assert time.monotonic() < deadline, (folder / "log.txt").read_text()
        assert first.poll() is None
        time.sleep(0.1)
    # On the brink of its end the first would let the second in.
    os.killpg(first.pid, signal.SIGSTOP)
    try:
        second = started(folder, "--run_id", "a", "--result_file", "second.json")
        assert wait(second, 120) == 75, (folder / "log.txt").read_text()
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    told = json.loads((folder / "second.json").read_text())
    assert f"is being written by process {first.pid} " in told["error"]["message"]
    assert wait(first, 120) == 0, (folder / "log.txt").read_text()
    third = started(folder, "--run_id", "a")
    assert wait(third, 120) == 0
    assert [path.name for path in folder.glob("model*")] == ["model"]
