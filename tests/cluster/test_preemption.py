"""A driver that is told to end writes a checkpoint, leaves, and goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from sparkdl.checkpoint.storage import CheckpointStore

SCRIPT = Path(__file__).parent / "train_on_hosts.py"
EPOCHS = 150

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


def start(output: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A driver with real executors, as a scheduler would start it: nothing but a script."""
    roots = [str(SCRIPT.parents[2]), str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, SCRIPT, output, f"epochs={EPOCHS}", *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(roots),
        "PYSPARK_SUBMIT_ARGS": "--master local-cluster[2,1,1024] --conf spark.ui.enabled=false "
        "--conf spark.executor.memory=512m pyspark-shell",
        "SPARK_LOCAL_DIRS": str(output.parent / "local"),
    }
    return subprocess.Popen(list(map(str, command)), env=environment, start_new_session=True)


def result(output: Path) -> dict[str, Any]:
    return json.loads(output.read_text())


def wait_until(condition: Callable[[], object], driver: subprocess.Popen[Any]) -> None:
    """Wait for what happens while a driver runs."""
    assert eventually(lambda: driver.poll() is not None or condition(), 120)
    assert driver.poll() is None


def wait_for_checkpoint(path: Path, driver: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: [*path.glob("checkpoint-*")], driver)


def processes_of(session: int) -> list[str]:
    """Command lines of the processes in a session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it ended in between
            continue
    return [line for line in found if line]


def test_sigterm_writes_a_checkpoint_and_the_next_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    driver = start(tmp_path / "first", f"checkpointPath={json.dumps(str(path))}")
    try:
        wait_for_checkpoint(path, driver)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(10) == 128 + signal.SIGTERM
    finally:
        driver.kill()
    assert not (tmp_path / "first").exists()
    assert eventually(lambda: processes_of(driver.pid) == [], 10)

    saved = CheckpointStore(str(path), keep_last=1).newest()
    assert saved is not None
    assert {"rank-00000", "rank-00001"} <= saved.contents.keys()
    assert saved.description["progress"]["epoch"] < EPOCHS

    assert start(tmp_path / "second", f"checkpointPath={json.dumps(str(path))}").wait(120) == 0
    assert start(tmp_path / "whole").wait(120) == 0
    assert result(tmp_path / "second")["examples"] == [60] * EPOCHS
    assert result(tmp_path / "second") == result(tmp_path / "whole")
