"""The benchmarks for GPUs run, at toy size and without one: what they do is not forgotten code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


NOT_THERE = ("pyspark", "py4j", "pandas", "safetensors", "tqdm", "PIL", "cryptography")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "reports"),
    [
        ("resnet50", "all_reduce_one_rank_images_per_second"),
        ("averaging_round", "milliseconds_a_round"),
        ("training_loop", "rows_per_second"),
    ],
)
def test_each_runs_at_toy_size_without_one_and_without_spark(
    tmp_path: Path, script: str, reports: str
) -> None:
    for name in NOT_THERE:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} here')")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu" / f"{script}.py", "--toy"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["ratio"] > 0
    assert report["detail"]["toy"]
    assert report["detail"][reports]
